//! What the model has on a Service as a peer of an endpoint: each backend, and the rules about it.

use std::net::IpAddr;

use shared_maps::{
    IdentityId,
    policy::{EGRESS, PolicyKey},
};

use crate::{
    core::{
        Core,
        state::{State, policy_model::subject::Subject as Endpoint},
        why::{
            elsewhere::Elsewhere,
            peer_found::{BackendFound, NodePortFound, PeerFound, ServiceFound},
        },
    },
    kubernetes::service_at::{BackendAt, Family, PortAt, ServiceAt},
    labels::LabelSet,
    policy::{
        model::Side,
        rule::Peers,
        trace::{self, FlowDirection, Match, Port, RuleView, Verdict},
    },
    selector::selector::Subject,
};

impl State {
    /// The Service or the pod that has an address, as a text.
    pub(crate) fn object_at(&self, address: IpAddr) -> Option<String> {
        let metadata = self.ipcache.get(address.into())?;
        metadata.identity()?;
        let owners = metadata.owners().into_iter();
        let objects = owners.filter(|owner| owner.is_object());
        objects.map(ToString::to_string).next()
    }

    pub(crate) fn service_peer(
        &self,
        own: &Endpoint,
        direction: FlowDirection,
        id: IdentityId,
        port: Option<Port>,
    ) -> PeerFound {
        let labels = self.policy.labels_of(id).map(LabelSet::texts);
        if direction == FlowDirection::Ingress {
            let all = everything(&own.policy().ingress);
            let (verdict, by) = port.map(|_| all).unzip();
            return PeerFound {
                labels,
                verdict,
                by: by.unwrap_or_default(),
                ..PeerFound::default()
            };
        }
        let mut services = self.cluster.services.identities();
        let Some((_, at, family)) = services.find(|(known, _, _)| *known == id) else {
            return PeerFound {
                labels,
                ..PeerFound::default()
            };
        };
        let asked = |known: &&PortAt| port.is_none_or(|port| port == port_of(known));
        let ports = at.ports.iter().filter(asked);
        let backends: Vec<BackendFound> = ports
            .flat_map(|port| self.backends_found(at, port, family, Some(own)))
            .collect();
        let decision = port.map(|port| together(own, id, port, &backends));
        let Together { verdict, tier, by } = decision.unwrap_or_default();
        let ports = at.ports.iter().map(|port| port_of(port).to_string());
        PeerFound {
            labels,
            verdict,
            tier,
            by,
            about: self.rules_about_backends(own, at, family),
            service: Some(ServiceFound {
                key: at.key.to_string(),
                ports: ports.collect(),
                backends,
            }),
        }
    }

    fn rules_about_backends(
        &self,
        own: &Endpoint,
        at: &ServiceAt,
        family: Family,
    ) -> Vec<RuleView> {
        let side = &own.policy().egress;
        let mut about: Vec<RuleView> = Vec::new();
        for backend in at.ports.iter().flat_map(|port| port.backends_of(family)) {
            let subject = self.subject_behind(at, backend);
            for rule in trace::about(side, FlowDirection::Egress, own.labels(), &subject) {
                let rule = RuleView::of(&rule);
                if !about.contains(&rule) {
                    about.push(rule);
                }
            }
        }
        about
    }

    fn subject_behind(&self, at: &ServiceAt, backend: &BackendAt) -> Subject {
        let identity = self.known_behind(&at.key, backend);
        let identity = identity.unwrap_or(IdentityId::UNKNOWN);
        let labels = self.policy.labels_of(identity).cloned();
        Subject::new(
            identity,
            labels.unwrap_or_else(|| LabelSet::new(Vec::new())),
        )
    }

    /// The backends of a port, judged by the sender's policy if it applies to them.
    fn backends_found(
        &self,
        at: &ServiceAt,
        port: &PortAt,
        family: Family,
        sender: Option<&Endpoint>,
    ) -> Vec<BackendFound> {
        let none_is_ready = !port.backends_of(family).any(|backend| backend.is_ready);
        let backends = port.backends_of(family).map(|backend| BackendFound {
            is_chosen: backend.is_ready || none_is_ready,
            ..self.backend_found(at, port, backend, sender)
        });
        backends.collect()
    }

