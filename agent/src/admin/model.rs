//! Data of the admin interface in addition to the core's snapshot. The command line uses the same
//! types.

use agent_cluster::health::ClusterView;
use agent_core::{
    core::{
        snapshot::{LimitView, PolicyView, RejectedView, Summary},
        why::outcome::Outcome,
    },
    policy::trace::RuleView,
};
use agent_datapath::{
    features::KernelView, quota::QuotaView, tunnel::TunnelView, upkeep::RepairsView,
};
use dns_policy::epoch::Epoch;
use serde::{Deserialize, Serialize};

use crate::{
    admin::standby::StandbyView,
    endpoint::source::{Unresolved, taken_in::StartedOpen},
    identities::view::IdentitiesView,
    owner::OwnerView,
    proxies::ProxyView,
    resolver::view::ResolverView,
};

/// Answer to `/v1/status`: the state of the agent.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Status {
    pub version: String,
    /// Process id of the agent.
    pub pid: u32,
    /// Boot id and start count of this run.
    pub epoch: Epoch,
    /// Whether sources are synced and rules were given to proxies.
    pub ready: bool,
    pub summary: Summary,
    /// Streams of connected proxies, one entry each.
    pub proxies: Vec<ProxyView>,
    /// `running`, `disabled`, or why it does not run.
    pub builtin_dns_proxy: String,
    /// Endpoint documents that are not in force.
    pub endpoints_unresolved: Vec<Unresolved>,
    /// Files found damaged at the start.
    pub damaged_files: Vec<String>,
    /// Problems that need attention, as text; empty if there are none.
    pub problems: Vec<String>,
    /// Warnings about valid documents that may not mean what their authors think. They are no
    /// problems of the agent.
    pub warnings: Vec<String>,
    /// How far limits are used up.
    pub limits: Vec<LimitView>,
    /// Quotas of the datapath that endpoints reached.
    pub quotas: Vec<QuotaView>,
    /// Repairs of the node's part of the datapath.
    pub repairs: Vec<RepairsView>,
    /// How programs are attached, and what the kernel lacks.
    pub kernel: KernelView,
    /// The cluster that objects and policies are read from.
    pub cluster: Option<ClusterView>,
    /// State of the resolver, which refreshes names of EgressFirewalls; `None` = no resolver is
    /// configured.
    pub resolver: Option<ResolverView>,
    /// What the agent does about CiliumIdentity objects; `None` = it makes no objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identities: Option<IdentitiesView>,
    /// The tunnel between nodes; `None` = this node has no part in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<TunnelView>,
    /// Missing containers and interfaces that endpoint documents name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awaited: Vec<String>,
    /// How this agent came to own the node.
    #[serde(default)]
    pub owner: OwnerView,
    /// The agent that takes over when this one ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyView>,
    /// Pods of this node that ran before they were under policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub started_open: Vec<StartedOpen>,
}

/// Answer to `/v1/policies`: the documents in force and the refused documents.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Policies {
    pub policies: Vec<PolicyView>,
    pub rejected: Vec<RejectedView>,
}

/// Answer to a request that changed something.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Done {
    pub message: String,
    /// For `fqdn cache clean`: at most a thousand addresses of names that are still open.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub still_open: Vec<StillOpen>,
}

/// A name's address that was cleaned and is still open.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct StillOpen {
    pub name: String,
    pub address: String,
    /// When it closes at the latest, RFC 3339.
    pub until: String,
}

/// Answer to a request that failed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Failed {
    /// The reason and the remedy, as one text.
    pub error: String,
}

/// `/v1/why`: may an endpoint talk to a name or an address, and what makes it so?
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Why {
    pub endpoint: u16,
    pub key: String,
    /// The endpoint's pod, `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// `egress`: the endpoint sends; `ingress`: it receives.
    pub direction: String,
    /// The name or address on the other side.
    pub target: String,
    /// Destination port and protocol, for example `443/TCP`; `None` = any.
    pub port: Option<String>,
    /// Whether packets pass at every address of the target, by the kernel's maps.
    pub allowed: bool,
    /// The reason for `allowed`, in one line.
    pub verdict: String,
    /// The way from the policy to the kernel's map entry.
    pub hops: Vec<Hop>,
    /// Rules of policy documents that decide the verdict.
    pub rules: Vec<RuleView>,
    /// What becomes of packets, in more words than `allowed` has.
    #[serde(default)]
    pub outcome: Outcome,
    /// What is behind the address of a Service or a port of the node.
    #[serde(default)]
    pub backends: Vec<BackendView>,
    /// Sides of connections that another node judges.
    #[serde(default)]
    pub unchecked: Vec<UncheckedView>,
}

/// A backend that packets may go to.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct BackendView {
    /// Port of the Service, as `80/TCP`.
    pub service_port: String,
    pub address: String,
    /// Port of the backend, as `8080/TCP`.
    pub port: String,
    /// Number of the backend's endpoint, if it is on this node.
    pub endpoint: Option<u16>,
    /// Name of the other node that judges its ingress.
    pub node: Option<String>,
    /// Whether it gets new connections.
    pub chosen: bool,
    pub outcome: Outcome,
}

/// A side of a connection that another node judges.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct UncheckedView {
    /// `ingress` of the receiver or `egress` of the sender.
    pub direction: String,
    /// Address of the pod, or of the node that has the node port.
    pub address: String,
    /// `namespace/name`; `None` behind a node port, or if no document describes the pod.
    pub pod: Option<String>,
    pub node: Option<String>,
    pub node_addresses: Vec<String>,
    /// The command that shows that node's verdict.
    pub command: Option<String>,
}

/// One hop that was checked.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Hop {
    /// `endpoint`, `programs`, `policy`, `firewall`, `dns`, `selector`, `names`, `ipcache`,
    /// `identity`, `service`, `backend`, `policy-map`, `receiver` or `sender`.
    pub hop: String,
    /// The address that the hop is about, if the target has several.
    pub address: Option<String>,
    pub state: HopState,
    /// The finding, and where it was made.
    pub text: String,
    pub remedy: Option<String>,
}

/// Whether the hop's object exists.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum HopState {
    #[default]
    Found,
    /// It does not exist, but packets do not need it.
    Absent,
    /// It does not exist, and so packets do not pass.
    Missing,
    /// It could not be inspected.
    Unknown,
}
