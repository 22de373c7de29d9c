//! Properties of every input: our parsers against an independent decoder, our matchers against
//! regular expressions, and tables built step by step against tables built at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

use dns_policy::{
    name::Fqdn,
    pattern::{Pattern, SelectorMatcher, restored},
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
    table::{PolicyHandle, Question},
    verdict::Verdict,
};
use dns_wire::{
    answer,
    query::{Query, Unfit},
    reply,
};
use hickory_proto::{
    op::{Message, OpCode, Query as HickoryQuery, ResponseCode},
    rr::{Name, RData, Record, RecordType, rdata},
};
use proptest::prelude::*;
use regex::Regex;
use shared_maps::{EndpointId, IdentityId};

/// The bytes that `*` stands for, as a character class.
const CLASS: &str = "[-a-zA-Z0-9_]";

/// One alternative of a pattern's expression, written as simply as possible.
fn alternative(pattern: &str) -> String {
    let lower = pattern.to_ascii_lowercase();
    let full = if lower.ends_with('.') {
        lower
    } else {
        format!("{lower}.")
    };
    if full.trim_end_matches('.').chars().all(|c| c == '*')
        && full.starts_with('*')
        && full.matches('.').count() == 1
    {
        return ".*".to_owned();
    }
    let stars = full.chars().take_while(|c| *c == '*').count();
    let (head, rest) = if stars >= 2 && full[stars..].starts_with('.') {
        (
            format!("({CLASS}+([.]{CLASS}+){{0,}})[.]"),
            &full[stars + 1..],
        )
    } else {
        (String::new(), full.as_str())
    };
    let mut text = head;
    let mut last = ' ';
    for c in rest.chars() {
        match c {
            '*' if last == '*' => {}
            '*' => text.push_str(&format!("{CLASS}*")),
            '.' => text.push_str("[.]"),
            c => text.push(c),
        }
        last = c;
    }
    text
}

fn pattern_text() -> impl Strategy<Value = String> {
    "[ab*.-]{1,10}|[*]{1,3}[.]?[ab*.]{0,8}"
}

fn name_text() -> impl Strategy<Value = String> {
    "([ab_-]{0,3}[.]){0,5}|(a[.]){0,3}b[.]|[.]"
}

