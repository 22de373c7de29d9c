//! Verdicts of whole tables, and what the writer keeps.

use std::{collections::BTreeSet, net::IpAddr};

use shared_maps::{EndpointId, IdentityId};

use super::{PolicyHandle, Question};
use crate::{
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
    verdict::{DenyReason, Verdict},
};

const D1: IdentityId = IdentityId(1001);
const D2: IdentityId = IdentityId(1002);
const D3: IdentityId = IdentityId(1003);
const D4: IdentityId = IdentityId(1004);
const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 53));

fn names(list: &[&str]) -> NameRules {
    NameRules::Names(
        list.iter()
            .map(|n| {
                if n.contains('*') {
                    NameRule::Pattern((*n).to_owned())
                } else {
                    NameRule::Name((*n).to_owned())
                }
            })
            .collect(),
    )
}

fn port(port: u16, transport: Transport, rules: Vec<(Option<IdentityId>, NameRules)>) -> PortRules {
    let rules = rules.into_iter().map(|(server, names)| SelectorRule {
        selector: format!("{server:?}"),
        servers: server.map_or(Servers::Any, |id| Servers::Identities(BTreeSet::from([id]))),
        names,
    });
    PortRules {
        port,
        transport,
        rules: rules.collect(),
    }
}

fn of(endpoint: u16, ports: Vec<PortRules>) -> RulesOf {
    RulesOf {
        endpoint: EndpointId(endpoint),
        rules: EndpointRules { ports },
    }
}

/// A table in which endpoint 1 has these rules for UDP port 53.
fn with_udp_rules(rules: Vec<(Option<IdentityId>, NameRules)>) -> PolicyHandle {
    let handle = PolicyHandle::new();
    let errors = handle.replace_all(&[of(1, vec![port(53, Transport::Udp, rules)])]);
    assert_eq!(errors, []);
    handle
}

/// What endpoint 1 gets over UDP port 53.
fn ask_udp(handle: &PolicyHandle, server: IdentityId, name: &str) -> Verdict {
    ask(handle, 1, server, 53, Transport::Udp, name)
}

fn ask(
    handle: &PolicyHandle,
    endpoint: u16,
    server: IdentityId,
    port: u16,
    transport: Transport,
    name: &str,
) -> Verdict {
    let question = Question {
        endpoint: EndpointId(endpoint),
        port,
        transport,
        server,
        address: ADDRESS,
        name,
    };
    let table = handle.load();
    let verdict = table.check(&question);
    let matched = table.matched(&question);
    assert_eq!(matched.is_some(), verdict == Verdict::Allow, "{question:?}");
    verdict
}

#[test]
fn the_rule_that_allows_is_named_as_policies_spell_it() {
    let patterns = ["www.a.test", "*.b.test", "**.c.test", "x*y.d.test"];
    let regex = NameRules::Regex("^(e|f)[.]test[.]$".to_owned());
    let handle = with_udp_rules(vec![
        (Some(D1), names(&patterns)),
        (Some(D2), regex),
        (Some(D3), NameRules::All),
    ]);
    let table = handle.load();
    let matched = |server, name| {
        table.matched(&Question {
            endpoint: EndpointId(1),
            port: 53,
            transport: Transport::Udp,
            server,
            address: ADDRESS,
            name,
        })
    };
    for (server, name, pattern) in [
        (D1, "www.a.test.", Some("www.a.test.")),
        (D1, "any.b.test.", Some("*.b.test.")),
        (D1, "any.of.c.test.", Some("**.c.test.")),
        (D1, "x-y.d.test.", Some("x*y.d.test.")),
        (D1, "e.test.", None),
        (D2, "e.test.", Some("^(e|f)[.]test[.]$")),
        (D3, "whatever.", Some("*")),
        (D4, "www.a.test.", None),
    ] {
        let expected = pattern.map(|p| (format!("{:?}", Some(server)), p.to_owned()));
        assert_eq!(matched(server, name), expected, "{name}");
    }
}

#[test]
fn verdicts_of_ciliums_full_path_test() {
    use Transport::{Tcp, Udp};
    let handle = PolicyHandle::new();
    let errors = handle.replace_all(&[
        of(
            1,
            vec![
                port(
                    53,
                    Udp,
                    vec![
                        (Some(D1), names(&["*.ubuntu.com", "aws.amazon.com"])),
                        (Some(D2), names(&["cilium.io"])),
                    ],
                ),
                port(53, Tcp, vec![(Some(D1), names(&["sub.ubuntu.com"]))]),
                port(54, Udp, vec![(None, names(&["example.com"]))]),
            ],
        ),
        of(
            3,
            vec![
                port(
                    53,
                    Udp,
                    vec![
                        (Some(D1), names(&["example.com"])),
                        (Some(D3), names(&["*"])),
                        (Some(D4), NameRules::All),
                    ],
                ),
                port(53, Tcp, vec![(Some(D3), names(&["example.com"]))]),
            ],
        ),
    ]);
    assert!(errors.is_empty());
    let rows = [
        ("F1", 1, D1, 53, Udp, "www.ubuntu.com.", true),
        ("F2", 1, D1, 53, Tcp, "www.ubuntu.com.", false),
        ("F4", 1, D1, 53, Udp, "sub.ubuntu.com.", true),
        ("F5", 1, D1, 54, Udp, "cilium.io.", false),
        ("F7", 1, D2, 53, Udp, "aws.amazon.com.", false),
        ("F8", 1, D1, 54, Udp, "example.com.", true),
        ("F10", 3, D1, 53, Udp, "example.com.", true),
        ("F11", 3, D1, 53, Udp, "aws.amazon.io.", false),
        ("F13", 3, D2, 53, Udp, "example.com.", false),
        ("F14", 3, D3, 53, Udp, "example.com.", true),
        ("F16", 3, D3, 53, Tcp, "amazon.com.", false),
        ("F17", 3, D4, 53, Tcp, "example.com.", false),
        ("nil rules", 3, D4, 53, Udp, r"o\.dd.example.com.", true),
        ("nobody", 2, D1, 53, Udp, "example.com.", false),
    ];
    for (row, endpoint, server, port, transport, name, allowed) in rows {
        let verdict = ask(&handle, endpoint, server, port, transport, name);
        assert_eq!(verdict == Verdict::Allow, allowed, "{row}: {verdict:?}");
    }
}

