//! Services, from documents to entries.

mod objects;

use std::net::IpAddr;

use dns_policy::{
    name::Fqdn,
    rule::{NameRules, Servers, Transport},
};
use shared_maps::{
    IdentityId,
    ipcache::IpcacheKey,
    lxc::FLAG_HOST,
    policy::{EGRESS, PolicyKey},
    user::lxc_key,
};

pub(super) use self::objects::{db, egress, pod, service, slice, to};
use super::{
    oracle::{Fate, Question, fate},
    pods::{Member, router},
    restart::again,
    scenario::{Node, spec},
};
use crate::{
    core::{CoreConfig, Event, why::Target},
    policy::{
        parse::parse_documents,
        source::PolicyChange,
        trace::{FlowDirection, Port, Verdict},
    },
    source_event::SourceEvent,
};

pub(super) const VIP: &str = "10.96.0.10";
const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;

/// The default configuration with 10.2.0.0/16 for pods.
pub(super) fn with_pod_blocks() -> CoreConfig {
    CoreConfig {
        pod_blocks: vec!["10.2.0.0/16".parse().unwrap()],
        ..CoreConfig::default()
    }
}

pub(super) fn at(node: &Node, remote: &str, protocol: u8, port: u16) -> Fate {
    let question = Question {
        endpoint: node.id(),
        remote: remote.parse().unwrap(),
        direction: EGRESS,
        protocol,
        port,
    };
    fate(&node.datapath, question).unwrap()
}

pub(super) fn is_open(member: &Member, remote: &str, port: u16) -> bool {
    at(&member.node, remote, TCP, port) == Fate::Passed
}

pub(super) fn warnings(member: &Member) -> String {
    member.node.core.policy_warnings().join("\n")
}

pub(super) fn set_policy(member: &mut Member, rules: &str) {
    member.put(&egress(rules));
}

#[test]
fn a_rule_about_the_backends_port_opens_the_services_port_and_no_other() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    assert!(member.node.identity(VIP).unwrap().is_service());
    assert!(is_open(&member, VIP, 80));
    assert!(!is_open(&member, VIP, 8080) && !is_open(&member, VIP, 81));
    assert_eq!(at(&member.node, VIP, UDP, 80), Fate::Dropped);
    // A rule with the Service's port opens nothing: policy means the pod's port.
    set_policy(&mut member, &format!("[{}]", to("db", 80, "TCP")));
    assert!(!is_open(&member, VIP, 80));
    set_policy(
        &mut member,
        "[{toPorts: [{ports: [{port: \"80\", protocol: TCP}]}]}]",
    );
    assert!(!is_open(&member, VIP, 80) && is_open(&member, "1.1.1.1", 80));
    set_policy(
        &mut member,
        "[{toPorts: [{ports: [{port: \"8080\", protocol: TCP}]}]}]",
    );
    assert!(is_open(&member, VIP, 80));
    set_policy(&mut member, "[{toEntities: [cluster]}]");
    assert!(is_open(&member, VIP, 80) && !is_open(&member, VIP, 81));
    set_policy(&mut member, "[{toEntities: [all]}]");
    assert!(is_open(&member, VIP, 80) && is_open(&member, VIP, 81));
    set_policy(&mut member, "[{toEntities: [world]}]");
    assert!(!is_open(&member, VIP, 80) && !is_open(&member, VIP, 81));
    set_policy(&mut member, &format!("[{{toCIDR: [{VIP}/32]}}]"));
    assert!(!is_open(&member, VIP, 80));
}

#[test]
fn an_endpoint_that_is_not_restricted_has_no_entry_for_any_service() {
    let mut member = Member::new("---\n");
    let before = member.node.datapath.policy.clone();
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    assert_eq!(member.node.datapath.policy, before);
    assert!(is_open(&member, VIP, 80));
}

