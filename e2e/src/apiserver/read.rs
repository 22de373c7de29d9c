//! One object, and lists in pages.

use serde_json::{Value, json};

use super::failure::Failure;
use super::kind::Kind;
use super::selection::Selection;
use super::store::{Key, Store};
use super::target::Target;

/// What a client wants of an object (`Accept`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Whole,
    /// Only the metadata, as a `PartialObjectMetadata`.
    Metadata,
}

impl View {
    /// The view that an `Accept` header selects.
    pub(super) fn of(accept: &str) -> Self {
        if accept.contains("as=PartialObjectMetadata") {
            Self::Metadata
        } else {
            Self::Whole
        }
    }

    /// An object as a watch or a `get` sends it.
    pub(super) fn object(self, object: &Value) -> Value {
        match self {
            Self::Whole => object.clone(),
            Self::Metadata => json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
                "metadata": object["metadata"],
            }),
        }
    }

    /// An item of a list: items of Kubernetes' own kinds have no `kind` and `apiVersion`.
    fn item(self, kind: &Kind, object: &Value) -> Value {
        let mut item = self.object(object);
        if self == Self::Whole
            && !kind.is_custom()
            && let Some(fields) = item.as_object_mut()
        {
            fields.remove("kind");
            fields.remove("apiVersion");
        }
        item
    }

    fn list(self, kind: &Kind) -> (String, String) {
        match self {
            Self::Whole => (format!("{}List", kind.kind), kind.api_version()),
            Self::Metadata => (
                "PartialObjectMetadataList".to_owned(),
                "meta.k8s.io/v1".to_owned(),
            ),
        }
    }
}

/// The object that `target` names, in this view.
pub(super) fn get(
    store: &Store,
    kind: &Kind,
    target: &Target,
    view: View,
) -> Result<Value, Failure> {
    let key = key(target)?;
    let object = store.get(kind, &key);
    let object = object.ok_or_else(|| Failure::not_found(kind, &key.1))?;
    Ok(view.object(&object))
}

/// Namespace and name of a URL.
pub(super) fn key(target: &Target) -> Result<Key, Failure> {
    let name = target.name.clone();
    let name = name.ok_or_else(|| Failure::method("the server does not allow this method"))?;
    Ok((target.namespace.clone().unwrap_or_default(), name))
}

/// One page of a list.
///
/// A later page shows the objects at the time of its own request, but has the revision of the first
/// page. So a watch from that revision repeats the changes made between the pages.
pub(super) fn list(
    store: &Store,
    kind: &Kind,
    target: &Target,
    view: View,
    null_items: bool,
) -> Result<Value, Failure> {
    let selection = selection(target)?;
    let limit = match target.parameter("limit") {
        None | Some("0") => usize::MAX,
        Some(limit) => limit
            .parse()
            .map_err(|_| Failure::bad_request("invalid limit"))?,
    };
    let (revision, after) = match target.parameter("continue") {
        None | Some("") => (store.revision(), None),
        Some(token) => {
            let (revision, key) = position(token)?;
            if store.reaches(kind, revision).is_err() {
                return Err(Failure::expired(
                    "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter.",
                ));
            }
            (revision, Some(key))
        }
    };
    let mut objects = store
        .objects(kind, after.as_ref())
        .filter(|((namespace, _), _)| target.namespace.as_ref().is_none_or(|n| n == namespace))
        .filter(|(_, object)| selection.selects(object))
        .peekable();
    let mut items = Vec::new();
    let mut last = None;
    while items.len() < limit
        && let Some((key, object)) = objects.next()
    {
        items.push(view.item(kind, object));
        last = Some(key);
    }
    let mut metadata = json!({"resourceVersion": revision.to_string()});
    if objects.peek().is_some()
        && let Some((namespace, name)) = last
    {
        metadata["continue"] = json!(format!("{revision}:{namespace}/{name}"));
        if selection.is_empty() {
            metadata["remainingItemCount"] = json!(objects.count());
        }
    }
    let items = if null_items {
        Value::Null
    } else {
        items.into()
    };
    let (kind, version) = view.list(kind);
    Ok(json!({"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}))
}

/// The selectors of a list or a watch.
pub(super) fn selection(target: &Target) -> Result<Selection, Failure> {
    let labels = target.parameter("labelSelector");
    Selection::parse(labels, target.parameter("fieldSelector"))
}

fn position(token: &str) -> Result<(u64, Key), Failure> {
    let parse = || {
        let (revision, key) = token.split_once(':')?;
        let (namespace, name) = key.split_once('/')?;
        Some((
            revision.parse().ok()?,
            (namespace.to_owned(), name.to_owned()),
        ))
    };
    parse().ok_or_else(|| Failure::bad_request("continue key is not valid"))
}
