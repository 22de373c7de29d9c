//! Hops from the address of a Service to the rules about each pod behind it.

use std::{collections::BTreeSet, net::IpAddr};

use agent_core::{
    core::why::{
        outcome::Outcome,
        peer_found::{BackendFound, ServiceFound},
    },
    policy::trace::{Port, Verdict, after_tier},
};

use super::{
    End, Walk,
    elsewhere::{not_checked, run_there},
    hop,
};
use crate::admin::{
    model::{BackendView, Hop, HopState, UncheckedView},
    why::{AddressRead, Receiver},
};

/// Maximum backends that are shown one by one.
const SHOWN: usize = 8;

impl Walk<'_> {
    /// The hop from the name of a Service to its addresses, which need not be learned.
    pub(super) fn name_of_service(&self, name: &str, service: &str) -> Hop {
        let addresses = self.found.addresses.iter();
        let addresses: Vec<String> = addresses.map(|found| found.address.to_string()).collect();
        let text = format!(
            "{name} is the name of Service {service}: {}",
            addresses.join(", ")
        );
        hop("names", None, HopState::Found, text, "")
    }

    /// The Service and its backends, with the refused backends first.
    pub(super) fn service(
        &self,
        at: IpAddr,
        read: &AddressRead,
        backends: &[Judged<'_>],
    ) -> Vec<Hop> {
        let hop = |state, text: String, remedy: &str| hop("service", Some(at), state, text, remedy);
        let Some(service) = read.service() else {
            return Vec::new();
        };
        let ports = service.ports.join(", ");
        let is_node_port = read.node_port.is_some();
        let text = match self.question.port {
            _ if is_node_port => format!(
                "{ports} of the node leads to Service {}: ingress policy of the pods behind it counts",
                service.key
            ),
            Some(port) if !service.ports.contains(&port.to_string()) => {
                let text = format!(
                    "the address is of Service {}, which has no port {port}, but {ports}",
                    service.key
                );
                return vec![hop(HopState::Missing, text, "ask for a port that it has")];
            }
            _ => format!(
                "the address is of Service {} ({ports}): policy is about the pods behind it, at their ports",
                service.key
            ),
        };
        if read.is_port_of_another_node() {
            return vec![hop(HopState::Found, text, "")];
        }
        if service.backends.is_empty() {
            let text = format!("{text}; there is none");
            let remedy = "the EndpointSlices of the Service name no pod for this port";
            return vec![hop(HopState::Missing, text, remedy)];
        }
        let mut hops = vec![hop(HopState::Found, text, "")];
        let all = backends.iter();
        let (refused, others): (Vec<_>, Vec<_>) =
            all.partition(|judged| judged.outcome == Outcome::Denied);
        let is_mixed = !refused.is_empty() && !others.is_empty();
        let shown = refused.iter().chain(&others).take(SHOWN);
        hops.extend(shown.map(|judged| judged.hop(at, is_mixed)));
        if let Some(more @ 1..) = backends.len().checked_sub(SHOWN) {
            let text = format!("and {more} more backends");
            hops.push(super::hop("backend", Some(at), HopState::Found, text, ""));
        }
        hops
    }

    /// The Service whose backends are judged here: packets go to a port that it has, through this
    /// node.
    fn service_here<'a>(&self, read: &'a AddressRead) -> Option<&'a ServiceFound> {
        let service = read.service().filter(|_| !read.is_port_of_another_node())?;
        let has_port = |port: Port| service.ports.contains(&port.to_string());
        self.question.port.is_none_or(has_port).then_some(service)
    }

    /// The backends that packets to an address may go to.
    pub(super) fn backends<'a>(&self, read: &'a AddressRead) -> Vec<Judged<'a>> {
        let service = self.service_here(read).into_iter();
        let all = service.flat_map(|service| service.backends.iter().zip(&read.ingress));
        all.map(|(backend, ingress)| self.judge_backend(backend, ingress.as_ref()))
            .collect()
    }

    /// Adds the backends, and what becomes of packets that the sender's side lets pass.
    pub(super) fn add_backends(
        &self,
        at: IpAddr,
        end: &mut End,
        read: &AddressRead,
        judged: &[Judged<'_>],
    ) {
        let Some(service) = self.service_here(read) else {
            return;
        };
        end.backends = judged.iter().map(Judged::view).collect();
        if end.outcome != Outcome::Allowed {
            return;
        }
        let chosen = || judged.iter().filter(|judged| judged.backend.is_chosen);
        let ports: BTreeSet<&str> = chosen().map(Judged::service_port).collect();
        let of_port = |port: &str| {
            let backends = chosen().filter(|judged| judged.service_port() == port);
            Outcome::of_backends(backends.map(|judged| judged.outcome))
        };
        // Without a port, the question is whether any port is open.
        let best = ports.into_iter().map(of_port).max();
        end.outcome = best.unwrap_or(Outcome::Denied);
        let drops = || chosen().filter(|judged| judged.outcome == Outcome::Denied);
        let first = drops().map(Judged::said).next().unwrap_or_default();
        match end.outcome {
            Outcome::Denied if judged.is_empty() => {
                end.text = format!("{at}: Service {} has no backend", service.key);
            }
            Outcome::Denied => end.text = format!("{at}: dropped by every backend: {first}"),
            Outcome::Depends => {
                let (some, all) = (drops().count(), chosen().count());
                end.text = format!("{at}: dropped by {some} of {all} backends: {first}");
            }
            Outcome::Unknown => {
                end.text = format!("{at}: the policy map of a backend cannot be read");
            }
            Outcome::Unchecked => {
                let unchecked = chosen().filter_map(|judged| judged.unchecked.clone());
                end.unchecked = unchecked.collect();
                let mut said: Vec<String> = end.unchecked.iter().map(not_checked).collect();
                said.dedup();
                end.text = format!("{}; {}", end.text, said.join("; "));
            }
            Outcome::Allowed => {}
        }
    }

    /// Judges a backend: first the sender's egress to it, then the backend's ingress.
    fn judge_backend<'a>(
        &self,
        backend: &'a BackendFound,
        ingress: Option<&Receiver>,
    ) -> Judged<'a> {
        let is_refused = backend.verdict.is_some_and(|verdict| !verdict.passes());
        let (mut outcome, mut ingress_said) = (Outcome::Allowed, None);
        let mut unchecked = None;
        if is_refused {
            outcome = Outcome::Denied;
        } else if let Some(receiver) = ingress {
            let (passes, by) = self.passes(&receiver.entries, &receiver.peer);
            outcome = Outcome::of(passes);
            let (id, does) = (
                receiver.endpoint.0,
                if passes == Some(true) {
                    "accepts"
                } else {
                    "drops"
                },
            );
            ingress_said = Some(match passes {
                None => format!("the policy map of endpoint {id} cannot be read"),
                Some(_) => format!("endpoint {id} {does} it: {by}"),
            });
        } else if let Some(elsewhere) = &backend.elsewhere {
            let there = self.unchecked(backend.address, elsewhere, Some(backend.port));
            outcome = Outcome::Unchecked;
            ingress_said = Some(not_checked(&there));
            unchecked = Some(there);
        }
        Judged {
            backend,
            outcome,
            ingress: ingress_said,
            unchecked,
        }
    }
}

