//! The vectors about the ipcache of a pruned node: which entries it has, and how many.

use std::sync::Arc;

use serde_json::Value;
use shared_maps::{IdentityId, ipcache::IpcacheKey};

use super::{super::pod_identities::identity, Member, WEB_TO_DB, pod, with_mode};
use crate::{
    core::{CoreConfig, Event, router::Router},
    high_scale::{scope::PodScope, vectors::of_group},
    policy::{
        document::{Body, PolicyDocument},
        parse::parse_documents,
        source::PolicyChange,
    },
    source_event::SourceEvent,
    tunnel_mode::TunnelMode,
};

const NODE: &str = "\n---\napiVersion: cilium.io/v2\nkind: CiliumNode\nmetadata: {name: worker-2}\n\
    spec: {addresses: [{type: InternalIP, ip: 192.0.2.2}], health: {ipv4: 10.2.9.9}}\n";
const API_SERVER: &str = "\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
    metadata: {name: kubernetes, namespace: default, labels: {kubernetes.io/service-name: kubernetes}}\n\
    addressType: IPv4\nendpoints: [{addresses: [192.0.2.2], conditions: {ready: true}}]\n\
    ports: [{name: https, port: 6443, protocol: TCP}]\n";
/// Blocks that a rule names get a number of this node.
const BLOCK: IpcacheKey = IpcacheKey::v4([203, 0, 113, 0], 24);

/// The identity of a pod of another node with this label, if the node has one.
fn of_pod(member: &mut Member, number: u32, label: &str) -> Option<IdentityId> {
    let object = identity(number, "db").replace("\"k8s:app\": db", &object_label(label));
    member.put(&object);
    member.put(&pod("remote", "db", "10.2.0.9").replace("app: db", label));
    member.node.identity("10.2.0.9")
}

/// The label of a pod as a CiliumIdentity has it.
fn object_label(label: &str) -> String {
    let (key, value) = label.split_once(": ").unwrap();
    format!("\"k8s:{key}\": {value}")
}

/// The identity of the entry that a vector is about, on this node.
fn entry(member: &mut Member, vector: &Value) -> Option<IdentityId> {
    let number = u32::try_from(vector["given"]["identity"].as_u64().unwrap()).unwrap();
    let of_key = |member: &Member, key: IpcacheKey| {
        let value = member.node.datapath.ipcache.get(&key)?;
        Some(IdentityId(value.sec_identity))
    };
    match vector["given"]["entry"].as_str().unwrap() {
        "host" => {
            let own = vec!["192.0.2.1".parse().unwrap()];
            member.node.event(Event::NodeAddresses(own));
            member.node.identity("192.0.2.1")
        }
        "world" => of_key(member, IpcacheKey::v4([0; 4], 0)),
        "health" => {
            member.put(NODE);
            member.node.identity("10.2.9.9")
        }
        "remote-node" => {
            member.put(NODE);
            member.node.identity("192.0.2.2")
        }
        "kube-apiserver" => {
            member.put(&format!("{NODE}{API_SERVER}"));
            member.node.identity("192.0.2.2")
        }
        "kube-dns well-known" => of_pod(member, 4242, "k8s-app: kube-dns"),
        "cilium-operator well-known" => of_pod(member, 4242, "io.cilium/app: operator"),
        "CIDR or FQDN prefix of the node" => {
            member.put(&WEB_TO_DB.replace(
                "toEndpoints: [{matchLabels: {app: db}}]",
                "toCIDR: [203.0.113.0/24]",
            ));
            of_key(member, BLOCK)
        }
        "remote pod" => of_pod(member, number, "app: db"),
        "highest ordinary identity of cluster 0" => {
            member.put(&pod("remote", "db", "10.2.0.9"));
            member.node.identity("10.2.0.9")
        }
        other => panic!("{other}"),
    }
}

/// What this product does in the place of a vector.
struct Differing {
    is_number: fn(IdentityId) -> bool,
    is_kept: bool,
}

/// Where this product differs from a vector, and why.
fn differing(vector: &Value) -> Option<Differing> {
    let (is_number, is_kept): (fn(IdentityId) -> bool, bool) = match vector["id"].as_str().unwrap()
    {
        // There are no well-known numbers. The label of --high-scale-keep keeps the pod, under the number of
        // its CiliumIdentity.
        "keep-07" => (|id| id == IdentityId(4242), true),
        // The same, and no default keeps an operator: pods need no rule about it.
        "keep-09" => (|id| id == IdentityId(4242), false),
        // No object gives a number from 61440 on: a node gives those to pods without an object, from the first one.
        "keep-13" => (|id| (61_440..=65_535).contains(&id.0), false),
        // A node counts its own numbers from the first one.
        "keep-14" => (IdentityId::is_local_scope, true),
        _ => return None,
    };
    Some(Differing { is_number, is_kept })
}

