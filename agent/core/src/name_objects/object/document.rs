//! Objects as documents of YAML or JSON, in the shape of the Kubernetes API.

use std::{collections::HashSet, net::IpAddr};

use dns_policy::{name::Fqdn, wall_time};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    API_VERSION, AddressStatus, Degraded, KIND, MAX_ADDRESSES, MAX_ADDRESSES_OF_OBJECT, MAX_NAMES,
    NameStatus, ObjectKey, Resolver, Status, UnixTime, Version,
};
use crate::name_objects::dns_name::{self, NameError};

/// Maximum number of flaws of an object that are described.
const FLAWS: usize = 4;
const SECOND: u64 = 1_000_000_000;
/// Maximum number of characters that are kept of the reason, and of the message, of a condition.
const LONGEST_TEXT: usize = 256;

/// Why a document is not an object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// It does not have the fields of an object.
    #[error("{0}; an object has apiVersion, kind, metadata.name and spec.name")]
    Shape(String),
    /// It is of another kind or version.
    #[error("is {kind:?} of {api_version:?}; only {KIND} of {API_VERSION} is read")]
    Kind { kind: String, api_version: String },
    /// Its `spec.name` cannot be used.
    #[error("spec.name {name:?} {error}")]
    Name {
        name: String,
        /// What is wrong with it.
        error: NameError,
    },
}

/// An object that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The object, without the parts of its status that cannot be used.
    pub object: Resolver,
    /// Parts of its status that were left out, the first few: paths and reasons.
    pub flaws: Vec<String>,
}

impl Resolver {
    /// Reads a document. `namespace` is its namespace if it names none.
    ///
    /// # Errors
    /// It is not an object, or its name cannot be used. A faulty status is no error: its entries that
    /// cannot be used are left out and are [`Read::flaws`].
    pub fn read(document: &Value, namespace: &str) -> Result<Read, ObjectError> {
        let document = Document::deserialize(document)
            .map_err(|error| ObjectError::Shape(error.to_string()))?;
        if document.kind != KIND || document.api_version != API_VERSION {
            return Err(ObjectError::Kind {
                kind: document.kind,
                api_version: document.api_version,
            });
        }
        let text = document.spec.name;
        let name =
            dns_name::parse(&text).map_err(|error| ObjectError::Name { name: text, error })?;
        let mut flaws = Flaws::default();
        let status = status(document.status, &name, &mut flaws);
        let metadata = document.metadata;
        let object = Self {
            key: ObjectKey {
                namespace: metadata.namespace.unwrap_or_else(|| namespace.to_owned()),
                name: metadata.name,
            },
            version: Version(metadata.resource_version.unwrap_or_default()),
            name,
            status,
        };
        Ok(Read {
            object,
            flaws: flaws.described,
        })
    }

    /// The object as a document, without a version if it has none.
    pub fn document(&self) -> Value {
        let mut metadata = json!({"namespace": self.key.namespace, "name": self.key.name});
        if !self.version.0.is_empty() {
            metadata["resourceVersion"] = Value::from(self.version.0.as_str());
        }
        json!({
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": metadata,
            "spec": {"name": self.name.as_str()},
            "status": self.status.document(),
        })
    }
}