proptest! {
    #[test]
    fn patterns_match_like_their_expressions(pattern in pattern_text(), name in name_text()) {
        let rule = NameRule::Pattern(pattern.clone());
        let parsed = Pattern::parse(&rule).unwrap();
        let name = Fqdn::normalise(&name);
        let model = Regex::new(&format!("^(?:{})$", alternative(&pattern))).unwrap();
        prop_assert_eq!(parsed.matches(name.as_str()), model.is_match(name.as_str()), "{} on {}", pattern, name);
        if parsed != Pattern::All {
            prop_assert_eq!(SelectorMatcher::compile(&rule).unwrap().matches(&name), parsed.matches(name.as_str()));
        }
        prop_assert_eq!(Pattern::parse(&parsed.to_rule()).unwrap(), parsed);
    }

    #[test]
    fn stored_expressions_mean_the_same_when_read_back(
        patterns in prop::collection::vec(pattern_text(), 1..4),
        name in name_text(),
    ) {
        let text: Vec<_> = patterns.iter().map(|p| alternative(p)).collect();
        let text = format!("^(?:{})$", text.join("|"));
        let model = Regex::new(&text).unwrap();
        let name = Fqdn::normalise(&name);
        match restored::names_of(&text) {
            NameRules::All => prop_assert!(model.is_match("anything.at.all.")),
            NameRules::Names(rules) => {
                let any = rules.iter().any(|r| Pattern::parse(r).unwrap().matches(name.as_str()));
                prop_assert_eq!(any, model.is_match(name.as_str()), "{}", text);
            }
            NameRules::Regex(_) => prop_assert!(false, "{text} was not recognised"),
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = answer::read(&bytes);
        let _ = answer::answers(&bytes, bytes.get(12..).unwrap_or_default());
        let mut out = Vec::new();
        match Query::decode(&bytes) {
            Ok(query) => reply::to_query(&query, dns_wire::Rcode::NxDomain, Some(15), &mut out),
            Err(Unfit::Answer(code)) => reply::to_unfit(&bytes, code, &mut out),
            Err(Unfit::Ignore) => {}
        }
        // Other decoders must be able to parse our messages.
        if !out.is_empty() {
            prop_assert!(Message::from_vec(&out).is_ok(), "{bytes:?} -> {out:?}");
        }
    }

    #[test]
    fn changed_queries_are_read_like_another_decoder_reads_them(
        name in "([a-zA-Z0-9_]{1,12}[.]){0,6}",
        at in any::<prop::sample::Index>(),
        value in any::<u8>(),
    ) {
        let mut message = Message::query();
        message.metadata.id = 77;
        let name = Name::from_ascii(if name.is_empty() { "." } else { &name }).unwrap();
        message.add_query(HickoryQuery::query(name, RecordType::AAAA));
        let mut bytes = message.to_vec().unwrap();
        let at = at.index(bytes.len());
        bytes[at] = value;
        let Ok(ours) = Query::decode(&bytes) else { return Ok(()) };
        let theirs = Message::from_vec(&bytes);
        prop_assert!(theirs.is_ok(), "we read what they cannot: {bytes:?}");
        let theirs = theirs.unwrap();
        prop_assert_eq!(theirs.metadata.op_code, OpCode::Query);
        prop_assert_eq!(theirs.queries.len(), 1);
        prop_assert_eq!(theirs.metadata.id, ours.header.id);
        prop_assert_eq!(u16::from(theirs.queries[0].query_type()), ours.qtype);
        let plain = theirs.queries[0].name().iter().flatten()
            .all(|b| b.is_ascii_alphanumeric() || *b == b'_');
        if plain {
            prop_assert_eq!(theirs.queries[0].name().to_lowercase().to_ascii(), ours.name.as_str());
        }
    }

    #[test]
    fn answers_teach_the_addresses_of_the_chain(
        records in prop::collection::vec((0_usize..5, 0_usize..6, 0_u32..1000, any::<[u8; 4]>()), 0..12),
        code in prop::sample::select(vec![ResponseCode::NoError, ResponseCode::NXDomain]),
    ) {
        let names: Vec<_> = ["q.x.", "a.x.", "B.x.", "c.y.", "d.y."]
            .into_iter().map(|n| Name::from_str(n).unwrap()).collect();
        let mut message = Message::response(1, OpCode::Query);
        message.metadata.response_code = code;
        message.add_query(HickoryQuery::query(names[0].clone(), RecordType::A));
        for (owner, kind, ttl, bytes) in &records {
            let data = match names.get(*kind) {
                Some(target) => RData::CNAME(rdata::CNAME(target.clone())),
                None => RData::A(rdata::A(Ipv4Addr::from(*bytes))),
            };
            message.add_answer(Record::from_rdata(names[*owner].clone(), *ttl, data));
        }
        let bytes = message.to_vec().unwrap();
        let learned = answer::read(&bytes).unwrap().learned;
        let expected = if code == ResponseCode::NoError { model(&records) } else { None };
        prop_assert_eq!(learned.map(|l| (l.addresses, l.ttl)), expected);
    }

    #[test]
    fn tables_built_step_by_step_equal_those_built_at_once(
        steps in prop::collection::vec((0_u16..4, prop::option::of(prop::collection::vec(pattern_text(), 0..4))), 1..12),
        names in prop::collection::vec(name_text(), 8),
    ) {
        let stepwise = PolicyHandle::new();
        let mut latest = BTreeMap::new();
        for (endpoint, patterns) in steps {
            let id = EndpointId(endpoint);
            match patterns {
                Some(patterns) => {
                    let of = rules(id, patterns);
                    stepwise.apply(std::slice::from_ref(&of), &[]);
                    latest.insert(id, of);
                }
                None => {
                    stepwise.apply(&[], &[id]);
                    latest.remove(&id);
                }
            }
        }
        let at_once = PolicyHandle::new();
        at_once.replace_all(&latest.values().cloned().collect::<Vec<_>>());
        for endpoint in 0..4 {
            for name in &names {
                let name = Fqdn::normalise(name);
                let question = Question {
                    endpoint: EndpointId(endpoint),
                    port: 53,
                    transport: Transport::Udp,
                    server: IdentityId(9),
                    address: IpAddr::V4(Ipv4Addr::LOCALHOST),
                    name: name.as_str(),
                };
                let verdict = stepwise.load().check(&question);
                prop_assert_eq!(verdict, at_once.load().check(&question));
                let model = latest.get(&EndpointId(endpoint)).is_some_and(|of| allows(of, &name));
                prop_assert_eq!(verdict == Verdict::Allow, model);
            }
        }
        prop_assert_eq!(stepwise.load().endpoints(), at_once.load().endpoints());
    }
}

/// Addresses and lowest TTL reachable from name 0. A kind below 5 is a CNAME to that name.
fn model(records: &[(usize, usize, u32, [u8; 4])]) -> Option<(Vec<IpAddr>, u32)> {
    let mut addresses = BTreeSet::new();
    let (mut ttl, mut chain_ttl) = (u32::MAX, u32::MAX);
    let (mut at, mut seen) = (0, BTreeSet::new());
    while seen.insert(at) {
        for (_, _, own, bytes) in records.iter().filter(|r| r.0 == at && r.1 == 5) {
            addresses.insert(IpAddr::from(*bytes));
            ttl = ttl.min(*own).min(chain_ttl);
        }
        let Some(cname) = records.iter().find(|r| r.0 == at && r.1 < 5) else {
            break;
        };
        chain_ttl = chain_ttl.min(cname.2);
        at = cname.1;
    }
    (!addresses.is_empty()).then(|| (addresses.into_iter().collect(), ttl))
}

fn rules(endpoint: EndpointId, patterns: Vec<String>) -> RulesOf {
    let names = NameRules::Names(patterns.into_iter().map(NameRule::Pattern).collect());
    let rule = SelectorRule {
        selector: "any".to_owned(),
        servers: Servers::Any,
        names,
    };
    let port = PortRules {
        port: 53,
        transport: Transport::Udp,
        rules: vec![rule],
    };
    RulesOf {
        endpoint,
        rules: EndpointRules { ports: vec![port] },
    }
}

fn allows(of: &RulesOf, name: &Fqdn) -> bool {
    let rules = of.rules.ports.iter().flat_map(|p| &p.rules);
    rules.into_iter().any(|rule| match &rule.names {
        NameRules::Names(names) => names
            .iter()
            .any(|n| Pattern::parse(n).is_ok_and(|p| p.matches(name.as_str()))),
        NameRules::All | NameRules::Regex(_) => unreachable!("not generated"),
    })
}
