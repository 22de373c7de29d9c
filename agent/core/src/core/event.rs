//! Events to the core, and its effects.

use std::{net::IpAddr, sync::Arc};

use dns_policy::{
    boot_time::BootTime,
    mapping::{Mapping, Realised},
    name::Fqdn,
    rule::RulesOf,
};
use shared_maps::{EndpointId, IdentityId};

use crate::{
    datapath::plan::NamesWritten,
    endpoint::spec::EndpointSpec,
    identity::{
        cluster::{GivenNumber, WantedIdentities},
        cluster_object::CiliumIdentity,
    },
    kubernetes::node_interfaces::NodeInterfaces,
    kubernetes::{pod_at::PodAt, service_at::ServiceAt},
    name_objects::{Observation, ResolvedName, TrustedServers, WantedNames},
    policy::{
        document::{PolicyDocument, PolicyError},
        source::PolicyChange,
    },
    source_event::SourceEvent,
};

/// Maximum number of addresses in a mapping: that many A records fit a message of 65,535 bytes.
pub const MAX_ADDRESSES: usize = 4096;
/// Maximum length of a name in bytes: 255 octets, each of at most four characters in presentation
/// form (RFC 1035, 2.3.4 and 5.1).
pub const MAX_NAME: usize = 1020;

/// An event to the core.
#[derive(Debug)]
pub enum Event {
    /// Change of policy. The key of a document is [`PolicyDocument::key`].
    Policies(SourceEvent<PolicyDocument>),
    /// All documents that are refused right now (the whole list, replacing the one before):
    /// shown in `status`. The last good version of each stays in force.
    PoliciesRejected(Vec<PolicyError>),
    /// Whether the first listing of policies has gaps: documents that are refused and of which no
    /// good version is known. While it has gaps, endpoints of the earlier run reach no more than they did in that run.
    PoliciesUncertain(bool),
    /// Changes of pods of the cluster, in order. The key is the pod's `namespace/name`.
    Pods(Vec<SourceEvent<PodAt>>),
    /// Changes of Services, in order. The key is the Service's `namespace/name`.
    Services(Vec<SourceEvent<ServiceAt>>),
    /// Changes of the numbers that the cluster has for label sets of pods, in order. The key is the
    /// number.
    Identities(Vec<SourceEvent<CiliumIdentity>>),
    /// Numbers that the API server answered for [`Effect::WantedIdentities`].
    NumbersGiven(Vec<GivenNumber>),
    /// Numbers whose objects were deleted within the last hour, before this agent watched them.
    NumbersResting(Vec<IdentityId>),
    /// Changes of the addresses in objects of the resolver's store, in order. The key is [`ResolvedName::key`].
    Resolved(Vec<SourceEvent<ResolvedName>>),
    /// Warnings for the authors of the cluster's objects; the list replaces the previous one.
    ClusterWarnings(Vec<String>),
    /// How many Namespace objects there are.
    Namespaces(usize),
    /// Change of an endpoint. The key is [`EndpointSpec::key`].
    Endpoints(SourceEvent<EndpointSpec>),
    /// All addresses of the node itself right now.
    NodeAddresses(Vec<IpAddr>),
    /// Interfaces of the node from which addresses of Services follow.
    NodeInterfaces(NodeInterfaces),
    /// Mappings (name, addresses) of DNS answers that proxies saw.
    Mappings(Vec<MappingEvent>),
    /// Result of a pass over the conntrack maps.
    Liveness {
        /// When the pass over the maps began.
        gc_start: BootTime,
        /// Egress connections that still exist: (endpoint address, remote address).
        alive: Vec<(IpAddr, IpAddr)>,
        /// Whether every conntrack map was read to its end.
        complete: bool,
    },
    /// A proxy's mapping stream opened.
    StreamUp(StreamId),
    /// A proxy's mapping stream closed. Its leases are honoured until they end, or until the
    /// process that holds them ends.
    StreamDown(StreamId),
    /// The process that holds the leases of these streams has ended, and with it the leases.
    HolderEnded(Vec<StreamId>),
    /// Proxies dropped the leases of revocations.
    RevokeAcked(Vec<RevokeAck>),
    /// An administrator requests that learned names are forgotten (`fqdn cache clean`).
    CleanNames(CleanNames),
    /// Result of a [`crate::datapath::plan::Step::KeepNames`] after its plan.
    NamesKept(NamesWritten),
    Tick,
    /// Asks for the next part of a change of policy ([`crate::core::Core::change_in_progress`]).
    ContinueChange,
}

