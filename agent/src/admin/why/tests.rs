//! The words of the walk, and the JSON that programs read.

mod backends;
mod unselected;
mod untrusted;

use std::net::IpAddr;

use agent_core::{
    core::{
        snapshot::{DnsRulesView, EndpointView, NameView},
        why::{
            AddressFound, Findings, LookupRules, MeantBy, Target, UntrustedAnswer,
            peer_found::{BackendFound, PeerFound, ServiceFound},
        },
    },
    datapath::map_query::ProgramFault,
    policy::trace::{FlowDirection, Port, RuleView, Verdict},
};
use dns_policy::{boot_time::BootTime, name::Fqdn};
use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, PolicyKey, PolicyValue},
};

use super::{AddressRead, Entries, Question, Receiver, SideRead, matched, text::text, walk::Walk};
use crate::admin::model::{HopState, Why};

const IDENTITY: IdentityId = IdentityId(16_777_217);
const HTTPS: Port = Port {
    protocol: 6,
    number: 443,
};

fn rule() -> RuleView {
    RuleView {
        document: "CiliumNetworkPolicy/shop/web".to_owned(),
        rule: "spec.egress[1]".to_owned(),
        says: "allow".to_owned(),
        selector: Some("fqdn:*.example.com".to_owned()),
        ports: vec!["TCP 443".to_owned()],
    }
}

/// Findings of an endpoint whose packets pass: every hop is found.
fn found() -> Findings {
    Findings {
        has_tier: false,
        is_pruned: false,
        endpoint: EndpointView {
            id: 7,
            key: "web.yaml/web".to_owned(),
            identity: 300,
            labels: vec!["k8s:app=web".to_owned()],
            ipv4: Some("10.0.0.7".to_owned()),
            state: "ready".to_owned(),
            egress_enforced: true,
            policies: vec!["CiliumNetworkPolicy/shop/web".to_owned()],
            policy_revision: 3,
            dns_rules: vec![DnsRulesView::default()],
            ..EndpointView::default()
        },
        wanted_revision: 3,
        service: None,
        dns: LookupRules {
            allowed: vec![DnsRulesView {
                port: 53,
                protocol: "UDP".to_owned(),
                selector: "any:k8s-app=kube-dns".to_owned(),
                servers: Some(vec![310]),
                names: None,
            }],
            direct: Vec::new(),
            closed: Vec::new(),
        },
        open_families: Vec::new(),
        by_name: vec![rule()],
        names: vec![NameView {
            endpoint: 7,
            name: "www.example.com.".to_owned(),
            address: "192.0.2.1".to_owned(),
            source: "lookup".to_owned(),
            ttl: 60,
            expires_at: 42_000_000_000,
            ..NameView::default()
        }],
        elsewhere: Vec::new(),
        addresses: vec![AddressFound {
            address: [192, 0, 2, 1].into(),
            prefix: Some("192.0.2.1/32".to_owned()),
            owners: vec!["fqdn-name-manager/www.example.com.".to_owned()],
            wanted: IDENTITY.0,
            given: Some(IDENTITY.0),
            unresolved: false,
            limited: false,
            world: 9,
            endpoint: None,
            elsewhere: None,
            refused: None,
        }],
        untrusted: Vec::new(),
        trusted_dns: Vec::new(),
        refused: Vec::new(),
        worlds: vec![IdentityId::WORLD_IPV4],
    }
}

/// Addresses about which nothing is known, without a rule about them.
fn outside(found: &Findings) -> [SideRead; 1] {
    let key = PolicyKey::new(0, EGRESS, 0, 0, 0);
    let is_free = !found.endpoint.egress_enforced;
    let verdict = match is_free {
        true => Verdict::NotRestricted,
        false => Verdict::NoRule,
    };
    let peer = PeerFound {
        verdict: Some(verdict),
        ..PeerFound::default()
    };
    let entries = Entries {
        decides: is_free.then(|| (key, PolicyValue::allow(key))),
        open: Vec::new(),
    };
    [(peer, Ok(entries))]
}

