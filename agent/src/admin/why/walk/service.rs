//! From the address of a Service to the rules about each pod behind it.

use std::net::IpAddr;

use agent_core::{
    core::why::peer_found::{BackendFound, ServiceFound},
    policy::trace::{Verdict, after_tier},
};

use super::{Walk, hop};
use crate::admin::model::{Hop, HopState};

/// Backends shown one by one.
const SHOWN: usize = 8;

impl Walk<'_> {
    /// From the name of a Service to its addresses: none of them has to be learned.
    pub(super) fn name_of_service(&self, name: &str, service: &str) -> Hop {
        let addresses = self.found.addresses.iter();
        let addresses: Vec<String> = addresses.map(|found| found.address.to_string()).collect();
        let text = format!(
            "{name} is the name of Service {service}: {}",
            addresses.join(", ")
        );
        hop("names", None, HopState::Found, text, "")
    }

    /// The Service, and its backends: those that are refused first.
    pub(super) fn service(&self, at: IpAddr, service: &ServiceFound) -> Vec<Hop> {
        let ports = service.ports.join(", ");
        let text = match self.question.port {
            Some(port) if !service.ports.contains(&port.to_string()) => {
                let text = format!(
                    "the address is of Service {}, which has no port {port}, but {ports}",
                    service.key
                );
                return vec![hop(
                    "service",
                    Some(at),
                    HopState::Missing,
                    text,
                    "ask for a port that it has",
                )];
            }
            _ => format!(
                "the address is of Service {} ({ports}): policy is about the pods behind it, at their ports",
                service.key
            ),
        };
        let mut hops = Vec::new();
        if service.backends.is_empty() {
            let text = format!("{text}; there is none");
            let remedy = "the EndpointSlices of the Service name no pod for this port";
            return vec![hop("service", Some(at), HopState::Missing, text, remedy)];
        }
        hops.push(hop("service", Some(at), HopState::Found, text, ""));
        let refused =
            |backend: &&BackendFound| backend.verdict.is_some_and(|verdict| !verdict.passes());
        let (refused, others): (Vec<_>, Vec<_>) = service.backends.iter().partition(refused);
        let all = refused.iter().chain(&others).take(SHOWN);
        let is_mixed = !refused.is_empty() && !others.is_empty();
        hops.extend(all.map(|backend| backend_hop(at, backend, is_mixed)));
        if let Some(more @ 1..) = service.backends.len().checked_sub(SHOWN) {
            let text = format!("and {more} more backends");
            hops.push(hop("backend", Some(at), HopState::Found, text, ""));
        }
        hops
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
        None => hop(
            HopState::Found,
            format!("{to}: left out, its pod is not known yet"),
            "",
        ),
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
