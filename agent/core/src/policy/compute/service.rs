//! What policy says of a Service: its verdict on every backend, at the backend's port.
//!
//! A packet to a Service is judged before the node translates it, so its verdict has to be right
//! for every backend that the node may pick. Where backends differ, the Service is closed.
//!
//! | backends of a port | entry at the Service's port |
//! |---|---|
//! | all allowed | allow |
//! | all allowed, DNS rules for at least one, or the port is observed | redirect to the proxy |
//! | one is not allowed | none; where "everyone, every port" is allowed, a deny of all ports |
//! | there is none | none |

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::{
    IdentityId,
    policy::{EGRESS, PolicyKey, PolicyValue},
};

use super::{Observed, decide, longest};
use crate::policy::compute::entries::Entries;

/// A Service as policy sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    pub ports: Vec<ServicePort>,
}

/// A port of a Service with the backends that packets to it may reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServicePort {
    /// IP protocol number.
    pub protocol: u8,
    /// The port that clients use.
    pub port: u16,
    /// Its backends: equal ones count once.
    pub backends: BTreeSet<Backend>,
}

/// A backend: the identity of its address, and its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Backend {
    /// Identity; [`IdentityId::UNKNOWN`] for a backend that no rule selects.
    pub identity: IdentityId,
    pub port: u16,
}

/// What policy says of one port of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortVerdict {
    NoBackend,
    /// There are backends, and none is allowed.
    Closed,
    /// Some backends are allowed, and some are not.
    Mixed,
    /// Every backend is allowed, and no DNS rule is about any of them.
    Allowed,
    /// Every backend is allowed, and DNS rules are about at least one.
    Redirected,
}

/// Entries that a subject has for a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rendered {
    pub entries: Entries,
    /// Whether a port has backends of which some are allowed and some are not.
    pub is_mixed: bool,
}

impl Service {
    /// Identities of the backends of all ports.
    pub(crate) fn identities(&self) -> BTreeSet<IdentityId> {
        let backends = self.ports.iter().flat_map(|port| &port.backends);
        backends.map(|backend| backend.identity).collect()
    }
}

/// Whether entries say that a peer is allowed in a direction.
pub(crate) fn allows(
    of: &BTreeMap<IdentityId, Entries>,
    direction: u8,
    protocol: u8,
    peer: Backend,
) -> bool {
    verdict_on(of, direction, protocol, peer).is_some_and(|value| !value.is_deny())
}

fn verdict_on(
    of: &BTreeMap<IdentityId, Entries>,
    direction: u8,
    protocol: u8,
    backend: Backend,
) -> Option<&PolicyValue> {
    let lookup = |id: u32| {
        longest(
            of.get(&IdentityId(id))?.iter(),
            direction,
            protocol,
            backend.port,
        )
    };
    decide(lookup, backend.identity).map(|(_, value)| value)
}

/// What entries say of one port.
pub(crate) fn verdict(of: &BTreeMap<IdentityId, Entries>, port: &ServicePort) -> PortVerdict {
    let (mut open, mut redirected) = (0, false);
    for backend in &port.backends {
        match verdict_on(of, EGRESS, port.protocol, *backend) {
            Some(value) if !value.is_deny() => {
                open += 1;
                redirected |= value.proxy_port != shared_maps::Be16::ZERO;
            }
            _ => {}
        }
    }
    match open {
        0 if port.backends.is_empty() => PortVerdict::NoBackend,
        0 => PortVerdict::Closed,
        some if some < port.backends.len() => PortVerdict::Mixed,
        _ if redirected => PortVerdict::Redirected,
        _ => PortVerdict::Allowed,
    }
}

/// Renders the entries of a Service from the entries `of` a subject.
pub(crate) fn render(
    of: &BTreeMap<IdentityId, Entries>,
    service: &Service,
    id: IdentityId,
    proxy_port: u16,
    observed: Observed,
) -> Rendered {
    let mut rendered = Rendered::default();
    let verdicts = service.ports.iter().map(|port| {
        let verdict = match verdict(of, port) {
            // Answers may be observed at the Service's port although they are not at its backends'
            // ports.
            PortVerdict::Allowed if observed.is_at(port.protocol, port.port) => {
                PortVerdict::Redirected
            }
            verdict => verdict,
        };
        (port, verdict)
    });
    let verdicts: Vec<(&ServicePort, PortVerdict)> = verdicts.collect();
    let everyone = of.get(&IdentityId::UNKNOWN);
    let open = everyone.and_then(|entries| longest(entries.iter(), EGRESS, 0, 0));
    let open = open.is_some_and(|(_, value)| !value.is_deny());
    let is_closed =
        |verdict: PortVerdict| matches!(verdict, PortVerdict::Closed | PortVerdict::Mixed);
    let closes = open && verdicts.iter().any(|(_, verdict)| is_closed(*verdict));
    let mut put = |value: fn(PolicyKey, u16) -> PolicyValue, protocol, port, bits| {
        let key = PolicyKey::new(id.0, EGRESS, protocol, port, bits);
        rendered.entries.insert(key, value(key, proxy_port));
    };
    if closes {
        put(|key, _| PolicyValue::deny(key), 0, 0, 0);
    }
    for (port, verdict) in verdicts {
        match verdict {
            PortVerdict::Allowed if open && !closes => {}
            PortVerdict::Allowed => {
                put(
                    |key, _| PolicyValue::allow(key),
                    port.protocol,
                    port.port,
                    16,
                );
            }
            PortVerdict::Redirected => {
                put(PolicyValue::dns_redirect, port.protocol, port.port, 16);
            }
            PortVerdict::Mixed => rendered.is_mixed = true,
            PortVerdict::Closed | PortVerdict::NoBackend => {}
        }
    }
    rendered
}

#[cfg(test)]
mod tests;
