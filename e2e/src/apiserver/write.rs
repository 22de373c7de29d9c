//! Creates, updates, patches and deletions.

use std::sync::Arc;

use serde_json::{Value, json};

use super::admission::{Admission, Writing};
use super::failure::Failure;
use super::json_patch;
use super::kind::Kind;
use super::read;
use super::roles::User;
use super::schema;
use super::store::{Key, Store};
use super::target::Target;

/// Maximum size of an object in etcd, in bytes.
const OBJECT_MAX: usize = 3 << 19;

/// A write, and warnings for the client (`Warning: 299`).
#[derive(Debug)]
pub(super) struct Written {
    pub(super) code: u16,
    pub(super) object: Arc<Value>,
    pub(super) warnings: Vec<String>,
}

/// How a write changes an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The new object replaces the old one (`PUT`).
    Replace,
    /// JSON merge patch (RFC 7396): `PATCH` with `application/merge-patch+json`.
    Merge,
    /// JSON patch (RFC 6902): `PATCH` with `application/json-patch+json`.
    Json,
}

/// The user that writes, and the policies that may forbid the write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer<'a> {
    pub(super) user: &'a User,
    pub(super) admission: &'a Admission,
}

impl Writer<'_> {
    fn check(
        &self,
        kind: &Kind,
        target: &Target,
        old: Option<&Value>,
        new: Option<&Value>,
    ) -> Result<(), Failure> {
        self.admission.check(Writing {
            user: self.user,
            kind,
            subresource: target.subresource.as_deref(),
            old,
            new,
        })
    }
}

/// Handles a `POST`: stores a new object.
pub(super) fn create(
    store: &mut Store,
    kind: &Kind,
    target: &Target,
    writer: Writer<'_>,
    mut object: Value,
) -> Result<Written, Failure> {
    place(kind, target, &mut object)?;
    if object["metadata"]["name"].is_null()
        && let Some(prefix) = object["metadata"]["generateName"].as_str()
    {
        object["metadata"]["name"] = json!(format!("{prefix}{:05x}", store.revision()));
    }
    let name = object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if name.is_empty() {
        return Err(Failure::invalid(
            kind,
            "",
            "metadata.name",
            "Required value: name or generateName is required",
        ));
    }
    let namespace = target.namespace.clone().unwrap_or_default();
    if store.get(kind, &(namespace, name.clone())).is_some() {
        return Err(Failure::exists(kind, &name));
    }
    let warnings = admit(kind, target, None, &mut object)?;
    writer.check(kind, target, None, Some(&object))?;
    if kind.status
        && let Some(fields) = object.as_object_mut()
    {
        fields.remove("status");
    }
    object["metadata"]["generation"] = json!(1);
    let object = stored(store, kind, object)?;
    Ok(Written {
        code: 201,
        object,
        warnings,
    })
}

/// `PUT` or `PATCH` of an object or of its status.
pub(super) fn change(
    store: &mut Store,
    kind: &Kind,
    target: &Target,
    writer: Writer<'_>,
    (how, body): (Change, Value),
) -> Result<Written, Failure> {
    let key = read::key(target)?;
    let of_status = match target.subresource.as_deref() {
        None => false,
        Some("status") if kind.status => true,
        Some(_) => return Err(Failure::UnknownPath),
    };
    let old = store.get(kind, &key);
    let old = old.ok_or_else(|| Failure::not_found(kind, &key.1))?;
    check_revision(kind, &key, &old, how, &body)?;
    let mut new = match how {
        Change::Replace => body,
        Change::Merge => {
            let mut new = (*old).clone();
            merge(&mut new, body);
            new
        }
        Change::Json => json_patch::apply(&old, &body)?,
    };
    if of_status {
        let status = new["status"].take();
        new = (*old).clone();
        new["status"] = status;
    } else if kind.status {
        match old.get("status") {
            Some(status) => new["status"] = status.clone(),
            None => {
                new.as_object_mut().map(|fields| fields.remove("status"));
            }
        }
    }
    place(kind, target, &mut new)?;
    for field in ["uid", "creationTimestamp", "generation", "resourceVersion"] {
        new["metadata"][field] = old["metadata"][field].clone();
    }
    let warnings = admit(kind, target, Some(&old), &mut new)?;
    writer.check(kind, target, Some(&old), Some(&new))?;
    if new == *old {
        return Ok(Written {
            code: 200,
            object: old,
            warnings,
        });
    }
    if content(&new) != content(&old) {
        let generation = old["metadata"]["generation"].as_u64().unwrap_or(1);
        new["metadata"]["generation"] = json!(generation + 1);
    }
    let object = stored(store, kind, new)?;
    Ok(Written {
        code: 200,
        object,
        warnings,
    })
}

/// Handles a `DELETE` of one object. `options` are its `DeleteOptions`, or null.
pub(super) fn delete(
    store: &mut Store,
    kind: &Kind,
    target: &Target,
    writer: Writer<'_>,
    options: &Value,
) -> Result<Written, Failure> {
    let key = read::key(target)?;
    let old = store.get(kind, &key);
    let old = old.ok_or_else(|| Failure::not_found(kind, &key.1))?;
    for field in ["uid", "resourceVersion"] {
        let wanted = &options["preconditions"][field];
        if !wanted.is_null() && *wanted != old["metadata"][field] {
            return Err(Failure::conflict(kind, &key.1));
        }
    }
    writer.check(kind, target, Some(&old), None)?;
    let object = store.delete(kind, &key);
    let object = object.ok_or_else(|| Failure::not_found(kind, &key.1))?;
    Ok(Written {
        code: 200,
        object,
        warnings: Vec::new(),
    })
}

