//! Cost of each step of the main path, without sockets.

use std::{hint::black_box, net::IpAddr, net::Ipv4Addr};

use criterion::{Criterion, criterion_group, criterion_main};
use dns_policy::{
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
    table::{PolicyHandle, Question},
};
use dns_wire::{answer, query::Query};
use hickory_proto::{
    op::{Message, OpCode, Query as HickoryQuery},
    rr::{Name, RData, Record, RecordType, rdata},
};
use shared_maps::{EndpointId, IdentityId};

/// Endpoints of the rule benchmarks.
const ENDPOINTS: u16 = 10_000;

fn name(text: &str) -> Name {
    Name::from_ascii(text).expect("a literal name")
}

fn question_bytes() -> Vec<u8> {
    let mut message = Message::query();
    message.add_query(HickoryQuery::query(
        name("www.team-17.example.com."),
        RecordType::A,
    ));
    message.to_vec().expect("a small message")
}

fn answer_bytes() -> Vec<u8> {
    let mut message = Message::response(1, OpCode::Query);
    message.add_query(HickoryQuery::query(name("www.example.com."), RecordType::A));
    let cname = RData::CNAME(rdata::CNAME(name("edge.cdn.example.net.")));
    message.add_answer(Record::from_rdata(name("www.example.com."), 300, cname));
    for host in 1..=4 {
        let a = RData::A(rdata::A(Ipv4Addr::new(192, 0, 2, host)));
        message.add_answer(Record::from_rdata(name("edge.cdn.example.net."), 60, a));
    }
    message.to_vec().expect("a small message")
}

/// 600 names and 30 wildcards for each endpoint, and two more names for nine of ten endpoints.
fn rules(endpoint: u16) -> RulesOf {
    let mut names: Vec<_> = (0..600)
        .map(|n| NameRule::Name(format!("host-{n}.service.example.org")))
        .collect();
    names.extend((0..30).map(|n| NameRule::Pattern(format!("*.team-{n}.example.com"))));
    if !endpoint.is_multiple_of(10) {
        names.extend((0..2).map(|n| NameRule::Name(format!("own-{n}-{endpoint}.example.org"))));
    }
    let rule = SelectorRule {
        selector: "kube-dns".to_owned(),
        servers: Servers::Identities([IdentityId(1053)].into()),
        names: NameRules::Names(names),
    };
    let port = |transport| PortRules {
        port: 53,
        transport,
        rules: vec![rule.clone()],
    };
    let ports = vec![port(Transport::Udp), port(Transport::Tcp)];
    RulesOf {
        endpoint: EndpointId(endpoint),
        rules: EndpointRules { ports },
    }
}

fn wire(c: &mut Criterion) {
    let query = question_bytes();
    c.bench_function("query/decode", |b| {
        b.iter(|| Query::decode(black_box(&query)).map(drop))
    });
    let answer = answer_bytes();
    c.bench_function("answer/read", |b| {
        b.iter(|| answer::read(black_box(&answer)).map(drop))
    });
}

fn policy(c: &mut Criterion) {
    let handle = PolicyHandle::new();
    for endpoint in 0..ENDPOINTS {
        handle.apply(&[rules(endpoint)], &[]);
    }
    for (what, name) in [
        ("policy/exact", "host-599.service.example.org."),
        ("policy/wildcard", "www.team-17.example.com."),
        ("policy/denied", "www.elsewhere.example."),
    ] {
        let question = Question {
            endpoint: EndpointId(4_321),
            port: 53,
            transport: Transport::Udp,
            server: IdentityId(1053),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            name,
        };
        c.bench_function(what, |b| {
            b.iter(|| handle.load().check(black_box(&question)))
        });
    }
    let changed = [rules(4_321)];
    c.bench_function("policy/update one of 10,000 endpoints", |b| {
        b.iter(|| handle.apply(black_box(&changed), &[]));
    });
}

fn matcher(c: &mut Criterion) {
    for rules in [10, 1_000, 100_000] {
        let names = (0..rules / 2).flat_map(|n| {
            [
                NameRule::Name(format!("host-{n}.example.org")),
                NameRule::Pattern(format!("*.team-{n}.example.com")),
            ]
        });
        let rule = SelectorRule {
            selector: "kube-dns".to_owned(),
            servers: Servers::Any,
            names: NameRules::Names(names.collect()),
        };
        let ports = vec![PortRules {
            port: 53,
            transport: Transport::Udp,
            rules: vec![rule],
        }];
        let handle = PolicyHandle::new();
        let endpoint = EndpointId(1);
        let rules_of = RulesOf {
            endpoint,
            rules: EndpointRules { ports },
        };
        handle.apply(&[rules_of], &[]);
        for (what, name) in [
            ("exact", format!("host-{}.example.org.", rules / 2 - 1)),
            (
                "wildcard",
                format!("www.team-{}.example.com.", rules / 2 - 1),
            ),
            ("denied", "www.elsewhere.example.".to_owned()),
        ] {
            let question = Question {
                endpoint,
                port: 53,
                transport: Transport::Udp,
                server: IdentityId(1053),
                address: IpAddr::V4(Ipv4Addr::LOCALHOST),
                name: &name,
            };
            c.bench_function(&format!("matcher/{rules} rules/{what}"), |b| {
                b.iter(|| handle.load().check(black_box(&question)))
            });
        }
    }
}

criterion_group!(benches, wire, policy, matcher);
criterion_main!(benches);
