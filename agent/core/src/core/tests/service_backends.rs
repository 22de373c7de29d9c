//! Backends whose pods are not known yet, or no longer known; and the blocks of pods.

use dns_policy::rule::{NameRules, Servers};

use super::{
    oracle::Fate,
    pods::Member,
    services::{
        UDP, VIP, at, db, egress, is_open, pod, service, set_policy, slice, to, warnings,
        with_pod_blocks,
    },
};
use crate::{
    core::CoreConfig,
    policy::{parse::parse_documents, source::PolicyChange},
    source_event::SourceEvent,
};

const KNOWN: (&str, &str) = ("db-0", "10.2.0.9");

fn node(block: &str) -> String {
    format!(
        r"
---
apiVersion: v1
kind: Node
metadata: {{name: other}}
spec: {{podCIDR: {block}, podCIDRs: [{block}]}}
status: {{addresses: [{{type: InternalIP, address: 192.0.2.2}}]}}
"
    )
}

/// A member that may send to pods `db` at 8080, with one of them behind a Service.
fn with_db(config: CoreConfig) -> Member {
    let mut member = Member::with(config, &egress(&format!("[{}]", to("db", 8080, "TCP"))));
    member.put(&(pod(KNOWN.0, "db", KNOWN.1) + &db(&[KNOWN])));
    assert!(is_open(&member, VIP, 80));
    member
}

#[test]
fn an_unknown_address_in_the_block_of_a_node_is_not_the_world() {
    let world = egress("[{toEntities: [world]}, {toCIDR: [0.0.0.0/0]}]");
    let mut member = Member::new(&world);
    assert!(is_open(&member, "10.2.0.9", 80));
    member.put(&node("10.2.0.0/24"));
    assert!(!is_open(&member, "10.2.0.9", 80) && is_open(&member, "10.3.0.9", 80));
    assert!(!is_open(&member, "192.0.2.2", 80), "the node itself");
    member.put(&node("10.3.0.0/24"));
    assert!(is_open(&member, "10.2.0.9", 80) && !is_open(&member, "10.3.0.9", 80));
    // Two nodes have this block: it counts as long as one of them is there.
    member.put(&node("10.3.0.0/24").replace("name: other", "name: third"));
    member.delete("Node/other");
    assert!(!is_open(&member, "10.3.0.9", 80));
    member.delete("Node/third");
    assert!(is_open(&member, "10.3.0.9", 80));
    // A block that no node can have for its pods changes nothing.
    member.put(&node("0.0.0.0/0"));
    assert!(is_open(&member, "10.3.0.9", 80));
    let text = warnings(&member);
    assert!(
        text.contains("Node/other") && text.contains("spec.podCIDRs[0]"),
        "{text}"
    );
}

#[test]
fn a_slice_that_names_a_pod_opens_no_address_while_the_blocks_of_pods_are_unknown() {
    let mut member = with_db(CoreConfig::default());
    assert!(
        warnings(&member).contains("--pod-cidr"),
        "{}",
        warnings(&member)
    );
    member.put(&db(&[KNOWN, ("no", "1.1.1.1")]));
    assert!(!is_open(&member, VIP, 80));
    member.put(&db(&[KNOWN, ("no", "10.2.0.10")]));
    assert!(!is_open(&member, VIP, 80));
    member.put(&node("10.2.0.0/24"));
    assert!(
        is_open(&member, VIP, 80),
        "a pod may be there, and be young"
    );
    assert!(!warnings(&member).contains("--pod-cidr"));
    member.put(&db(&[KNOWN, ("no", "1.1.1.1")]));
    assert!(!is_open(&member, VIP, 80));
}

#[test]
fn an_address_is_left_out_once_however_often_slices_name_it() {
    let mut member = with_db(with_pod_blocks());
    let named = db(&[KNOWN, ("no", "10.2.0.10")]);
    member.put(&named);
    assert!(is_open(&member, VIP, 80));
    member.node.tick(member.node.now.plus_secs(20));
    member.put(&db(&[KNOWN]));
    member.put(&named);
    assert!(is_open(&member, VIP, 80));
    member.node.tick(member.node.now.plus_secs(10));
    assert!(!is_open(&member, VIP, 80));
    for pod in ["no", "another"] {
        member.put(&db(&[KNOWN]));
        assert!(is_open(&member, VIP, 80));
        member.put(&db(&[KNOWN, (pod, "10.2.0.10")]));
        assert!(!is_open(&member, VIP, 80), "{pod}");
    }
    // The address is not left out again either if the slice names no pod in between.
    member.put(&slice("db", &[KNOWN, ("", "10.2.0.10")], "{port: 8080}"));
    member.put(&named);
    assert!(!is_open(&member, VIP, 80));
    // Once a pod had the address, it may belong to a new pod again.
    member.put(&pod("no", "db", "10.2.0.10"));
    assert!(is_open(&member, VIP, 80));
}