/// A backend, with what becomes of packets to it.
pub(super) struct Judged<'a> {
    backend: &'a BackendFound,
    outcome: Outcome,
    /// How the backend's own side judges.
    ingress: Option<String>,
    unchecked: Option<UncheckedView>,
}

impl Judged<'_> {
    fn service_port(&self) -> &str {
        &self.backend.service_port
    }

    /// Why packets to the backend are dropped, in a line.
    fn said(&self) -> String {
        let why = self
            .ingress
            .clone()
            .unwrap_or_else(|| "no egress rule allows it".to_owned());
        format!("{} at {}: {why}", self.backend.who, self.backend.port)
    }

    fn view(&self) -> BackendView {
        let backend = self.backend;
        BackendView {
            service_port: backend.service_port.clone(),
            address: backend.address.to_string(),
            port: backend.port.to_string(),
            endpoint: backend.endpoint.map(|id| id.0),
            node: backend
                .elsewhere
                .as_ref()
                .and_then(|there| there.node.clone()),
            chosen: backend.is_chosen,
            outcome: self.outcome,
        }
    }

    fn hop(&self, at: IpAddr, is_mixed: bool) -> Hop {
        let mut hop = backend_hop(at, self.backend, is_mixed);
        if let Some(ingress) = &self.ingress {
            hop.text = format!("{}; {ingress}", hop.text);
        }
        if !self.backend.is_chosen {
            hop.text
                .push_str(" (it is not ready: others get the connections)");
        }
        match self.outcome {
            Outcome::Denied if self.backend.is_chosen => hop.state = HopState::Missing,
            Outcome::Unknown => hop.state = HopState::Unknown,
            Outcome::Unchecked => {
                hop.state = HopState::Unknown;
                hop.remedy = self
                    .unchecked
                    .as_ref()
                    .map(run_there)
                    .filter(|text| !text.is_empty());
            }
            _ => {}
        }
        hop
    }
}

fn backend_hop(at: IpAddr, backend: &BackendFound, is_mixed: bool) -> Hop {
    let (who, port) = (&backend.who, backend.port);
    let rules: Vec<String> = backend.by.iter().map(ToString::to_string).collect();
    let by = match rules.is_empty() {
        true => String::new(),
        false => format!(" by {}", rules.join("; ")),
    };
    let to = format!("{} goes to {who} at {port}", backend.service_port);
    let hop = |state, text: String, remedy: &str| hop("backend", Some(at), state, text, remedy);
    let remedy = match is_mixed {
        true => {
            "allow it as the others, or give it a Service of its own: a Service is open only if every backend is"
        }
        false => "add an egress rule about this pod, with the pod's port",
    };
    match backend.verdict {
        None if backend.is_left_out => hop(
            HopState::Found,
            format!("{to}: left out, its pod is not known yet"),
            "",
        ),
        None => hop(HopState::Found, to, ""),
        Some(Verdict::Denied) => {
            let said = after_tier(backend.tier.as_ref(), format!("denied{by}"));
            hop(HopState::Missing, format!("{to}: {said}"), "")
        }
        Some(Verdict::NoRule) => hop(
            HopState::Missing,
            format!("{to}: no rule allows it"),
            remedy,
        ),
        Some(Verdict::NotRestricted) => hop(HopState::Found, format!("{to}: not restricted"), ""),
        Some(Verdict::Proxied) => hop(
            HopState::Found,
            format!("{to}: through the DNS proxy{by}"),
            "",
        ),
        Some(_) => hop(HopState::Found, format!("{to}: allowed{by}"), ""),
    }
}