#[test]
fn a_refusal_has_its_reason() {
    let handle = with_udp_rules(vec![(Some(D1), names(&["a.b"]))]);
    for (endpoint, server, port, name, reason) in [
        (2, D1, 53, "a.b.", DenyReason::NoRules),
        (1, D1, 54, "a.b.", DenyReason::NoRulesForPort),
        (1, D2, 53, "a.b.", DenyReason::ServerNotSelected),
        (1, D1, 53, "c.b.", DenyReason::NameNotAllowed),
    ] {
        let verdict = ask(&handle, endpoint, server, port, Transport::Udp, name);
        assert_eq!(verdict, Verdict::Deny(reason));
    }
}

#[test]
fn a_bad_pattern_is_reported_and_allows_nothing() {
    let handle = PolicyHandle::new();
    let errors = handle.apply(
        &[of(
            1,
            vec![port(
                53,
                Transport::Udp,
                vec![(None, names(&["(?<=a)*", "good.x", ""]))],
            )],
        )],
        &[],
    );
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].to_string().contains("'('"), "{}", errors[0]);
    assert_eq!(ask_udp(&handle, D1, "good.x."), Verdict::Allow);
    assert!(matches!(ask_udp(&handle, D1, "a."), Verdict::Deny(_)));
}

#[test]
fn restored_expressions_and_prefixes_allow_their_names_and_servers() {
    let handle = PolicyHandle::new();
    let rule = |text: &str, servers| SelectorRule {
        selector: String::new(),
        servers,
        names: NameRules::Regex(text.to_owned()),
    };
    let prefix = Servers::Prefixes(vec!["10.0.0.0/24".parse().unwrap()]);
    let other = Servers::Prefixes(vec!["10.0.1.0/24".parse().unwrap()]);
    handle.apply(
        &[of(
            1,
            vec![PortRules {
                port: 53,
                transport: Transport::Udp,
                rules: vec![
                    rule("^(?:sub[.]ubuntu[.]com[.])$", prefix.clone()),
                    rule("^(?:a+[.]x[.])$", prefix),
                    rule("(?:)", other),
                ],
            }],
        )],
        &[],
    );
    for name in ["sub.ubuntu.com.", "aaa.x."] {
        assert_eq!(ask_udp(&handle, D1, name), Verdict::Allow, "{name}");
    }
    assert!(matches!(ask_udp(&handle, D1, "b.x."), Verdict::Deny(_)));
}

#[test]
fn equal_rule_sets_are_one_and_nothing_outlives_its_use() {
    let handle = PolicyHandle::new();
    let rules = |own: &str| {
        vec![
            port(
                53,
                Transport::Udp,
                vec![(Some(D1), names(&["a.x", "*.b.x", "**.c.x", "d*.x"]))],
            ),
            port(
                53,
                Transport::Tcp,
                vec![(Some(D1), names(&["d*.x", "**.c.x", "*.b.x", "a.x"]))],
            ),
            port(54, Transport::Tcp, vec![(Some(D1), names(&[own]))]),
        ]
    };
    handle.replace_all(&[of(1, rules("one")), of(2, rules("two"))]);
    assert_eq!(handle.sizes(), (5, 3, 1));
    handle.apply(&[of(1, rules("three"))], &[]);
    assert_eq!(handle.sizes(), (5, 3, 1));
    assert_eq!(
        ask(&handle, 1, D1, 54, Transport::Tcp, "three."),
        Verdict::Allow
    );
    assert!(matches!(
        ask(&handle, 1, D1, 54, Transport::Tcp, "one."),
        Verdict::Deny(_)
    ));
    assert_eq!(
        ask(&handle, 2, D1, 53, Transport::Udp, "q.r.c.x."),
        Verdict::Allow
    );
    handle.apply(&[], &[EndpointId(1)]);
    assert_eq!(handle.load().endpoints(), [EndpointId(2)]);
    handle.replace_all(&[]);
    assert_eq!(handle.sizes(), (0, 0, 0));
    assert!(handle.load().is_empty());
}

#[test]
fn described_rules_compile_to_the_same() {
    let patterns = ["a.x", "*.b.x", "**.c.x", "*d.x"];
    let handle = with_udp_rules(vec![(Some(D1), names(&patterns))]);
    let described = handle.load().describe(EndpointId(1)).unwrap();
    let before = handle.sizes();
    handle.apply(
        &[RulesOf {
            endpoint: EndpointId(8),
            rules: described,
        }],
        &[],
    );
    assert_eq!(handle.sizes(), before);
}
