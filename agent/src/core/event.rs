//! What the core is told, and what it tells.

use std::net::IpAddr;

use holdfast_sdp::{
    mapping::{Mapping, Realised},
    policy::rule::RulesOf,
};
use shared_maps::EndpointId;

/// Number of one proxy's connection to the agent (or of the built-in proxy).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// Change at a source, in the grammar that every source speaks: what was not
/// applied between `Init` and `InitDone` is gone.
#[derive(Clone, Debug)]
pub enum SourceEvent<T> {
    /// A full listing begins.
    Init,
    /// This object is there now, new or changed.
    Apply(T),
    /// The listing is complete.
    InitDone,
    /// The object of this key is gone.
    Delete(String),
}

/// An endpoint as its source describes it, resolved on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSpec {
    /// Stable key at its source (document name, or `cli/<netns>/<interface>`).
    pub key: String,
    /// Labels, `source:key[=value]`.
    pub labels: Vec<String>,
    /// Host-side interface.
    pub ifindex: u32,
    /// Name of the host-side interface.
    pub ifname: String,
    /// Addresses of the pod's interface (at most one of each family is used).
    pub addresses: Vec<IpAddr>,
    /// MAC of the pod's interface.
    pub mac: [u8; 6],
    /// MAC of the host side.
    pub node_mac: [u8; 6],
    /// Where the network namespace was found, for people.
    pub netns: String,
}

/// A mapping with the way back for its result.
#[derive(Clone, Debug, PartialEq)]
pub struct MappingEvent {
    /// Stream it came on.
    pub stream: StreamId,
    /// The stream's sequence number.
    pub sequence: u64,
    /// The mapping.
    pub mapping: Mapping,
}

/// Answer to a [`MappingEvent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappingOutcome {
    /// Stream it goes to.
    pub stream: StreamId,
    /// The mapping's sequence number.
    pub sequence: u64,
    /// Whether the datapath has it.
    pub realised: Realised,
    /// A restart of the agent would restore it.
    pub durable: bool,
    /// End of the lease, nanoseconds of CLOCK_BOOTTIME; 0 = none.
    pub lease_end: u64,
    /// Revision under which it was realised.
    pub revision: u64,
}

/// New DNS rules for the proxies. Whole rules of each endpoint named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesUpdate {
    /// Revision of the policy.
    pub revision: u64,
    /// Endpoints whose rules are new or changed.
    pub changed: Vec<RulesOf>,
    /// Endpoints that have none any more.
    pub removed: Vec<EndpointId>,
}
