//! The resolver as `status` and `resolver list` show it.

use serde::{Deserialize, Serialize};

/// State of the resolver, for `status` and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolverView {
    /// `leads`, `follows` or `consumes`.
    pub role: String,
    /// Number of objects, including those that are not in the store yet.
    pub objects: usize,
    /// Number of names in the objects: their own names, and names that wildcards found.
    pub names: usize,
    pub addresses: usize,
    /// Number of names whose last look-up failed.
    pub degraded: usize,
    /// Seconds until the next look-up, if this agent looks names up.
    pub next_lookup_seconds: Option<u64>,
    /// Number of answers to pods that wait for the resolver's task.
    pub queued: usize,
    /// Number of answers to pods that were dropped, because too many waited.
    pub dropped: u64,
    /// Number of objects with something to write.
    pub unwritten: usize,
    /// Problems that need attention, as text; empty if there are none.
    pub problems: Vec<String>,
}

/// An object, for `resolver list` and `resolver get`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectView {
    /// `namespace/name`.
    pub key: String,
    /// `spec.name`.
    pub name: String,
    /// Names that have a status: the object's own name, and those that its wildcard found.
    pub names: Vec<NameView>,
}

/// A name of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameView {
    pub name: String,
    pub addresses: Vec<AddressView>,
    /// Look-ups that failed since the last one that succeeded.
    pub failures: u32,
    /// Code of the last answer, if it was no success: for example `NXDOMAIN`.
    pub degraded: Option<String>,
    /// Seconds until the next look-up, if this agent looks names up.
    pub next_lookup_seconds: Option<u64>,
    /// Source of the name's addresses: `look-up`, `pod` or `store`.
    pub said_by: String,
}

/// An address of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressView {
    pub ip: String,
    /// TTL of the record at the look-up.
    pub ttl_seconds: u32,
    /// Seconds since it was looked up.
    pub age_seconds: u64,
}

/// Answer to `resolver lookup`: the result of one look-up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupView {
    pub name: String,
    /// DNS servers that were asked.
    pub servers: Vec<String>,
    /// `found`, `no_data`, `nxdomain`, `error`, `timeout` or `no_server`.
    pub outcome: String,
    pub addresses: Vec<AddressView>,
    /// Objects that are about the name.
    pub objects: Vec<String>,
}
