//! Compares the entries of a Service with verdicts on every packet at every backend.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{
    labels::LabelSet,
    policy::{
        compute::{Observed, RuleIndex, everyone_at},
        model::{EndpointPolicy, Side, SideRule},
        rule::{DnsNames, PeerRule, Peers, PortRule, Ports, Protocol},
    },
    selector::{
        cache::SelectorCache,
        selector::{LabelSelector, Operator, Requirement, Selector},
    },
};

const A: IdentityId = IdentityId(300);
const B: IdentityId = IdentityId(301);
const SERVICE: IdentityId = IdentityId::SERVICE_MIN;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Dropped,
    Proxied,
    Passed,
}

fn app(value: &str) -> Selector {
    let is = Operator::In([value.to_owned()].into());
    let requirements = [Requirement::new("app", is)].into();
    Selector::Labels(LabelSelector { requirements })
}

/// Random rules: who is meant, at which ports, and whether it is a deny.
fn rules() -> impl Strategy<Value = Vec<PeerRule>> {
    let peers = prop_oneof![
        Just(Peers::Any),
        Just(Peers::Selectors(vec![app("a")])),
        Just(Peers::Selectors(vec![app("b")])),
        Just(Peers::Selectors(vec![app("a"), app("b")])),
    ];
    let range = prop::sample::select(vec![
        (80, 80),
        (8080, 8080),
        (8080, 9090),
        (0, 65535),
        (53, 53),
    ]);
    let port =
        (range, any::<bool>(), any::<bool>()).prop_map(|((first, last), udp, dns)| PortRule {
            protocol: if udp { Protocol::Udp } else { Protocol::Tcp },
            ports: Ports::Range(first, last),
            dns: (dns && first == 53).then_some(DnsNames::All),
        });
    let ports = prop::collection::vec(port, 0..3);
    let rule =
        (peers, ports, prop::bool::weighted(0.25)).prop_map(|(peers, ports, deny)| PeerRule {
            path: "spec.egress[0]".into(),
            deny,
            peers,
            ports: ports
                .into_iter()
                .map(|port| PortRule {
                    dns: port.dns.filter(|_| !deny),
                    ..port
                })
                .collect(),
        });
    prop::collection::vec(rule, 0..5)
}

fn services() -> impl Strategy<Value = Service> {
    let backend = (
        prop::sample::select(vec![A, B, IdentityId::UNKNOWN]),
        prop::sample::select(vec![53, 8080, 9090]),
    )
        .prop_map(|(identity, port)| Backend { identity, port });
    let backends = prop::collection::btree_set(backend, 0..4);
    let keys = prop::sample::subsequence(vec![(TCP, 80), (TCP, 8080), (UDP, 53), (TCP, 53)], 1..4);
    keys.prop_flat_map(move |keys| {
        let all = prop::collection::vec(backends.clone(), keys.len());
        all.prop_map(move |all| Service {
            ports: std::iter::zip(&keys, all)
                .map(|((protocol, port), backends)| ServicePort {
                    protocol: *protocol,
                    port: *port,
                    backends,
                })
                .collect(),
        })
    })
}

/// What the rules say of a packet to an identity, read one by one.
fn reading(
    rules: &[PeerRule],
    restricted: bool,
    peer: Option<&LabelSet>,
    protocol: u8,
    port: u16,
) -> Fate {
    let mut found = Vec::new();
    for rule in rules {
        let meant = match &rule.peers {
            Peers::Any => true,
            Peers::Selectors(list) => list.iter().any(|selector| match selector {
                Selector::Labels(selector) => peer.is_some_and(|labels| selector.matches(labels)),
                _ => unreachable!(),
            }),
        };
        let ports: Vec<_> = rule
            .ports
            .iter()
            .filter(|at| at.covers(protocol, port, peer))
            .collect();
        if !meant || (ports.is_empty() && !rule.ports.is_empty()) {
            continue;
        }
        if rule.deny {
            return Fate::Dropped;
        }
        let proxied = ports.iter().any(|at| at.dns.is_some());
        found.push(if proxied { Fate::Proxied } else { Fate::Passed });
    }
    match (found.contains(&Fate::Proxied), found.is_empty()) {
        (true, _) => Fate::Proxied,
        (false, true) if restricted => Fate::Dropped,
        _ => Fate::Passed,
    }
}

fn labels_of(identity: IdentityId) -> Option<LabelSet> {
    match identity {
        A => LabelSet::parse(&["k8s:app=a"]).ok(),
        B => LabelSet::parse(&["k8s:app=b"]).ok(),
        _ => None,
    }
}