impl Status {
    /// The status as a document: the value of the field `status`.
    pub fn document(&self) -> Value {
        let names: Vec<_> = self.names.iter().map(NameDocument::of).collect();
        json!({"resolvedNames": names})
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    api_version: String,
    kind: String,
    metadata: Metadata,
    spec: Spec,
    #[serde(default)]
    status: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    namespace: Option<String>,
    resource_version: Option<String>,
}

#[derive(Deserialize)]
struct Spec {
    name: String,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct NameDocument {
    #[serde(default)]
    conditions: Vec<ConditionDocument>,
    dns_name: String,
    #[serde(default)]
    resolved_addresses: Vec<AddressDocument>,
    #[serde(default)]
    resolution_failures: i64,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConditionDocument {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
    #[serde(default)]
    last_transition_time: Option<String>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct AddressDocument {
    ip: String,
    ttl_seconds: i64,
    #[serde(default)]
    last_lookup_time: Option<String>,
}

#[derive(Default)]
struct Flaws {
    described: Vec<String>,
}

impl Flaws {
    fn add(&mut self, describe: impl FnOnce() -> String) {
        if self.described.len() < FLAWS {
            self.described.push(describe());
        }
    }
}

fn status(document: Option<Value>, spec: &Fqdn, flaws: &mut Flaws) -> Status {
    let mut status = Status::default();
    let Some(mut document) = document else {
        return status;
    };
    let entries = match document.get_mut("resolvedNames").map(Value::take) {
        None | Some(Value::Null) => return status,
        Some(Value::Array(entries)) => entries,
        Some(_) => {
            flaws.add(|| "status.resolvedNames: is not a list".to_owned());
            return status;
        }
    };
    let mut known = HashSet::new();
    let mut room = MAX_ADDRESSES_OF_OBJECT;
    for (index, entry) in entries.into_iter().enumerate() {
        let place = |text: &str| format!("status.resolvedNames[{index}]{text}");
        if status.names.len() == MAX_NAMES {
            flaws.add(|| place(": an object has at most 250 names"));
            break;
        }
        let entry = match serde_json::from_value::<NameDocument>(entry) {
            Ok(entry) => entry,
            Err(error) => {
                flaws.add(|| place(&format!(": {error}")));
                continue;
            }
        };
        let name = match dns_name::parse(&entry.dns_name) {
            Ok(name) if !dns_name::matches(spec, &name) => {
                flaws.add(|| place(&format!(".dnsName: {name} is not one of {spec}")));
                continue;
            }
            Ok(name) if !known.insert(name.clone()) => {
                flaws.add(|| place(&format!(".dnsName: {name} is there twice")));
                continue;
            }
            Ok(name) => name,
            Err(error) => {
                flaws.add(|| place(&format!(".dnsName: {:?} {error}", entry.dns_name)));
                continue;
            }
        };
        let entry = entry.read(name, room, |text| flaws.add(|| place(&text)));
        room = room.saturating_sub(entry.addresses.len());
        status.names.push(entry);
    }
    if let Some(first) = status.names.iter().position(|entry| &entry.name == spec) {
        let entry = status.names.remove(first);
        status.names.insert(0, entry);
    }
    status
}

impl NameDocument {
    fn of(entry: &NameStatus) -> Self {
        let conditions = entry.degraded.iter().map(|degraded| ConditionDocument {
            kind: "Degraded".to_owned(),
            status: if degraded.is_degraded {
                "True"
            } else {
                "False"
            }
            .to_owned(),
            reason: degraded.reason.clone(),
            message: degraded.message.clone(),
            last_transition_time: Some(text(degraded.since)),
        });
        let addresses = entry.addresses.iter().map(|address| AddressDocument {
            ip: address.ip.to_string(),
            ttl_seconds: address.ttl.into(),
            last_lookup_time: Some(text(address.last)),
        });
        Self {
            conditions: conditions.collect(),
            dns_name: entry.name.as_str().to_owned(),
            resolved_addresses: addresses.collect(),
            resolution_failures: entry.failures.into(),
        }
    }

    fn read(self, name: Fqdn, room: usize, mut flaw: impl FnMut(String)) -> NameStatus {
        let mut addresses: Vec<AddressStatus> = Vec::new();
        let mut known = HashSet::new();
        for (index, address) in self.resolved_addresses.into_iter().enumerate() {
            let place = format!(".resolvedAddresses[{index}]");
            if addresses.len() == room.min(MAX_ADDRESSES) {
                flaw(format!(
                    "{place}: an object has at most {MAX_ADDRESSES} addresses of a name, and \
                     {MAX_ADDRESSES_OF_OBJECT} of all its names"
                ));
                break;
            }
            let Ok(ip) = address.ip.parse::<IpAddr>() else {
                flaw(format!("{place}.ip: {:?} is not an address", address.ip));
                continue;
            };
            if !known.insert(ip) {
                flaw(format!("{place}.ip: {ip} is there twice"));
                continue;
            }
            // A TTL above 31 bits is 0 (RFC 2181, 8), and so is a negative one.
            let ttl = i32::try_from(address.ttl_seconds).ok();
            let ttl = ttl.and_then(|ttl| u32::try_from(ttl).ok()).unwrap_or(0);
            let last = address.last_lookup_time.as_deref().and_then(instant);
            let last = last.unwrap_or_default();
            addresses.push(AddressStatus { ip, ttl, last });
        }
        let conditions = self.conditions.into_iter();
        let degraded = conditions.filter(|condition| condition.kind == "Degraded");
        let mut degraded = degraded.map(|condition| Degraded {
            is_degraded: condition.status == "True",
            reason: cut(condition.reason),
            message: cut(condition.message),
            since: condition
                .last_transition_time
                .as_deref()
                .and_then(instant)
                .unwrap_or_default(),
        });
        NameStatus {
            name,
            addresses,
            failures: u32::try_from(self.resolution_failures.clamp(0, i32::MAX.into()))
                .unwrap_or(0),
            degraded: degraded.next(),
        }
    }
}

fn cut(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(LONGEST_TEXT) {
        text.truncate(end);
    }
    text
}

fn instant(text: &str) -> Option<UnixTime> {
    wall_time::parse(text).map(|ns| UnixTime(ns / SECOND))
}

fn text(time: UnixTime) -> String {
    wall_time::render(time.0.saturating_mul(SECOND))
}