fn read() -> AddressRead {
    let key = PolicyKey::new(IDENTITY.0, EGRESS, 6, 443, 16);
    AddressRead {
        carried: None,
        ipcache: Ok(Some(IDENTITY.0)),
        identity: IDENTITY,
        peer: PeerFound {
            labels: Some(vec![
                "fqdn:*.example.com".to_owned(),
                "reserved:world-ipv4".to_owned(),
            ]),
            verdict: Some(Verdict::Allowed),
            tier: None,
            by: vec![rule()],
            about: vec![rule()],
            service: None,
        },
        entries: Ok(Entries {
            decides: Some((key, PolicyValue::allow(key))),
            open: Vec::new(),
        }),
        receiver: None,
        node_port: None,
        ingress: Vec::new(),
        blocks: Vec::new(),
    }
}

fn why(found: &Findings, read: &[AddressRead], learning: bool) -> Why {
    why_with(found, read, learning, &[])
}

fn why_with(
    found: &Findings,
    read: &[AddressRead],
    learning: bool,
    programs: &[ProgramFault],
) -> Why {
    let question = Question {
        endpoint: "7".to_owned(),
        target: Target::Name(Fqdn::normalise("WWW.example.com")),
        port: Some(HTTPS),
        direction: FlowDirection::Egress,
    };
    let lxc = Ok(vec![([10, 0, 0, 7].into(), Some((7, 300)))]);
    let outside = outside(found);
    Walk {
        question: &question,
        found,
        lxc: &lxc,
        programs,
        read,
        outside: &outside,
        learning,
        now: BootTime::START,
    }
    .why()
}

#[track_caller]
fn missing(why: &Why, hop: &str, says: &str) {
    assert!(!why.allowed, "{why:#?}");
    let first = why.hops.iter().find(|hop| hop.state == HopState::Missing);
    let first = first.expect("something is missing");
    assert_eq!(first.hop, hop, "{}", text(why));
    let all = format!("{}; {:?}; {}", first.text, first.remedy, why.verdict);
    assert!(all.contains(says), "{all}");
}

/// The fields are documented in docs/src/why.md; new ones may be added.
#[test]
fn the_json_matches_the_golden_file() {
    let why = why(&found(), &[read()], true);
    let golden = include_str!("../../../tests/data/why.json");
    let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
    assert_eq!(
        serde_json::to_value(&why).unwrap(),
        golden,
        "{}",
        serde_json::to_string_pretty(&why).unwrap()
    );
    let text = text(&why);
    assert!(!text.contains("MISSING"), "{text}");
    assert!(text.ends_with(
        "allowed: 192.0.2.1: passes: allowed by CiliumNetworkPolicy/shop/web spec.egress[1] \
         (fqdn:*.example.com; TCP 443)\n"
    ));
}

#[test]
fn each_missing_hop_is_named() {
    let read = read();
    let all = std::slice::from_ref(&read);
    let mut lacks = found();
    lacks.wanted_revision = 4;
    let behind = why(&lacks, all, true);
    assert!(behind.allowed, "by the map in force: {behind:#?}");
    assert_eq!(behind.hops[2].state, HopState::Missing);

    let mut lacks = found();
    lacks.dns.allowed[0].servers = Some(Vec::new());
    missing(&why(&lacks, all, true), "dns", "selects no server now");

    let mut lacks = found();
    lacks.names.clear();
    lacks.addresses.clear();
    missing(&why(&lacks, &[], false), "names", "holdfast-sdp");
    lacks.by_name.clear();
    missing(&why(&lacks, &[], true), "selector", "toFQDNs");

    let mut full = read.clone();
    full.ipcache = Ok(None);
    let mut lacks = found();
    lacks.addresses[0].given = None;
    full.identity = IdentityId(9);
    full.entries = Ok(Entries::default());
    missing(
        &why(&lacks, &[full], true),
        "ipcache",
        "holdfast-agent status",
    );

    let mut exhausted = found();
    exhausted.addresses[0].unresolved = true;
    exhausted.addresses[0].wanted = 9;
    let mut closed = read.clone();
    closed.entries = Ok(Entries::default());
    let closed = [closed];
    missing(&why(&exhausted, &closed, true), "ipcache", "used up");

    let mut breaker = found();
    breaker.addresses[0].unresolved = true;
    breaker.addresses[0].limited = true;
    let remedy = "--tofqdns-max-identities";
    missing(&why(&breaker, &closed, true), "ipcache", remedy);

    let mut stranger = read.clone();
    stranger.peer = PeerFound::default();
    stranger.entries = Ok(Entries::default());
    missing(
        &why(&found(), &[stranger], true),
        "identity",
        "has no owner",
    );
}