#[test]
fn a_service_whose_backends_differ_is_closed_and_named() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    let pods = pod("db-0", "db", "10.2.0.9") + &pod("db-1", "old", "10.2.0.10");
    member.put(&(pods + &db(&[("db-0", "10.2.0.9"), ("db-1", "10.2.0.10")])));
    assert!(!is_open(&member, VIP, 80));
    let text = warnings(&member);
    for part in [
        "Service default/db",
        "endpoint 1",
        "10.2.0.10",
        "app=old",
        "8080/TCP",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(member.node.core.summary().services_mixed, 1);
    // The other pod gets the label: nothing else changes.
    member.put(&pod("db-1", "db", "10.2.0.10"));
    assert!(is_open(&member, VIP, 80));
    assert!(!warnings(&member).contains("Service default"));
    member.put(&pod("db-1", "old", "10.2.0.10"));
    assert!(!is_open(&member, VIP, 80));
    // The other pod leaves the Service.
    member.put(&db(&[("db-0", "10.2.0.9")]));
    assert!(is_open(&member, VIP, 80));
}

#[test]
fn a_deny_of_one_backend_closes_the_service_where_everything_else_is_open() {
    let rules = format!(
        "[{{toEntities: [all]}}]\n  egressDeny: [{}]",
        to("old", 8080, "TCP")
    );
    let mut member = Member::new(&egress(&rules));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    assert!(is_open(&member, VIP, 80) && is_open(&member, VIP, 81));
    member.put(&(pod("db-1", "old", "10.2.0.10") + &db(&[("db-1", "10.2.0.10")])));
    assert!(!is_open(&member, VIP, 80) && !is_open(&member, VIP, 81));
    assert!(is_open(&member, "1.1.1.1", 80));
}

#[test]
fn dns_rules_about_pods_hold_at_their_services_address() {
    let rules = r"
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts: [{ports: [{port: '5353', protocol: UDP}], rules: {dns: [{matchPattern: '*.good.test'}]}}]
";
    let mut member = Member::new(&egress(rules));
    let dns = service(
        "dns",
        &format!("clusterIP: {VIP}"),
        "{name: dns, port: 53, protocol: UDP}",
    );
    let port = "{name: dns, port: 5353, protocol: UDP}";
    member.put(
        &(pod("dns-0", "dns", "10.2.0.9") + &dns + &slice("dns", &[("dns-0", "10.2.0.9")], port)),
    );
    assert_eq!(at(&member.node, VIP, UDP, 53), Fate::Proxied);
    assert_eq!(at(&member.node, VIP, UDP, 5353), Fate::Dropped);
    let id = member.node.identity(VIP).unwrap();
    let rules_at = |member: &Member, wanted: u16| {
        let state = &member.node.core.state;
        let (_, subject) = state.policy.subjects().next().unwrap();
        let ports = subject.dns().ports.iter();
        let found = ports.filter(|at| at.port == wanted && at.transport == Transport::Udp);
        found.flat_map(|at| at.rules.clone()).collect::<Vec<_>>()
    };
    let at_service = rules_at(&member, 53);
    assert_eq!(at_service.len(), 1);
    assert_eq!(at_service[0].servers, Servers::Identities([id].into()));
    assert!(matches!(&at_service[0].names, NameRules::Names(names) if names.len() == 1));
    // A server with other labels joins: no DNS rule is left for the Service.
    let two = slice(
        "dns",
        &[("dns-0", "10.2.0.9"), ("dns-1", "10.2.0.10")],
        port,
    );
    member.put(&(pod("dns-1", "other", "10.2.0.10") + &two));
    assert_eq!(at(&member.node, VIP, UDP, 53), Fate::Dropped);
    assert!(rules_at(&member, 53).is_empty());
    // A rule about everyone at port 53 is about pods at 53, not about this Service.
    let everyone = "[{toPorts: [{ports: [{port: \"53\", protocol: UDP}], rules: {dns: [{matchPattern: '*.bad.test'}]}}]}]";
    set_policy(&mut member, everyone);
    assert_eq!(at(&member.node, VIP, UDP, 53), Fate::Dropped);
}