impl Event {
    /// The kind of the event, for the log.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Policies(_) | Self::PoliciesRejected(_) | Self::PoliciesUncertain(_) => {
                "policies"
            }
            Self::ContinueChange => "part of a change of policies",
            Self::Pods(_) => "pods",
            Self::Services(_) => "services",
            Self::Identities(_) | Self::NumbersGiven(_) | Self::NumbersResting(_) => "identities",
            Self::Resolved(_) => "resolved names",
            Self::ClusterWarnings(_) | Self::Namespaces(_) => "objects of the cluster",
            Self::Endpoints(_) => "endpoints",
            Self::NodeAddresses(_) | Self::NodeInterfaces(_) => "the node",
            Self::Mappings(_) => "mappings",
            Self::Liveness { .. } => "connections",
            Self::StreamUp(_)
            | Self::StreamDown(_)
            | Self::HolderEnded(_)
            | Self::RevokeAcked(_) => "proxies",
            Self::CleanNames(_) => "names to forget",
            Self::NamesKept(_) => "written names",
            Self::Tick => "time",
        }
    }
}

impl From<PolicyChange> for Event {
    fn from(change: PolicyChange) -> Self {
        match change {
            PolicyChange::Document(event) => Self::Policies(event),
            PolicyChange::Rejected(errors) => Self::PoliciesRejected(errors),
            PolicyChange::Uncertain(uncertain) => Self::PoliciesUncertain(uncertain),
        }
    }
}

/// Which learned names to forget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CleanNames {
    /// Only names that this `matchPattern` matches; `None` = all.
    pub pattern: Option<String>,
    /// Only names that this endpoint learned; `None` = all endpoints.
    pub endpoint: Option<EndpointId>,
}

/// What the runner has to do once a plan is committed.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a mapping's result to its stream. A second one for the same sequence, with
    /// `durable` set, follows when the mapping is on disk.
    Result(MappingResult),
    /// Publish rules to every proxy. The first effect has all rules.
    Rules(RulesUpdate),
    /// Sources are synced and the first rules were given: a snapshot may be served.
    SnapshotReady,
    /// Request from every stream that it drops leases and acknowledges that.
    Revoke(Revocation),
    /// Label sets of this node that need objects: the whole list, which replaces the previous one.
    WantedIdentities(Arc<WantedIdentities>),
    /// An answer counts for EgressFirewalls.
    Observed(Observation),
    /// The names that EgressFirewalls use and the DNS servers whose answers count: both in full,
    /// whenever one of them changed.
    Resolver {
        names: Arc<WantedNames>,
        servers: Arc<TrustedServers>,
    },
}

/// Leases that proxies must drop and acknowledge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// Number that the acknowledgement repeats.
    pub id: u64,
    pub streams: Vec<StreamId>,
    pub name: Fqdn,
    pub addresses: Vec<IpAddr>,
}

/// A proxy dropped the leases of a revocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RevokeAck {
    pub stream: StreamId,
    /// Number of the revocation ([`Revocation::id`]).
    pub id: u64,
}

/// Number of one proxy's connection to the agent (or of the built-in proxy).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// A mapping, with the stream and the number for its result.
#[derive(Clone, Debug, PartialEq)]
pub struct MappingEvent {
    pub stream: StreamId,
    /// Number that the stream gave the mapping; its result repeats it.
    pub sequence: u64,
    pub mapping: Mapping,
}

/// Answer to a [`MappingEvent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappingResult {
    pub stream: StreamId,
    /// The mapping's number on its stream ([`MappingEvent::sequence`]).
    pub sequence: u64,
    /// Whether the datapath has the mapping.
    pub realised: Realised,
    /// Whether a restart of the agent would restore the mapping.
    pub durable: bool,
    /// End of the lease, if one is given.
    pub lease_end: Option<BootTime>,
    /// Policy revision under which the mapping was realised.
    pub revision: u64,
}

/// New DNS rules for the proxies: all rules of each endpoint that is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesUpdate {
    /// Revision of the policy that the rules follow from.
    pub revision: u64,
    /// Endpoints whose rules are new or changed.
    pub changed: Vec<RulesOf>,
    /// Endpoints that have no rules any more.
    pub removed: Vec<EndpointId>,
}