/// Entries of all identities of a policy.
fn entries(rules: &[PeerRule], restricted: bool) -> BTreeMap<IdentityId, Entries> {
    let mut selectors = SelectorCache::default();
    for selector in rules.iter().flat_map(PeerRule::selectors) {
        selectors.register(selector);
    }
    for identity in [A, B] {
        selectors.add_identity(identity, labels_of(identity).unwrap());
    }
    let rules = rules.iter().map(|rule| SideRule {
        document: "d".into(),
        rule: Arc::new(rule.clone()),
    });
    let policy = EndpointPolicy {
        egress: Side {
            enforced: restricted,
            enforcers: Vec::new(),
            tier: Vec::new(),
            rules: rules.collect(),
        },
        ..EndpointPolicy::default()
    };
    let mut index = RuleIndex::of(&policy, &selectors);
    let own = LabelSet::new(Vec::new());
    let render = |id| (id, index.entries(&policy, &own, id, &selectors, 10094));
    [IdentityId::UNKNOWN, A, B].map(render).into()
}

proptest! {
    #[test]
    fn a_service_is_open_only_as_far_as_every_backend(
        rules in rules(), restricted in any::<bool>(), service in services()
    ) {
        let of = entries(&rules, restricted);
        let rendered = render(&of, &service, SERVICE, 10094, Observed::Nothing);
        let mut all = of.clone();
        all.insert(SERVICE, rendered.entries);
        let fate = |protocol, port| {
            let lookup = |id: u32| {
                let (protocol, port) = match id {
                    0 => everyone_at(SERVICE, protocol, port),
                    _ => (protocol, port),
                };
                longest(all.get(&IdentityId(id))?.iter(), EGRESS, protocol, port)
            };
            match decide(lookup, SERVICE) {
                None => Fate::Dropped,
                Some((_, value)) if value.is_deny() => Fate::Dropped,
                Some((_, value)) if value.proxy_port.get() != 0 => Fate::Proxied,
                Some(_) => Fate::Passed,
            }
        };
        let mut some_closed = false;
        for port in &service.ports {
            let backends = port.backends.iter().map(|backend| {
                let labels = labels_of(backend.identity);
                reading(&rules, restricted, labels.as_ref(), port.protocol, backend.port)
            });
            let backends: Vec<Fate> = backends.collect();
            if backends.is_empty() {
                continue;
            }
            let closed = backends.contains(&Fate::Dropped);
            some_closed |= closed;
            let shall = if closed {
                Fate::Dropped
            } else if backends.contains(&Fate::Proxied) {
                Fate::Proxied
            } else {
                Fate::Passed
            };
            prop_assert_eq!(fate(port.protocol, port.port), shall, "{:?}", port);
        }
        // At ports that the Service does not have, and at ports without a backend, only rules about
        // everyone and every port count.
        let everything = rules.iter().filter(|rule| rule.peers == Peers::Any && rule.ports.is_empty());
        let everything = reading(&everything.cloned().collect::<Vec<_>>(), restricted, None, 1, 0);
        let shall = if some_closed { Fate::Dropped } else { everything };
        prop_assert_eq!(fate(TCP, 81), shall);
    }
}

#[test]
fn a_service_with_unlike_backends_is_mixed() {
    let port = |backends: &[Backend]| ServicePort {
        protocol: TCP,
        port: 80,
        backends: backends.iter().copied().collect(),
    };
    let (a, b) = (
        Backend {
            identity: A,
            port: 8080,
        },
        Backend {
            identity: B,
            port: 8080,
        },
    );
    let rule = PeerRule {
        path: "spec.egress[0]".into(),
        deny: false,
        peers: Peers::Selectors(vec![app("a")]),
        ports: vec![PortRule {
            protocol: Protocol::Tcp,
            ports: Ports::Range(8080, 8080),
            dns: None,
        }],
    };
    let of = entries(&[rule], true);
    for (backends, shall) in [
        (&[][..], PortVerdict::NoBackend),
        (&[b], PortVerdict::Closed),
        (&[a, b], PortVerdict::Mixed),
        (&[a], PortVerdict::Allowed),
    ] {
        assert_eq!(verdict(&of, &port(backends)), shall);
        let service = Service {
            ports: vec![port(backends)],
        };
        let rendered = render(&of, &service, SERVICE, 10094, Observed::Nothing);
        assert_eq!(rendered.is_mixed, shall == PortVerdict::Mixed);
        assert_eq!(
            rendered.entries.len(),
            usize::from(shall == PortVerdict::Allowed)
        );
    }
}