#[test]
fn of_two_services_with_one_address_the_first_has_it_and_the_second_is_named() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    let first = member.node.identity(VIP);
    let other = service("aa", &format!("clusterIP: {VIP}"), "{port: 81}");
    member.put(&(other.clone() + &slice("aa", &[("db-0", "10.2.0.9")], "{port: 8080}")));
    assert_eq!(member.node.identity(VIP), first);
    assert!(is_open(&member, VIP, 80) && !is_open(&member, VIP, 81));
    let text = warnings(&member);
    assert!(
        text.contains("Service default/aa") && text.contains("default/db"),
        "{text}"
    );
    member.delete("Service/default/db");
    assert!(!is_open(&member, VIP, 80) && is_open(&member, VIP, 81));
    assert!(!warnings(&member).contains("Service default"));
    member.delete("Service/default/aa");
    assert_eq!(member.node.identity(VIP), None);
    assert_eq!(member.node.core.summary().services, 0);
    let entries = member.node.datapath.policy[&member.node.id()].keys();
    assert!(
        entries
            .clone()
            .all(|key| !IdentityId(key.sec_label).is_service())
    );
}

#[test]
fn an_address_in_the_cluster_is_the_services_although_the_node_has_it() {
    let alias: IpAddr = "169.254.20.10".parse().unwrap();
    let config = CoreConfig {
        service_aliases: vec![(alias, "default/db".to_owned())],
        ..CoreConfig::default()
    };
    let mut member = Member::with(config, &egress(&format!("[{}]", to("db", 8080, "TCP"))));
    let own: IpAddr = "192.0.2.1".parse().unwrap();
    let vip: IpAddr = VIP.parse().unwrap();
    let host = |member: &Member, address: IpAddr| {
        let entry = member.node.datapath.lxc.get(&lxc_key(address));
        entry.is_some_and(|value| value.flags & FLAG_HOST != 0)
    };
    member
        .node
        .event(Event::NodeAddresses(vec![own, vip, alias]));
    assert!(host(&member, vip) && host(&member, alias) && host(&member, own));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    assert!(!host(&member, vip) && !host(&member, alias) && host(&member, own));
    for address in [VIP, "169.254.20.10"] {
        assert!(member.node.identity(address).unwrap().is_service());
        assert!(is_open(&member, address, 80) && !is_open(&member, address, 81));
    }
    member.node.event(Event::NodeAddresses(vec![own, vip]));
    assert!(!host(&member, vip));
    member.delete("Service/default/db");
    assert!(host(&member, vip));
    assert_eq!(member.node.identity(VIP), Some(IdentityId::HOST));
}

#[test]
fn an_address_outside_that_a_node_has_is_the_nodes() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    let (own, other, balanced) = ("192.0.2.1", "192.0.2.2", "192.0.2.3");
    member
        .node
        .event(Event::NodeAddresses(vec![own.parse().unwrap()]));
    let spec = format!("clusterIP: {VIP}, externalIPs: [{own}, {other}, {balanced}]");
    let db =
        service("db", &spec, "{port: 80}") + &slice("db", &[("db-0", "10.2.0.9")], "{port: 8080}");
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db));
    assert_eq!(member.node.identity(own), Some(IdentityId::HOST));
    assert!(member.node.identity(other).unwrap().is_service());
    member.put(&format!(
        r"
---
apiVersion: v1
kind: Node
metadata: {{name: other}}
status: {{addresses: [{{type: InternalIP, address: {other}}}]}}
"
    ));
    assert_eq!(member.node.identity(other), Some(IdentityId::REMOTE_NODE));
    assert!(is_open(&member, balanced, 80) && !is_open(&member, other, 80));
    member.delete("Node/other");
    assert!(is_open(&member, other, 80));
}