#[test]
fn a_pod_that_went_keeps_its_labels_as_a_backend_for_half_a_minute() {
    let mut member = with_db(CoreConfig::default());
    member.put(&(pod("db-1", "db", "10.2.0.10") + &db(&[KNOWN, ("db-1", "10.2.0.10")])));
    assert!(is_open(&member, VIP, 80) && is_open(&member, "10.2.0.10", 8080));
    member.delete("Pod/default/db-1");
    assert!(is_open(&member, VIP, 80), "the slice is behind the pod");
    assert!(
        !is_open(&member, "10.2.0.10", 8080),
        "by itself, the address is unknown"
    );
    assert!(!warnings(&member).contains("Service default/db is closed"));
    member.node.tick(member.node.now.plus_secs(29));
    assert!(is_open(&member, VIP, 80));
    member.node.tick(member.node.now.plus_secs(1));
    assert!(!is_open(&member, VIP, 80));
    // db-0 is the last pod with these labels.
    member.put(&db(&[KNOWN]));
    assert!(is_open(&member, VIP, 80));
    member.delete("Pod/default/db-0");
    assert!(is_open(&member, VIP, 80));
    // Another pod gets its address before the slice follows.
    member.put(&pod("old-0", "old", KNOWN.1));
    assert!(!is_open(&member, VIP, 80));
    member.delete("Pod/default/old-0");
    assert!(is_open(&member, VIP, 80), "db-0 is still named there");
    let held = |member: &Member| {
        let identities = member.node.core.snapshot().identities;
        identities
            .iter()
            .filter(|id| id.labels.iter().any(|l| l == "k8s:app=db"))
            .count()
    };
    assert_eq!(held(&member), 1);
    member.node.tick(member.node.now.plus_secs(30));
    assert!(!is_open(&member, VIP, 80));
    assert_eq!(held(&member), 0);
    set_policy(&mut member, "[{toEntities: [all]}]");
}

#[test]
fn names_that_several_rules_together_allow_at_every_backend_are_allowed_at_the_service() {
    let rule = |app: &str, names: &str| {
        format!(
            "{{toEndpoints: [{{matchLabels: {{app: {app}}}}}], toPorts: [{{ports: [{{port: \"53\", protocol: UDP}}], rules: {{dns: [{names}]}}}}]}}"
        )
    };
    let (good, other) = ("{matchPattern: '*.good.test'}", "{matchName: a.other.test}");
    let port = "{port: 53, protocol: UDP}";
    let backends = [("one-0", "10.2.0.9"), ("two-0", "10.2.0.10")];
    let objects = pod("one-0", "one", "10.2.0.9")
        + &pod("two-0", "two", "10.2.0.10")
        + &service("dns", &format!("clusterIP: {VIP}"), port)
        + &slice("dns", &backends, port);
    for (rules, wanted) in [
        (vec![rule("one", good), rule("two", good)], 1),
        (
            vec![rule("one", &format!("{good}, {other}")), rule("two", good)],
            1,
        ),
        (vec![rule("one", good), rule("two", other)], 0),
        (vec![rule("one", good), to("two", 53, "UDP")], 1),
        (
            vec![rule("one", good), rule("two", other), rule("two", good)],
            1,
        ),
    ] {
        let mut member = Member::new(&egress(&format!("[{}]", rules.join(", "))));
        member.put(&objects);
        assert_eq!(at(&member.node, VIP, UDP, 53), Fate::Proxied);
        let id = member.node.identity(VIP).unwrap();
        let (_, subject) = member.node.core.state.policy.subjects().next().unwrap();
        let at_port = subject.dns().ports.iter().filter(|at| at.port == 53);
        let of_service = at_port.flat_map(|at| &at.rules);
        let of_service = of_service.filter(|rule| rule.servers == Servers::Identities([id].into()));
        let names = of_service.map(|rule| match &rule.names {
            NameRules::Names(names) => names.len(),
            other => panic!("{other:?}"),
        });
        assert_eq!(names.sum::<usize>(), wanted, "{rules:?}");
    }
}

