//! DNSNameResolver objects (`network.openshift.io/v1alpha1`): the addresses of a name, or of the
//! names that a wildcard matches, with their TTLs.

mod document;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use dns_policy::name::Fqdn;

pub use self::document::{ObjectError, Read};

pub const API_VERSION: &str = "network.openshift.io/v1alpha1";
pub const KIND: &str = "DNSNameResolver";

/// Maximum number of addresses of one name that an object keeps.
pub const MAX_ADDRESSES: usize = 1000;
/// Maximum number of names that one object keeps.
pub const MAX_NAMES: usize = 250;
/// Maximum number of addresses of all names of one object. With [`MAX_NAMES`], and with what an API
/// server adds for each of them, an object stays below 1 MiB.
pub const MAX_ADDRESSES_OF_OBJECT: usize = 3000;

/// A longer TTL counts as this one: a week, in seconds, as in answers to pods (RFC 8767, 4). Otherwise
/// the owner of a domain could keep an address open for decades.
pub const MAX_TTL: u32 = 604_800;

/// Seconds of Unix time: objects have no smaller unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixTime(pub u64);

impl UnixTime {
    pub fn plus(self, seconds: u32) -> Self {
        Self(self.0.saturating_add(seconds.into()))
    }

    /// Seconds from `earlier` to this; 0 if `earlier` is later.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl From<std::time::SystemTime> for UnixTime {
    fn from(time: std::time::SystemTime) -> Self {
        let since = time.duration_since(std::time::UNIX_EPOCH);
        Self(since.map_or(0, |since| since.as_secs()))
    }
}

/// Version of an object in its store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Version(pub String);

impl Version {
    /// Whether this version of an object is older than `other`: versions are growing numbers, in
    /// files and in the Kubernetes API. A version that is not a number counts as newer.
    pub fn is_before(&self, other: &Self) -> bool {
        match (self.0.parse::<u64>(), other.0.parse::<u64>()) {
            (Ok(this), Ok(other)) => this < other,
            _ => false,
        }
    }
}

/// Namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    pub namespace: String,
    pub name: String,
}

impl std::fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A DNSNameResolver object with its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolver {
    pub key: ObjectKey,
    /// `metadata.resourceVersion`.
    pub version: Version,
    /// `spec.name`: lower case, with the final dot.
    pub name: Fqdn,
    pub status: Status,
}

impl Resolver {
    /// Whether `next` can be this object after a change: an object is about one name for as long as
    /// it exists.
    pub fn check_successor(&self, next: &Self) -> Result<(), Renamed> {
        match self.name == next.name {
            true => Ok(()),
            false => Err(Renamed),
        }
    }

    /// All addresses of its status that are of a family in use, and not in `left_out`.
    pub fn addresses(&self, wanted: &AddressFilter) -> BTreeSet<IpAddr> {
        let addresses = self.status.names.iter().flat_map(|name| &name.addresses);
        addresses
            .map(|address| address.ip)
            .filter(|ip| wanted.takes(*ip))
            .collect()
    }
}

/// An object has another name than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("spec.name is immutable")]
pub struct Renamed;

/// Which addresses of objects count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressFilter {
    pub ipv4: bool,
    pub ipv6: bool,
    /// Blocks whose addresses do not count.
    pub left_out: Vec<ipnet::IpNet>,
}

impl AddressFilter {
    fn takes(&self, ip: IpAddr) -> bool {
        let is_on = match ip {
            IpAddr::V4(_) => self.ipv4,
            IpAddr::V6(_) => self.ipv6,
        };
        is_on && !self.left_out.iter().any(|block| block.contains(&ip))
    }
}

/// `status.resolvedNames`, each name once. In an object of a wildcard, the wildcard is the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub names: Vec<NameStatus>,
}

impl Status {
    /// The entry of a name.
    pub fn of(&self, name: &Fqdn) -> Option<&NameStatus> {
        self.names.iter().find(|entry| &entry.name == name)
    }

    /// Number of the addresses of all names.
    pub fn count(&self) -> usize {
        self.names.iter().map(|name| name.addresses.len()).sum()
    }
}

/// A name that was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameStatus {
    /// `dnsName`: lower case, with the final dot.
    pub name: Fqdn,
    /// `resolvedAddresses`, each address once.
    pub addresses: Vec<AddressStatus>,
    /// `resolutionFailures`: look-ups that failed since the last one that succeeded.
    pub failures: u32,
    /// The condition `Degraded`, if there is one.
    pub degraded: Option<Degraded>,
}

/// An address of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressStatus {
    pub ip: IpAddr,
    /// The field `ttlSeconds`, as it was at `last`.
    pub ttl: u32,
    /// The field `lastLookupTime`, in whole seconds.
    pub last: UnixTime,
}

impl AddressStatus {
    /// When its TTL ends: it is looked up then.
    pub fn next(&self) -> UnixTime {
        self.last.plus(self.ttl.min(MAX_TTL))
    }
}

/// The condition `Degraded` of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Degraded {
    /// The last look-up of the name failed.
    pub is_degraded: bool,
    /// The code of the last answer, for example `NXDOMAIN`.
    pub reason: String,
    /// The same code in words, for people.
    pub message: String,
    /// When `is_degraded` last changed.
    pub since: UnixTime,
}

/// Settings of the resolver that decide what a status becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The TTL that counts instead of a TTL of 0, in seconds: `--resolver-min-ttl`.
    pub min_ttl: u32,
    /// Failures after which a name without valid addresses is removed:
    /// `--resolver-failure-threshold`.
    pub failure_threshold: u32,
    /// Maximum difference, in seconds, at which two look-ups are due at the same time:
    /// `--resolver-tolerance`.
    pub tolerance: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            min_ttl: 5,
            failure_threshold: 5,
            tolerance: 5,
        }
    }
}

/// How long an address stays in the status after its TTL.
pub const GRACE: Duration = Duration::from_secs(5);