#[test]
fn backends_that_are_no_pods_are_judged_by_their_addresses() {
    let mut member = Member::new(&egress(
        "[{toCIDR: [198.51.100.0/24], toPorts: [{ports: [{port: \"8080\"}]}]}]",
    ));
    member.put(&db(&[("", "198.51.100.7")]));
    assert!(is_open(&member, VIP, 80));
    member.put(&db(&[("", "198.51.100.7"), ("", "203.0.113.1")]));
    assert!(!is_open(&member, VIP, 80));
    // Pods on their node's network count as the node: Cilium's toEndpoints does not select them
    // either.
    member
        .node
        .event(Event::NodeAddresses(vec!["192.0.2.1".parse().unwrap()]));
    member.put(&db(&[("db-0", "192.0.2.1")]));
    assert!(!is_open(&member, VIP, 80));
    set_policy(&mut member, "[{toEntities: [host]}]");
    assert!(is_open(&member, VIP, 80));
    // Another Service's address is no backend.
    set_policy(&mut member, "[{toEntities: [cluster, world]}]");
    let loops = service("loop", "clusterIP: 10.96.0.11", "{port: 80}");
    member.put(&(loops + &slice("loop", &[("", VIP)], "{port: 80}")));
    assert!(is_open(&member, VIP, 80) && !is_open(&member, "10.96.0.11", 80));
}

#[test]
fn families_that_are_off_count_neither_as_addresses_nor_as_backends() {
    let both = "clusterIPs: [10.96.0.10, \"fd96::10\"]";
    let db = service("db", both, "{port: 80}")
        + &slice("db", &[("db-0", "10.2.0.9")], "{port: 8080}")
        + &slice("db", &[("db-0", "fd02::9")], "{port: 8080}");
    let pods = pod("db-0", "db", "10.2.0.9")
        .replace("{ip: 10.2.0.9}", "{ip: 10.2.0.9}, {ip: \"fd02::9\"}");
    for enable_ipv6 in [true, false] {
        let config = CoreConfig {
            enable_ipv6,
            ..CoreConfig::default()
        };
        let mut member = Member::with(config, &egress(&format!("[{}]", to("db", 8080, "TCP"))));
        member.put(&(pods.clone() + &db));
        member.node.tick(member.node.now.plus_secs(60));
        assert!(is_open(&member, VIP, 80));
        let six: std::net::Ipv6Addr = "fd96::10".parse().unwrap();
        let known = member
            .node
            .datapath
            .ipcache
            .get(&IpcacheKey::v6(six.octets(), 128));
        assert_eq!(known.is_some(), enable_ipv6);
    }
}

#[test]
fn unknown_addresses_in_blocks_of_the_cluster_are_not_the_world() {
    let config = CoreConfig {
        cluster_blocks: vec![
            "10.96.0.0/12".parse().unwrap(),
            "10.2.0.0/16".parse().unwrap(),
        ],
        ..CoreConfig::default()
    };
    let mut member = Member::with(
        config,
        &egress("[{toEntities: [world]}, {toCIDR: [0.0.0.0/0]}]"),
    );
    assert!(is_open(&member, "1.1.1.1", 80));
    for inside in [VIP, "10.2.0.9"] {
        assert!(!is_open(&member, inside, 80), "{inside}");
    }
    set_policy(&mut member, "[{toEntities: [cluster]}]");
    assert!(is_open(&member, VIP, 80) && !is_open(&member, "1.1.1.1", 80));
    set_policy(&mut member, &format!("[{}]", to("db", 8080, "TCP")));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    assert!(is_open(&member, VIP, 80) && is_open(&member, "10.2.0.9", 8080));
}

#[test]
fn an_answer_with_a_services_address_labels_nothing() {
    let mut member = Member::new(&egress(&format!(
        r"
  - {}
  - toCIDR: [10.9.0.53/32]
    toPorts: [{{ports: [{{port: '53', protocol: ANY}}], rules: {{dns: [{{matchPattern: '*'}}]}}}}]
  - toFQDNs: [{{matchPattern: '*'}}]
",
        to("db", 8080, "TCP")
    )));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    let before = member.node.identity(VIP);
    let (steps, result) = member.node.learn("db.default.svc.cluster.local", &[VIP]);
    assert_eq!(result.realised, dns_policy::mapping::Realised::Yes);
    assert!(steps.is_empty(), "{steps:?}");
    assert_eq!(member.node.identity(VIP), before);
    assert!(!is_open(&member, VIP, 81));
}