#[test]
fn a_backend_whose_pod_is_unknown_is_left_out_for_half_a_minute() {
    let mut member = Member::with(
        with_pod_blocks(),
        &egress(&format!("[{}]", to("db", 8080, "TCP"))),
    );
    let two = [("db-0", "10.2.0.9"), ("db-1", "10.2.0.10")];
    member.put(&(pod("db-0", "db", "10.2.0.9") + &db(&two)));
    assert!(is_open(&member, VIP, 80), "the slice is ahead of the pod");
    let due = member.node.now.plus_secs(30);
    assert_eq!(member.node.core.next_deadline(), Some(due));
    member.node.tick(member.node.now.plus_secs(29));
    assert!(is_open(&member, VIP, 80));
    member.node.tick(due);
    assert!(!is_open(&member, VIP, 80));
    assert!(warnings(&member).contains("db-1"), "{}", warnings(&member));
    member.put(&pod("db-1", "db", "10.2.0.10"));
    assert!(is_open(&member, VIP, 80));
    // A pod that is removed before its slice changes does not close the Service.
    member.delete("Pod/default/db-1");
    assert!(is_open(&member, VIP, 80));
    member.put(&db(&two[..1]));
    member.node.tick(member.node.now.plus_secs(60));
    assert!(is_open(&member, VIP, 80));
    // The last backend is removed: nothing is left to reach.
    member.put(&db(&[]));
    assert!(!is_open(&member, VIP, 80));
}

/// The API server, and kube-proxy, accept spellings of addresses that are not the usual ones. A slice
/// with such a backend must not leave the Service as it was: kube-proxy sends packets there.
#[test]
fn a_backend_that_cannot_be_read_closes_its_service() {
    for odd in [
        // Another pod, which policy does not allow.
        "010.2.0.10",
        "10.2.0.010",
        "::ffff:10.2.0.10",
        // No machine.
        "0.0.0.0",
        "127.0.0.1",
        "no address",
    ] {
        let mut member = with_db(CoreConfig::default());
        member.put(&pod("other", "other", "10.2.0.10"));
        let read = parse_documents(&db(&[KNOWN, ("other", odd)]), "test").into_iter();
        // What is refused leaves the version before in force.
        let read = read.filter_map(|document| document.ok().map(SourceEvent::Apply));
        member.change(read.map(PolicyChange::Document).collect());
        assert!(!is_open(&member, VIP, 80), "{odd}");
        // A policy about the world does not open it either.
        let mut member = Member::new(&egress("[{toEntities: [world, cluster]}]"));
        member.put(&(pod(KNOWN.0, "db", KNOWN.1) + &db(&[KNOWN])));
        assert!(is_open(&member, VIP, 80));
        let read = parse_documents(&db(&[KNOWN, ("", odd)]), "test").into_iter();
        let read = read.filter_map(|document| document.ok().map(SourceEvent::Apply));
        member.change(read.map(PolicyChange::Document).collect());
        let is_a_known_pod = odd.contains("10.2.0");
        assert_eq!(is_open(&member, VIP, 80), is_a_known_pod, "{odd}");
    }
}

/// An invalid port, which the API server accepts, must not leave the Service as it was either.
#[test]
fn a_port_that_cannot_be_read_does_not_keep_the_ports_before() {
    for odd in ["0", "65536", "-1"] {
        let mut member = with_db(CoreConfig::default());
        let ports = format!("{{port: 9090}}, {{name: odd, port: {odd}}}");
        let read = parse_documents(&slice("db", &[KNOWN], &ports), "test").into_iter();
        let read = read.filter_map(|document| document.ok().map(SourceEvent::Apply));
        member.change(read.map(PolicyChange::Document).collect());
        // Port 80 leads to 9090 now, which policy does not allow.
        assert!(!is_open(&member, VIP, 80), "{odd}");
    }
}

/// A slice belongs to the Service of its own namespace: no other slice makes a DNS server trusted.
#[test]
fn a_slice_of_another_namespace_makes_no_dns_server_trusted() {
    const DNS: &str = "{name: dns, port: 53, protocol: UDP}";
    let of = |namespace: &str, text: String| {
        text.replace(
            "metadata: {",
            &format!("metadata: {{namespace: {namespace}, "),
        )
    };
    let mut member = Member::with(CoreConfig::default(), &egress("[{}]"));
    let kube_dns = service("kube-dns", "clusterIP: 10.96.0.10", DNS)
        + &slice("kube-dns", &[("", "10.2.0.9")], DNS);
    member.put(&of("kube-system", kube_dns));
    let evil = service(
        "kube-dns",
        "clusterIP: 10.96.0.66, externalIPs: [10.96.0.10, 192.0.2.53]",
        DNS,
    ) + &slice("kube-dns", &[("", "6.6.6.6")], DNS);
    member.put(&of("evil", evil));
    let trusted = member.node.core.summary().firewalls.trusted_dns;
    assert_eq!(trusted, ["10.2.0.9:53", "10.96.0.10:53"]);
}