/// A node that wraps and knows no blocks of pods. It has no IPv6.
fn node(pods: PodScope) -> Member {
    let prunes = pods.prunes();
    let config = CoreConfig {
        pods: pods.clone(),
        enable_ipv6: false,
        ..with_mode(Some(TunnelMode::Full))
    };
    let mut member = Member::with(config, WEB_TO_DB);
    if prunes {
        member.router = Router::default().with_pods(pods);
    }
    member
}

fn kept(labels: &str) -> PodScope {
    PodScope::Kept {
        node: "worker-1".to_owned(),
        keep: vec![labels.parse().unwrap()],
    }
}

#[test]
fn high_scale_vectors_of_kept_entries_hold() {
    let mut run = 0;
    for vector in of_group("ipcache_keep") {
        let id = vector["id"].as_str().unwrap();
        let number = u32::try_from(vector["given"]["identity"].as_u64().unwrap()).unwrap();
        let by_vector = vector["expect"]["kept_in_high_scale_mode"]
            .as_bool()
            .unwrap();
        let other = differing(&vector);
        let is_kept = other.as_ref().map_or(by_vector, |other| other.is_kept);
        let is_its = |found: IdentityId| match &other {
            Some(other) => (other.is_number)(found),
            None => found == IdentityId(number),
        };
        // Without pruning, each entry is there.
        let found = entry(&mut node(PodScope::All), &vector);
        assert!(found.is_some_and(is_its), "{id}: {found:?}");
        let found = entry(&mut node(kept("k8s-app=kube-dns")), &vector);
        assert_eq!(found.is_some_and(is_its), is_kept, "{id}: {found:?}");
        assert_eq!(found.is_some(), is_kept, "{id}: {found:?}");
        run += 1;
    }
    assert_eq!(run, 10);
    // An administrator can keep the operator, too.
    let mut member = node(kept("io.cilium/app=operator"));
    let found = of_pod(&mut member, 4242, "io.cilium/app: operator");
    assert_eq!(found, Some(IdentityId(4242)));
}

/// Documents of pods of other nodes. The first ones are DNS servers.
fn pods(count: u64, dns: u64) -> Vec<PolicyDocument> {
    let read = |text: &str| parse_documents(text, "test").remove(0).unwrap();
    let of_app = read(&pod("remote", "db", "10.2.0.9"));
    let of_dns = read(&pod("remote", "db", "10.2.0.9").replace("app: db", "k8s-app: kube-dns"));
    let documents = (0..count).map(|number| {
        let mut document = if number < dns { &of_dns } else { &of_app }.clone();
        let Body::Pod(pod) = &mut document.body else {
            panic!("a pod");
        };
        let pod = Arc::make_mut(pod);
        pod.name = format!("remote-{number}");
        let address = 0x0a80_0000 + u32::try_from(number).unwrap();
        pod.addresses = vec![std::net::Ipv4Addr::from_bits(address).into()];
        document.key = format!("Pod/default/{}", pod.name);
        document
    });
    documents.collect()
}

fn nodes(count: u64) -> String {
    let nodes = (0..count).map(|number| {
        let [.., a, b] = number.to_be_bytes();
        format!(
            "---\napiVersion: cilium.io/v2\nkind: CiliumNode\nmetadata: {{name: node-{number}}}\n\
             spec: {{addresses: [{{type: InternalIP, ip: 172.16.{a}.{b}}}]}}\n"
        )
    });
    nodes.collect()
}

#[test]
fn high_scale_vectors_of_growth_hold() {
    let mut run = 0;
    for vector in of_group("ipcache_growth") {
        let id = vector["id"].as_str().unwrap();
        let given = |name: &str| vector["given"][name].as_u64().unwrap();
        let documents = pods(given("remote_pods"), given("dns_pods"));
        let entries = |pods: PodScope| {
            let mut member = node(pods);
            member.put(&nodes(given("remote_nodes")));
            let changes = documents.iter().cloned().map(SourceEvent::Apply);
            member.change(changes.map(PolicyChange::Document).collect());
            let summary = member.node.core.summary();
            (summary.ipcache_entries as u64, summary.ipcache_max as u64)
        };
        let expect = |name: &str| vector["expect"][name].as_u64().unwrap();
        // The vector leaves out the entries that each node has: the world, its endpoint.
        let (all, most) = entries(PodScope::All);
        let without_pods = all - expect("normal_mode_entries");
        assert!(
            without_pods <= given("fixed_entries_at_most"),
            "{id}: {all}"
        );
        let fits = vector["expect"]["fits_default_map_of_512000"].as_bool();
        assert_eq!(most, 512_000);
        assert_eq!(Some(all <= most), fits, "{id}");
        let (pruned, _) = entries(kept("k8s-app=kube-dns"));
        let at_least = given("remote_nodes") + given("dns_pods");
        let expected = at_least..=expect("high_scale_entries_at_most");
        assert!(expected.contains(&pruned), "{id}: {pruned}");
        run += 1;
    }
    assert_eq!(run, 2);
}