#[test]
fn what_becomes_of_packets_that_no_program_judges_is_reported() {
    let mut closed = read();
    closed.entries = Ok(Entries::default());
    let closed = [closed];
    let detached = |program| ProgramFault::Detached { program };
    let dropped = why_with(&found(), &closed, true, &[detached("from_pod")]);
    assert!(!dropped.allowed, "{dropped:#?}");
    assert!(
        dropped
            .verdict
            .starts_with("is dropped because no program judges it: from_pod is not attached"),
        "{}",
        dropped.verdict
    );
    let faults = [ProgramFault::OutOfGroup(7), detached("from_pod")];
    let open = why_with(&found(), &closed, true, &faults);
    assert!(open.allowed, "{open:#?}");
    assert!(
        open.verdict
            .starts_with("passes without being judged: from_pod is not attached"),
        "{}",
        open.verdict
    );
    assert_eq!(open.hops[1].state, HopState::Missing);
    let other_way = why_with(&found(), &closed, true, &[detached("to_pod")]);
    assert!(!other_way.allowed);
    let overtaken = ProgramFault::NotFirst {
        program: "from_pod",
        first: "other, number 7".to_owned(),
    };
    let maybe = why_with(&found(), &closed, true, &[overtaken]);
    assert!(!maybe.allowed);
    assert!(
        maybe.verdict.contains("but program other"),
        "{}",
        maybe.verdict
    );
}

#[test]
fn an_address_that_no_answer_opens_is_reported_as_such() {
    let mut refused = found();
    refused.names.clear();
    refused.addresses[0].address = [169, 254, 169, 254].into();
    refused.addresses[0].refused = Some("169.254.0.0/16".parse().unwrap());
    refused.refused = vec![[169, 254, 169, 254].into()];
    let mut closed = read();
    closed.peer = PeerFound {
        labels: Some(vec!["reserved:world-ipv4".to_owned()]),
        verdict: Some(Verdict::NoRule),
        ..PeerFound::default()
    };
    closed.entries = Ok(Entries::default());
    let shut = why(&refused, &[closed], true);
    assert!(!shut.allowed);
    let says = "answers had 169.254.169.254, which gets no label of a name \
                (--tofqdns-refuse-prefix): a toCIDR rule opens it";
    assert!(text(&shut).contains(says), "{}", text(&shut));
    // A block's rule opens it.
    let open = why(&refused, &[read()], true);
    assert!(
        open.allowed && text(&open).contains(says),
        "{}",
        text(&open)
    );
    assert!(!text(&open).contains("MISSING"), "{}", text(&open));
}

fn backend(who: &str, verdict: Option<Verdict>) -> BackendFound {
    BackendFound {
        tier: None,
        service_port: HTTPS.to_string(),
        who: who.to_owned(),
        address: [10, 2, 0, 9].into(),
        is_chosen: true,
        endpoint: None,
        elsewhere: None,
        is_left_out: verdict.is_none(),
        port: Port {
            number: 8443,
            ..HTTPS
        },
        verdict,
        by: vec![rule()],
    }
}