fn stored(store: &mut Store, kind: &Kind, object: Value) -> Result<Arc<Value>, Failure> {
    if object.to_string().len() > OBJECT_MAX {
        return Err(Failure::internal("etcdserver: request is too large"));
    }
    let stored = store.put(kind, object);
    stored.map_err(|error| Failure::bad_request(format!("{error:#}")))
}

/// All fields except metadata and status. If they change, the object gets a new generation.
fn content(object: &Value) -> Vec<(&String, &Value)> {
    let fields = object.as_object().into_iter().flatten();
    let is_content = |name: &str| name != "metadata" && name != "status";
    fields.filter(|(name, _)| is_content(name)).collect()
}

/// Checks the revision that the client saw, if it sent one. Updates of some kinds must send it.
fn check_revision(
    kind: &Kind,
    key: &Key,
    old: &Value,
    how: Change,
    body: &Value,
) -> Result<(), Failure> {
    let seen = body["metadata"]["resourceVersion"]
        .as_str()
        .unwrap_or_default();
    let required = kind.is_custom() || kind.plural == "leases";
    if seen.is_empty() && how == Change::Replace && required {
        return Err(Failure::invalid(
            kind,
            &key.1,
            "metadata.resourceVersion",
            "Invalid value: 0x0: must be specified for an update",
        ));
    }
    if !seen.is_empty() && old["metadata"]["resourceVersion"] != seen {
        return Err(Failure::conflict(kind, &key.1));
    }
    Ok(())
}

/// Checks that name, namespace, kind and version of the object match the URL. Sets a missing
/// namespace.
fn place(kind: &Kind, target: &Target, object: &mut Value) -> Result<(), Failure> {
    let wanted = (kind.kind.as_str(), kind.api_version());
    let given = (object["kind"].as_str(), object["apiVersion"].as_str());
    if given != (Some(wanted.0), Some(wanted.1.as_str())) {
        return Err(Failure::bad_request(format!(
            "the API version in the data ({:?}, {:?}) does not match the expected API version ({}, {})",
            given.1, given.0, wanted.1, wanted.0
        )));
    }
    if !object["metadata"].is_object() {
        return Err(Failure::bad_request("metadata is no object"));
    }
    if let Some(namespace) = &target.namespace {
        match object["metadata"]["namespace"].as_str() {
            None => object["metadata"]["namespace"] = json!(namespace),
            Some(given) if given == namespace => {}
            Some(_) => {
                return Err(Failure::bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request",
                ));
            }
        }
    }
    if let Some(name) = &target.name
        && object["metadata"]["name"] != name.as_str()
    {
        return Err(Failure::bad_request(
            "the name of the object does not match the name on the URL",
        ));
    }
    Ok(())
}

/// Checks the schema and the rules of single kinds. Returns warnings.
fn admit(
    kind: &Kind,
    target: &Target,
    old: Option<&Value>,
    object: &mut Value,
) -> Result<Vec<String>, Failure> {
    let name = object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if kind.plural == "events" {
        check_event(kind, &name, object)?;
    }
    let Some(schema) = &kind.schema else {
        return Ok(Vec::new());
    };
    let unknown = schema::prune(schema, object);
    let unknown = unknown
        .iter()
        .map(|path| format!("unknown field \"{path}\""));
    let unknown: Vec<String> = unknown.collect();
    let validation = target.parameter("fieldValidation").unwrap_or("Warn");
    if validation == "Strict" && !unknown.is_empty() {
        return Err(Failure::bad_request(format!(
            "{} in version \"{}\" cannot be handled as a {}: strict decoding error: {}",
            kind.kind,
            kind.version,
            kind.kind,
            unknown.join(", ")
        )));
    }
    if let Some((field, problem)) = schema::problem(schema, old, object) {
        return Err(Failure::invalid(kind, &name, &field, &problem));
    }
    Ok(if validation == "Ignore" {
        Vec::new()
    } else {
        unknown
    })
}

/// An event is in the namespace of its object, or in `default` if its object has no namespace.
fn check_event(kind: &Kind, name: &str, event: &Value) -> Result<(), Failure> {
    let (field, of_new_api) = match kind.group.as_str() {
        "" => ("involvedObject", false),
        _ => ("regarding", true),
    };
    let namespace = event[field]["namespace"].as_str().filter(|n| !n.is_empty());
    if event["metadata"]["namespace"] != namespace.unwrap_or("default") {
        let field = format!("{field}.namespace");
        return Err(Failure::invalid(
            kind,
            name,
            &field,
            "Invalid value: does not match event.namespace",
        ));
    }
    let required: &[&str] = match of_new_api {
        true => &[
            "eventTime",
            "reportingController",
            "reportingInstance",
            "action",
            "reason",
            "type",
        ],
        false => &[],
    };
    let missing = required
        .iter()
        .find(|field| event[**field].as_str().unwrap_or_default().is_empty());
    match missing {
        Some(field) => Err(Failure::invalid(kind, name, field, "Required value")),
        None => Ok(()),
    }
}

/// Applies a JSON merge patch (RFC 7396).
fn merge(object: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *object = patch;
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    let Some(fields) = object.as_object_mut() else {
        return;
    };
    for (name, value) in patch {
        if value.is_null() {
            fields.remove(&name);
        } else {
            merge(fields.entry(name).or_insert(Value::Null), value);
        }
    }
}