#[test]
fn a_pod_that_gives_itself_a_services_address_is_no_endpoint() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")])));
    let mut thief = spec("thief", 8, "app=thief");
    thief.addresses = vec![VIP.parse().unwrap()];
    member.node.endpoint(thief);
    assert!(member.node.identity(VIP).unwrap().is_service());
    let waiting = member.node.core.snapshot().rejected;
    assert!(
        waiting
            .iter()
            .any(|r| r.reason.contains("Service default/db")),
        "{waiting:?}"
    );
}

#[test]
fn a_restart_keeps_the_numbers_of_services_and_writes_nothing() {
    let policy = egress(&format!("[{}]", to("db", 8080, "TCP")));
    let mut member = Member::new(&policy);
    let gone = service("aa", "clusterIP: 10.96.0.9", "{port: 80}");
    member.put(&gone);
    let objects = pod("db-0", "db", "10.2.0.9") + &db(&[("db-0", "10.2.0.9")]);
    member.put(&objects);
    let before = member.node.datapath.clone();
    for still_there in [true, false] {
        let mut member = Member {
            node: again(&member.node, CoreConfig::default(), &[107]),
            router: router(),
        };
        member.node.begin();
        let mut listing = vec![PolicyChange::Document(SourceEvent::Init)];
        let text = match still_there {
            true => policy.clone() + &gone + &objects,
            false => policy.clone(),
        };
        let documents = parse_documents(&text, "test").into_iter();
        listing.extend(
            documents.map(|document| PolicyChange::Document(SourceEvent::Apply(document.unwrap()))),
        );
        listing.push(PolicyChange::Document(SourceEvent::InitDone));
        member.change(listing);
        member.node.endpoint(spec("web", 7, "app=web"));
        member.node.event(Event::Endpoints(SourceEvent::InitDone));
        if still_there {
            assert_eq!(member.node.datapath.ipcache, before.ipcache);
            assert_eq!(member.node.datapath.policy, before.policy);
            assert!(is_open(&member, VIP, 80));
        } else {
            assert_eq!(member.node.identity(VIP), None);
            assert!(!is_open(&member, VIP, 80));
            let key = PolicyKey::new(IdentityId::SERVICE_MIN.0, EGRESS, TCP, 80, 16);
            assert!(!member.node.datapath.policy[&member.node.id()].contains_key(&key));
        }
    }
}

#[test]
fn dns_pods_on_their_nodes_network_are_named() {
    let rules = "[{toEndpoints: [{matchLabels: {app: dns}}], toPorts: [{ports: [{port: \"53\", protocol: UDP}]}]}]";
    let mut member = Member::new(&egress(rules));
    member
        .node
        .event(Event::NodeAddresses(vec!["192.0.2.1".parse().unwrap()]));
    let dns = service(
        "dns",
        &format!("clusterIP: {VIP}"),
        "{port: 53, protocol: UDP}",
    );
    member.put(
        &(dns
            + &slice(
                "dns",
                &[("dns-0", "192.0.2.1")],
                "{port: 53, protocol: UDP}",
            )),
    );
    assert_eq!(at(&member.node, VIP, UDP, 53), Fate::Dropped);
    let text = warnings(&member);
    for part in ["Service default/dns", "53/UDP", "host and remote-node"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    set_policy(&mut member, "[{toEntities: [host, remote-node]}]");
    assert_eq!(at(&member.node, VIP, UDP, 53), Fate::Passed);
    assert!(!warnings(&member).contains("Service default/dns"));
}

#[test]
fn an_ingress_policy_that_drops_other_nodes_queries_is_named() {
    let from = |from: &str| {
        format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: dns}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
  ingress: [{from}]
"
        )
    };
    let pods = "{fromEndpoints: [{matchLabels: {app: client}}]}";
    let mut member = Member::new(&from(pods));
    let dns = service(
        "dns",
        &format!("clusterIP: {VIP}"),
        "{port: 53, protocol: UDP}",
    );
    member.put(
        &(dns
            + &slice(
                "dns",
                &[("web-0", "10.0.0.7")],
                "{port: 5353, protocol: UDP}",
            )),
    );
    assert!(
        !warnings(&member).contains("remote-node"),
        "there is no other node"
    );
    member.put(
        r"
---
apiVersion: v1
kind: Node
metadata: {name: other}
status: {addresses: [{type: InternalIP, address: 192.0.2.2}]}
",
    );
    let text = warnings(&member);
    for part in [
        "endpoint 1",
        "Service default/dns",
        "5353/UDP",
        "fromEntities: [remote-node]",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    member.put(&from(&format!("{pods}, {{fromEntities: [remote-node]}}")));
    assert!(!warnings(&member).contains("remote-node"));
}