#[test]
fn a_service_is_followed_to_each_pod_behind_it() {
    let good = backend("10.2.0.9 (app=db)", Some(Verdict::Allowed));
    let bad = BackendFound {
        by: Vec::new(),
        ..backend("10.2.0.10 (app=old)", Some(Verdict::NoRule))
    };
    let late = backend(
        "10.2.0.11 (pod shop/db-2, which no document describes)",
        None,
    );
    let mut open = read();
    let service = |backends: &[&BackendFound]| ServiceFound {
        key: "shop/db".to_owned(),
        ports: vec![HTTPS.to_string()],
        backends: backends.iter().map(|backend| (*backend).clone()).collect(),
    };
    open.ingress = vec![None, None];
    open.peer.service = Some(service(&[&good, &late]));
    let passes = text(&why(&found(), &[open.clone()], true));
    for part in [
        "Service shop/db (443/TCP)",
        "443/TCP goes to 10.2.0.9 (app=db) at 8443/TCP: allowed by CiliumNetworkPolicy/shop/web",
        "left out, its pod is not known yet",
    ] {
        assert!(passes.contains(part), "{part}: {passes}");
    }
    let mut mixed = open.clone();
    mixed.peer.service = Some(service(&[&good, &bad]));
    mixed.peer.verdict = Some(Verdict::NoRule);
    mixed.entries = Ok(Entries::default());
    let closed = why(&found(), &[mixed.clone()], true);
    assert!(!closed.allowed);
    let says = text(&closed);
    for part in [
        "MISSING  backend     443/TCP goes to 10.2.0.10 (app=old) at 8443/TCP: no rule allows it",
        "a Service is open only if every backend is",
    ] {
        assert!(says.contains(part), "{part}: {says}");
    }
    assert_eq!(says.matches("do: ").count(), 1, "{says}");
    mixed.peer.service = Some(ServiceFound {
        ports: vec!["80/TCP".to_owned()],
        ..service(&[])
    });
    let says = text(&why(&found(), &[mixed], true));
    assert!(says.contains("has no port 443/TCP, but 80/TCP"), "{says}");
}

#[test]
fn an_unreadable_map_allows_nothing() {
    let mut blind = read();
    blind.ipcache = Err("no such map".to_owned());
    blind.entries = Err("no such map".to_owned());
    let why = why(&found(), &[blind], true);
    assert!(!why.allowed);
    let unknown = why.hops.iter().filter(|hop| hop.state == HopState::Unknown);
    assert_eq!(unknown.count(), 2);
    assert!(why.verdict.contains("cannot be read"), "{}", why.verdict);
}

#[test]
fn every_address_counts_and_so_does_the_receiver() {
    let mut two = found();
    let mut second = two.addresses[0].clone();
    second.address = [192, 0, 2, 2].into();
    two.addresses.push(second);
    let mut closed = read();
    closed.entries = Ok(Entries::default());
    let half = why(&two, &[read(), closed.clone()], true);
    missing(
        &half,
        "policy-map",
        "192.0.2.2: dropped: the kernel's map is not as policy says",
    );

    let mut received = read();
    received.receiver = Some(Receiver {
        endpoint: EndpointId(8),
        peer: PeerFound {
            verdict: Some(Verdict::NoRule),
            ..PeerFound::default()
        },
        entries: Ok(Entries::default()),
    });
    let refused = why(&found(), &[received], true);
    missing(
        &refused,
        "receiver",
        "endpoint 8 drops it: no rule allows it",
    );
}

#[test]
fn many_addresses_count_and_are_not_shown_one_by_one() {
    let mut many = found();
    let first = many.addresses[0].clone();
    let address = |n: u16| AddressFound {
        address: IpAddr::from([192, 0, n.to_be_bytes()[0], n.to_be_bytes()[1]]),
        ..first.clone()
    };
    many.addresses = (0..1000).map(address).collect();
    let mut all = vec![read(); 1000];
    let open = why(&many, &all, true);
    assert!(open.allowed);
    assert!(open.hops.len() < 60, "{}", open.hops.len());
    assert!(open.verdict.ends_with("; and 984 more"), "{}", open.verdict);
    let last = open.hops.last().expect("hops");
    assert_eq!(last.text, "packets to 984 more addresses pass");
    all[999].entries = Ok(Entries::default());
    let closed = why(&many, &all, true);
    missing(&closed, "policy-map", "192.0.3.231: dropped");
}