    fn backend_found(
        &self,
        at: &ServiceAt,
        port: &PortAt,
        backend: &BackendAt,
        sender: Option<&Endpoint>,
    ) -> BackendFound {
        let subject = self.subject_behind(at, backend);
        let number = Port {
            protocol: port.protocol.number(),
            number: backend.port.unwrap_or(port.port),
        };
        let is_known = self.known_behind(&at.key, backend).is_some();
        let decision = sender.filter(|_| is_known).map(|own| {
            let side = &own.policy().egress;
            trace::judge(side, FlowDirection::Egress, own.labels(), &subject, number)
        });
        BackendFound {
            service_port: port_of(port).to_string(),
            who: self.described(at, backend, subject.id),
            address: backend.address,
            is_chosen: true,
            endpoint: self.endpoints.by_address(backend.address),
            elsewhere: self
                .elsewhere(backend.address)
                .or_else(|| (!is_known).then(Elsewhere::default)),
            port: number,
            is_left_out: !is_known,
            verdict: decision.as_ref().map(|decision| decision.verdict),
            tier: decision.as_ref().and_then(|decision| decision.tier_view()),
            by: decision
                .iter()
                .flat_map(|decision| decision.views())
                .collect(),
        }
    }
}

impl Core {
    /// The Service that a port of a node leads to. At an address of this node it has its backends; at
    /// an address of another node, that node is named.
    pub fn node_port(&self, address: IpAddr, port: Port) -> Option<NodePortFound> {
        let state = &self.state;
        let elsewhere = state.other_node_at(address);
        let is_own = state.lxc.node_addresses().contains(&address);
        if elsewhere.is_none() && !is_own {
            return None;
        }
        let leads = |known: &&PortAt| {
            known.node_port == Some(port.number) && known.protocol.number() == port.protocol
        };
        let mut services = state.cluster.services.iter();
        let (at, of) = services.find_map(|at| Some((at, at.ports.iter().find(leads)?)))?;
        let backends = match elsewhere {
            Some(_) => Vec::new(),
            None => state.backends_found(at, of, Family::of(address), None),
        };
        let service = ServiceFound {
            key: at.key.to_string(),
            ports: vec![port.to_string()],
            backends,
        };
        Some(NodePortFound { service, elsewhere })
    }
}

fn port_of(port: &PortAt) -> Port {
    Port {
        protocol: port.protocol.number(),
        number: port.port,
    }
}

/// The combined verdict of the backends of one port.
#[derive(Default)]
struct Together {
    /// `None` if no port is given.
    verdict: Option<Verdict>,
    tier: Option<RuleView>,
    by: Vec<RuleView>,
}

fn together(own: &Endpoint, id: IdentityId, port: Port, backends: &[BackendFound]) -> Together {
    let side = &own.policy().egress;
    let known = || {
        backends
            .iter()
            .filter_map(|backend| Some((backend.verdict?, backend)))
    };
    let closed = known().find(|(verdict, _)| !verdict.passes());
    let proxied = known().find(|(verdict, _)| *verdict == Verdict::Proxied);
    if let Some((verdict, backend)) = closed.or(proxied).or_else(|| known().next()) {
        // Answers may be observed at the Service's port although they are not at its backends'
        // ports.
        let is_observed = verdict.passes() && own.observed().is_at(port.protocol, port.number);
        return Together {
            verdict: Some(if is_observed {
                Verdict::Proxied
            } else {
                verdict
            }),
            tier: backend.tier.clone(),
            by: backend.by.clone(),
        };
    }
    let all = PolicyKey::new(id.0, EGRESS, 0, 0, 0);
    let for_all = own.entries(id).and_then(|entries| entries.get(&all));
    let (verdict, by) = match for_all.is_some_and(|value| value.is_deny()) {
        true => (Verdict::Denied, Vec::new()),
        false => everything(side),
    };
    Together {
        verdict: Some(verdict),
        tier: None,
        by,
    }
}

/// What happens to packets to which only rules about every peer, protocol and port apply.
fn everything(side: &Side) -> (Verdict, Vec<RuleView>) {
    let everyone = side
        .rules
        .iter()
        .filter(|rule| rule.rule.peers == Peers::Any && rule.rule.ports.is_empty());
    let found = everyone.max_by_key(|rule| rule.rule.deny);
    let Some(rule) = found else {
        let verdict = match side.enforced {
            true => Verdict::NoRule,
            false => Verdict::NotRestricted,
        };
        return (verdict, Vec::new());
    };
    let verdict = match rule.rule.deny {
        true => Verdict::Denied,
        false => Verdict::Allowed,
    };
    let view = RuleView::of(&Match {
        rule,
        selector: None,
        receiver: None,
    });
    (verdict, vec![view])
}