#[test]
fn why_goes_from_a_service_to_each_backend_and_its_rule() {
    let mut member = Member::new(&egress(&format!("[{}]", to("db", 8080, "TCP"))));
    let pods = pod("db-0", "db", "10.2.0.9") + &pod("db-1", "old", "10.2.0.10");
    member.put(&(pods + &db(&[("db-0", "10.2.0.9")])));
    let (id, service) = (member.node.id(), member.node.identity(VIP).unwrap());
    let ask = |member: &Member, number: u16| {
        let port = Port {
            protocol: TCP,
            number,
        };
        member
            .node
            .core
            .peer(id, FlowDirection::Egress, service, Some(port))
    };
    let found = ask(&member, 80);
    assert_eq!(found.verdict, Some(Verdict::Allowed));
    assert_eq!(found.by.len(), 1);
    assert_eq!(found.by[0].rule, "spec.egress[0]");
    let of = found.service.unwrap();
    assert_eq!(
        (of.key.as_str(), of.ports),
        ("default/db", vec!["80/TCP".to_owned()])
    );
    assert_eq!(of.backends[0].who, "10.2.0.9 (app=db)");
    assert_eq!(of.backends[0].port.to_string(), "8080/TCP");
    assert_eq!(ask(&member, 81).verdict, Some(Verdict::NoRule));
    member.put(&db(&[("db-0", "10.2.0.9"), ("db-1", "10.2.0.10")]));
    let found = ask(&member, 80);
    assert_eq!(found.verdict, Some(Verdict::NoRule));
    let verdicts = found.service.unwrap().backends;
    let verdicts: Vec<_> = verdicts.iter().map(|backend| backend.verdict).collect();
    assert_eq!(verdicts, [Some(Verdict::Allowed), Some(Verdict::NoRule)]);
    let named = |name: &str| {
        let name = Target::Name(Fqdn::normalise(name));
        let found = member.node.core.findings(id, &name).unwrap();
        let addresses = found
            .addresses
            .iter()
            .map(|found| found.address.to_string());
        (found.service, addresses.collect::<Vec<_>>())
    };
    for name in ["db.default.svc", "DB.default.svc.cluster.local."] {
        let at = (Some("default/db".to_owned()), vec![VIP.to_owned()]);
        assert_eq!(named(name), at, "{name}");
    }
    for name in ["db.other.svc", "db.default", "x.db.default.svc"] {
        assert_eq!(named(name), (None, Vec::new()), "{name}");
    }
    let object = |address: &str| member.node.core.object_at(address.parse().unwrap());
    assert_eq!(object(VIP).as_deref(), Some("Service/default/db"));
    assert_eq!(object("10.2.0.9").as_deref(), Some("Pod/default/db-0"));
    assert_eq!(object("1.1.1.1"), None);
}
