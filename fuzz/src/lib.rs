//! What is fuzzed: every reader of bytes that others write.
//!
//! Each function takes any bytes, must not panic, and checks its result. `targets/` wraps them for
//! `cargo fuzz`; `tests/replay.rs` runs them over the kept inputs with every test run.

mod stage;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use agent_core::{labels::LabelSet, named_port::NamedPorts, policy::parse::parse_documents};
use dns_policy::{
    boot_time::BootTime,
    name::Fqdn,
    pattern::{Pattern, restored},
    rule::{NameRule, NameRules},
    table::PolicyHandle,
};
use dns_wire::{answer, reply::QueryHeader};
use fqdn_proto::{encoded::Encoded, fqdndata::PolicyState, native as wire};
use hickory_proto::{op::Message, serialize::binary::BinDecodable as _};
use holdfast_agent::{endpoint::source::EndpointDocument, grpc};
use holdfast_sdp::{
    journal::ledger::Ledger,
    link::convert,
    listener::tcp::frames::FrameReader,
    proxy::{QueryDecision, RulesWait},
    query::pending::{Arrival, Identities, PendingQuery},
    restore,
};
use limits::yaml::{self, YamlError};
use prost::Message as _;
use serde_json::Value;
use shared_maps::IdentityId;

use stage::Stage;

/// A function that is fuzzed.
pub type Target = fn(&[u8]);

/// All functions by name, which is also the name of the directory of kept inputs.
pub const TARGETS: [(&str, Target); 11] = [
    ("query", query),
    ("frames", frames),
    ("answer", answer),
    ("ep_config", ep_config),
    ("journal", journal),
    ("grpc", grpc),
    ("fqdndata", fqdndata),
    ("pattern", pattern),
    ("policy", policy),
    ("yaml", yaml),
    ("endpoint", endpoint),
];

const BOOT: &str = "11111111-2222-3333-4444-555555555555";
const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53)), 53);

/// A datagram from a pod, through the whole main path.
pub fn query(data: &[u8]) {
    let stage = Stage::new();
    let mut own = Vec::new();
    let from = Arrival {
        client: SocketAddr::from(([10, 0, 0, 1], 40_000)),
        server: SERVER,
        transport: dns_policy::rule::Transport::Udp,
        at: Instant::now(),
    };
    match stage.proxy.query(data, &from, RulesWait::Over, &mut own) {
        QueryDecision::Forward(forward) => {
            assert!(own.is_empty(), "a query that goes on has no answer of ours");
            assert!(
                data.windows(forward.question.len())
                    .any(|w| w == forward.question)
            );
        }
        QueryDecision::Reply => {
            assert_eq!(own.get(..2), data.get(..2), "the id is echoed");
            assert!(
                own.get(2).is_some_and(|flags| flags & 0x80 != 0),
                "QR is set"
            );
            let read = Message::from_bytes(&own);
            assert!(
                read.is_ok(),
                "another decoder cannot read {own:02x?}: {read:?}"
            );
        }
        QueryDecision::Ignore => assert!(own.is_empty()),
        QueryDecision::AwaitRules(_) => unreachable!("a query that may not wait"),
    }
}

/// A client's TCP stream, read in pieces whose length the first byte gives.
pub fn frames(data: &[u8]) {
    let Some((cut, stream)) = data.split_first() else {
        return;
    };
    let mut whole = FrameReader::default();
    whole.room().extend_from_slice(stream);
    let mut pieces = FrameReader::default();
    let mut of_pieces = Vec::new();
    let mut message = Vec::new();
    for piece in stream.chunks(usize::from(*cut).max(1)) {
        pieces.room().extend_from_slice(piece);
        while pieces.take(&mut message) {
            of_pieces.push(message.clone());
        }
    }
    let mut of_whole = Vec::new();
    while whole.take(&mut message) {
        of_whole.push(message.clone());
    }
    assert_eq!(of_pieces, of_whole, "how a stream is cut changes nothing");
    assert_eq!(pieces.is_partial(), whole.is_partial());
    let taken: usize = of_whole.iter().map(|m| m.len() + 2).sum();
    assert_eq!(whole.is_partial(), taken < stream.len());
}

/// A datagram from a server.
pub fn answer(data: &[u8]) {
    let question = b"\x03www\x04good\x04test\0\0\x01\0\x01";
    let _ours = answer::answers(data, question);
    if let Ok(reading) = answer::read(data)
        && let Some(learned) = &reading.learned
    {
        assert!(!learned.addresses.is_empty());
        for address in &learned.addresses {
            let bytes = match address {
                IpAddr::V4(ip) => ip.octets().to_vec(),
                IpAddr::V6(ip) => ip.octets().to_vec(),
            };
            assert!(
                data.windows(bytes.len()).any(|w| w == bytes),
                "{address} is not in it"
            );
        }
    }
    let stage = Stage::new();
    let from = Arrival {
        client: (stage.endpoint.client, 4711).into(),
        server: SERVER,
        transport: dns_policy::rule::Transport::Udp,
        at: Instant::now(),
    };
    let query = PendingQuery {
        from,
        header: QueryHeader {
            id: 1,
            flags: 0,
            edns: None,
        },
        question,
        hop_by_hop: None,
        endpoint: stage.endpoint,
        identities: Identities {
            client: IdentityId(256),
            server: IdentityId::UNKNOWN,
        },
        source: None,
        policy_check: Duration::ZERO,
        sent_at: Some(from.at),
        logged: None,
        joined: Vec::new(),
    };
    stage
        .proxy
        .answer(&query, data, (from.at, BootTime::from_nanos(1)), || {
            Box::new(|_| {})
        });
}