#[test]
fn an_unrestricted_endpoint_needs_no_entry() {
    let mut free = found();
    free.endpoint.egress_enforced = false;
    free.endpoint.policies.clear();
    free.endpoint.dns_rules.clear();
    free.dns.allowed.clear();
    free.by_name.clear();
    free.names.clear();
    free.addresses.clear();
    let why = why(&free, &[], true);
    assert!(why.allowed, "{why:#?}");
    assert!(!text(&why).contains("MISSING"), "{}", text(&why));
}

#[test]
fn a_name_without_an_address_passes_a_firewall_that_denies_nothing_outside() {
    let mut free = found();
    free.endpoint.egress_enforced = false;
    free.endpoint.dns_rules.clear();
    free.has_tier = true;
    free.by_name.clear();
    free.dns.allowed.clear();
    free.names.clear();
    free.addresses.clear();
    let passes = why(&free, &[], true);
    assert!(passes.allowed, "{}", text(&passes));
    assert_eq!(
        passes.verdict,
        "no address of it is known; addresses outside pass: no rule denies it, and nothing else \
         is restricted"
    );
    assert!(!text(&passes).contains("MISSING"), "{}", text(&passes));
    // A rule that denies the name itself.
    free.by_name = vec![RuleView {
        says: "tier-deny".to_owned(),
        ..rule()
    }];
    assert!(!why(&free, &[], true).allowed);
}

#[test]
fn a_lookup_returns_the_key_that_it_found() {
    for (protocol, port, bits) in [(6, 8080, 12), (6, 443, 16), (17, 0, 0), (0, 0, 0)] {
        let key = PolicyKey::new(300, EGRESS, protocol, port, bits);
        let asked = PolicyKey::new(300, EGRESS, protocol.max(6), port | 3, 16);
        let asked = if bits == 16 {
            PolicyKey::new(300, EGRESS, 6, 443, 16)
        } else {
            asked
        };
        assert_eq!(matched(asked, PolicyValue::allow(key)), key);
    }
}

#[test]
fn the_name_of_a_service_needs_no_name_rule_and_no_learned_address() {
    let mut of_service = found();
    of_service.by_name.clear();
    of_service.names.clear();
    of_service.service = Some("shop/db".to_owned());
    let mut answer = read();
    answer.peer.service = Some(ServiceFound {
        key: "shop/db".to_owned(),
        ports: vec![HTTPS.to_string()],
        backends: vec![backend("10.2.0.9 (app=db)", Some(Verdict::Allowed))],
    });
    answer.ingress = vec![None];
    let passes = why(&of_service, &[answer.clone()], true);
    assert!(passes.allowed, "{}", text(&passes));
    assert!(
        text(&passes).contains("is the name of Service shop/db: 192.0.2.1"),
        "{}",
        text(&passes)
    );
    // Without a DNS rule, its pod cannot look the name up.
    of_service.dns.allowed.clear();
    let refused = why(&of_service, &[answer], true);
    assert!(!refused.allowed, "{}", text(&refused));
    assert!(refused.verdict.contains("its queries are refused"));
}

#[test]
fn an_endpoint_that_is_a_pod_is_called_as_kubernetes_calls_it() {
    let mut pod = found();
    pod.endpoint.key = "cni/299b5c2a/eth0".to_owned();
    pod.endpoint.pod = Some("shop/web-1".to_owned());
    let says = text(&why(&pod, &[read()], true));
    assert!(says.starts_with("endpoint 7 (shop/web-1) to "), "{says}");
    assert!(!says.contains("cni/"), "{says}");
}
