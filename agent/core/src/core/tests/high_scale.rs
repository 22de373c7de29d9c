//! Identities that come with packets: policies select them without any address.

mod vectors;

use shared_maps::{
    ipcache::IpcacheKey,
    policy::{EGRESS, INGRESS, PolicyKey},
};

use super::{
    pods::{Member, WEB_TO_DB, of_pod, pod},
    scenario::{Node, spec},
};
use crate::{
    core::{CoreConfig, router::Router},
    high_scale::scope::{KeptLabels, PodScope},
    tunnel_mode::TunnelMode,
};

/// Pods with app=db may send to app=web.
const WEB_FROM_DB: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {matchLabels: {app: web}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: db}}]
"#;

fn identity(number: u32, app: &str) -> String {
    format!(
        "---\napiVersion: cilium.io/v2\nkind: CiliumIdentity\nmetadata: {{name: \"{number}\"}}\n\
         security-labels: {{\"k8s:app\": {app}, \"k8s:io.kubernetes.pod.namespace\": default}}\n"
    )
}

fn with_mode(mode: Option<TunnelMode>) -> CoreConfig {
    CoreConfig {
        high_scale: mode,
        ..CoreConfig::default()
    }
}

/// Whether packets of the identity may come in.
fn admits(node: &Node, identity: u32) -> bool {
    let key = PolicyKey::new(identity, INGRESS, 0, 0, 0);
    node.datapath.policy[&node.id()].contains_key(&key)
}

#[test]
fn high_scale_peers_are_in_policy_maps_before_their_first_packet() {
    for (mode, expected) in [
        (None, false),
        (Some(TunnelMode::Off), false),
        (Some(TunnelMode::DecapOnly), true),
        (Some(TunnelMode::Full), true),
    ] {
        let mut member = Member::with(with_mode(mode), WEB_FROM_DB);
        let text = identity(4242, "db") + &identity(5151, "other");
        member.put(&text);
        assert_eq!(admits(&member.node, 4242), expected, "{mode:?}");
        assert!(!admits(&member.node, 5151), "{mode:?}");
        // The object moves to another number.
        member.delete("CiliumIdentity/4242");
        member.put(&identity(4300, "db"));
        assert_eq!(admits(&member.node, 4300), expected, "{mode:?}");
        assert!(!admits(&member.node, 4242), "{mode:?}");
        member.delete("CiliumIdentity/4300");
        assert!(!admits(&member.node, 4300), "{mode:?}");
    }
}

#[test]
fn high_scale_a_number_that_changes_its_labels_admits_nobody_for_its_former_ones() {
    let mut member = Member::with(with_mode(Some(TunnelMode::Full)), WEB_FROM_DB);
    member.put(&identity(4242, "db"));
    assert!(admits(&member.node, 4242));
    member.put(&identity(4242, "other"));
    assert!(!admits(&member.node, 4242));
}

fn pruned() -> Member {
    let keep: KeptLabels = "k8s-app=kube-dns".parse().unwrap();
    let pods = PodScope::Kept {
        node: "worker-1".to_owned(),
        keep: vec![keep],
    };
    let config = CoreConfig {
        pods: pods.clone(),
        pod_blocks: vec!["10.2.0.0/16".parse().unwrap()],
        cluster_blocks: vec!["10.2.0.0/16".parse().unwrap()],
        ..with_mode(Some(TunnelMode::Full))
    };
    let mut member = Member::with(config, WEB_TO_DB);
    member.router = Router::default().with_pods(pods);
    member
}

#[test]
fn high_scale_pods_of_other_nodes_are_not_read_while_pruned() {
    let mut member = pruned();
    member.put(&pod("db", "db", "10.2.0.9"));
    assert_eq!(member.node.identity("10.2.0.9"), None);
    assert!(!member.may_connect("10.2.0.9"));
    let dns = pod("dns", "db", "10.2.0.8").replace("labels: {", "labels: {k8s-app: kube-dns, ");
    member.put(&dns);
    assert!(member.may_connect("10.2.0.8"));
    // The pod loses the label, and is on another node.
    member.put(&pod("dns", "db", "10.2.0.8"));
    assert!(!member.may_connect("10.2.0.8"));
    let own = pod("own", "db", "10.2.0.7").replace("worker-2", "worker-1");
    member.put(&own);
    assert!(member.may_connect("10.2.0.7"));
    member.node.endpoint(spec("other", 3, "app=db"));
}

#[test]
fn high_scale_blocks_inside_the_pods_blocks_open_and_the_world_does_not() {
    let pods = IpcacheKey::v4([10, 2, 0, 0], 16);
    let inner = IpcacheKey::v4([10, 2, 3, 0], 24);
    for (block, entry, opens) in [
        ("10.2.3.0/24", inner, true),
        ("10.2.3.0/24", pods, false),
        ("0.0.0.0/0", pods, false),
    ] {
        let mut member = pruned();
        let policy = WEB_TO_DB.replace(
            "toEndpoints: [{matchLabels: {app: db}}]",
            &format!("toCIDR: [{block}]"),
        );
        member.put(&policy);
        let identity = member.node.datapath.ipcache[&entry].sec_identity;
        let key = PolicyKey::new(identity, EGRESS, 6, 5432, 16);
        let map = &member.node.datapath.policy[&member.node.id()];
        assert_eq!(map.contains_key(&key), opens, "{block}: {identity:?}");
    }
}

#[test]
fn high_scale_endpoints_without_a_number_of_the_cluster_are_known() {
    let mut member = Member::with(with_mode(Some(TunnelMode::Full)), WEB_FROM_DB);
    member.put(&pod("db-0", "db", "10.0.0.8"));
    member.node.endpoint(of_pod("db", 8, "default/db-0"));
    let unknown = |member: &Member| member.node.core.without_shared_number();
    assert_eq!(unknown(&member), ["web", "default/db-0"]);
    member.put(&super::pod_identities::identity(4242, "db"));
    assert_eq!(unknown(&member), ["web"]);
}
