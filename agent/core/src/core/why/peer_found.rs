//! What the model has on a peer of an endpoint, for `why`.

use std::net::IpAddr;

use shared_maps::EndpointId;

use crate::{
    core::why::elsewhere::Elsewhere,
    policy::trace::{Port, RuleView, Verdict},
};

/// What the model has on an identity as a peer of an endpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PeerFound {
    /// Its labels; `None` if the agent does not know it.
    pub labels: Option<Vec<String>>,
    /// Whether policy lets the packet pass; `None` if no port was asked for.
    pub verdict: Option<Verdict>,
    /// The first ordered rule that covers the packet.
    pub tier: Option<RuleView>,
    /// Rules that make the verdict, unless the ordered rule drops the packet.
    pub by: Vec<RuleView>,
    /// Rules about the identity, whatever the port.
    pub about: Vec<RuleView>,
    /// The Service whose identity it is, with its backends.
    pub service: Option<ServiceFound>,
}

impl PeerFound {
    /// The rules that decide: the ordered one if it drops the packet, or else the others.
    pub fn deciding(&self) -> Vec<RuleView> {
        match self.tier.as_ref().filter(|tier| tier.is_tier_deny()) {
            Some(tier) => vec![tier.clone()],
            None => self.by.clone(),
        }
    }
}

/// A Service and the backends of the ports in question.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceFound {
    /// `namespace/name`.
    pub key: String,
    /// Ports that it has, as `80/TCP`.
    pub ports: Vec<String>,
    /// Backends of the port asked for, or of every port.
    pub backends: Vec<BackendFound>,
}

/// A backend of a Service.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendFound {
    /// Port of the Service, as `80/TCP`.
    pub service_port: String,
    /// Address, and its labels or its pod.
    pub who: String,
    pub address: IpAddr,
    /// Whether kube-proxy gives it new connections: it is ready, or no backend is.
    pub is_chosen: bool,
    /// The endpoint of this node that it is.
    pub endpoint: Option<EndpointId>,
    /// Where its ingress policy is judged, if not here; without a name while its pod is unknown.
    pub elsewhere: Option<Elsewhere>,
    /// Port of the backend, to which the Service translates `service_port`.
    pub port: Port,
    /// Whether its pod is not known yet, so that the other backends decide.
    pub is_left_out: bool,
    /// The verdict of the sender's policy on it. `None` while it is left out because its pod is unknown,
    /// and behind a port of the node, where egress is judged at that port.
    pub verdict: Option<Verdict>,
    /// The first ordered rule that covers the packet.
    pub tier: Option<RuleView>,
    /// Rules that make the verdict, unless the ordered rule drops the packet.
    pub by: Vec<RuleView>,
}

/// A port of a node that leads to a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodePortFound {
    /// The Service, with the port of the node among its `ports`. It has no backends if the port is
    /// another node's.
    pub service: ServiceFound,
    /// The other node whose port it is.
    pub elsewhere: Option<Elsewhere>,
}