/// Parses a file `ep_config.json` of an endpoint.
pub fn ep_config(data: &[u8]) {
    let _file_or_error = restore::file::parse(data, BOOT);
}

/// A journal that another process left.
pub fn journal(data: &[u8]) {
    let Ok((ledger, _torn)) = Ledger::read(data, BOOT, 64) else {
        return;
    };
    let image = ledger.image(BOOT, BootTime::START);
    let (again, torn) = Ledger::read(&image, BOOT, 64).expect("what is written can be read");
    assert!(!torn, "what is written is whole");
    assert_eq!(sorted(&again), sorted(&ledger));
}

fn sorted(ledger: &Ledger) -> Vec<String> {
    let all = ledger.mappings(BootTime::START).into_iter();
    let mut all: Vec<String> = all.map(|written| format!("{written:?}")).collect();
    all.sort_unstable();
    all
}

/// A state of a Cilium agent.
pub fn fqdndata(data: &[u8]) {
    let Ok(state) = Encoded::<PolicyState>::from(data.to_vec()).decode() else {
        return;
    };
    let rows = state.egress_l7_dns_policy.iter();
    let named: BTreeSet<u32> = rows.map(|row| row.source_endpoint_id).collect();
    let (rules, _malformed) = convert::fqdndata_rules(state);
    let endpoints: BTreeSet<u32> = rules.iter().map(|of| of.endpoint.0.into()).collect();
    assert_eq!(endpoints.len(), rules.len(), "an endpoint has rules once");
    let valid = named.into_iter().filter(|id| u16::try_from(*id).is_ok());
    assert!(valid.eq(endpoints), "each endpoint of the state has rules");
    let policy = PolicyHandle::default();
    let errors = policy.apply(&rules, &[]);
    assert!(
        errors.is_empty(),
        "rules that were read compile: {errors:?}"
    );
}

/// Messages of the native service, at both ends.
pub fn grpc(data: &[u8]) {
    if let Ok(message) = wire::FqdnMapping::decode(data)
        && let Some(mapping) = grpc::convert::mapping(&message)
    {
        assert!(!mapping.addresses.is_empty());
        assert_eq!(mapping.addresses.len(), message.addresses.len());
    }
    if let Ok(message) = wire::EndpointDnsRules::decode(data) {
        let ports = message.ports.len();
        if let Ok(rules) = convert::rules(message) {
            assert_eq!(rules.rules.ports.len(), ports);
            let stage = Stage::new();
            let _errors = stage.policy.apply(&[rules], &[]);
        }
    }
}

/// A pattern, a restored rule, and names to match.
pub fn pattern(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (pattern, name) = text.split_once('\n').unwrap_or((&text, "www.good.test."));
    let name = Fqdn::normalise(name);
    for rule in [
        NameRule::Pattern(pattern.to_owned()),
        NameRule::Name(pattern.to_owned()),
    ] {
        if let Ok(parsed) = Pattern::parse(&rule) {
            let again = Pattern::parse(&parsed.to_rule()).expect("what is printed can be read");
            assert_eq!(parsed.matches(name.as_str()), again.matches(name.as_str()));
        }
    }
    if restored::names_of(pattern) == NameRules::every_name() {
        let inner = pattern.trim_start_matches('^').trim_end_matches('$');
        let inner = inner.trim_start_matches("(?:").trim_end_matches(')');
        let everything = inner.is_empty()
            || inner
                .split('|')
                .any(|one| matches!(one, ".*" | "[-a-zA-Z0-9_]*"));
        assert!(everything, "{pattern:?} is not everything");
    }
}

/// Parses a file of policy documents. Each error must name the file.
pub fn policy(data: &[u8]) {
    for document in parse_documents(&String::from_utf8_lossy(data), "fuzz.yaml") {
        if let Err(error) = document {
            assert!(error.to_string().contains("fuzz.yaml"), "{error}");
        }
    }
}

/// Any YAML or JSON: limits hold, and a fault in one document does not affect the others.
pub fn yaml(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let all: Vec<_> = yaml::documents(&text)
        .iter()
        .map(yaml::Document::value)
        .collect();
    for value in all.iter().flatten() {
        assert!(
            depth(value) <= yaml::MAX_DEPTH,
            "deeper than the limit: {value}"
        );
        let printed = value.to_string();
        // Printed as JSON, which is also YAML, a document reads as the same value.
        let again = yaml::documents(&printed);
        assert_eq!(again.len(), 1, "{printed}");
    }
    let broken = format!("[\n---\n{text}");
    let behind: Vec<_> = yaml::documents(&broken)
        .iter()
        .map(yaml::Document::value)
        .collect();
    assert!(matches!(behind.first(), Some(Err(_))));
    let values = |of: &[Result<Value, YamlError>]| -> Vec<Value> {
        let whole = of.iter().flatten().filter(|value| !value.is_null());
        whole.cloned().collect()
    };
    // Directives before the first marker belong to the broken document.
    if !text.contains('%') {
        assert_eq!(values(&behind), values(&all), "{text:?}");
    }
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(all) => 1 + all.iter().map(depth).max().unwrap_or(0),
        Value::Object(all) => 1 + all.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// An endpoint's document, its labels and its named ports.
pub fn endpoint(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for document in yaml::documents(&text) {
        let Ok(value) = document.value() else {
            continue;
        };
        let Ok(document) = serde_json::from_value::<EndpointDocument>(value) else {
            continue;
        };
        let _netns_or_error = document.namespace();
        let _ports_or_error = NamedPorts::parse(&document.named_ports);
        if let Ok(labels) = LabelSet::parse(&document.labels) {
            let again = LabelSet::parse(&labels.texts()).expect("what is printed can be read");
            assert_eq!(again, labels);
        }
    }
}
