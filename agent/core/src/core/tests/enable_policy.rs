//! Endpoints that no policy selects: whether they are open, and how views show it.

use super::scenario::{Node, WEB, spec};
use crate::{core::CoreConfig, endpoint::spec::EndpointSpec, policy::mode::PolicyMode};

fn node(mode: PolicyMode) -> Node {
    let config = CoreConfig {
        enable_policy: mode,
        ..CoreConfig::default()
    };
    let mut node = Node::usual_with(config);
    node.endpoint(spec("free", 8, "app=free"));
    node
}

fn with_mode(key: &str, host: u8, mode: PolicyMode) -> EndpointSpec {
    let mut spec = spec(key, host, "app=free");
    spec.labels.push(mode.label().to_string());
    spec
}

/// Directions in which an endpoint is restricted, and whether its map lets everyone through.
fn restricted(node: &Node, key: &str) -> (bool, bool, usize) {
    let views = node.core.snapshot().endpoints;
    let view = views.into_iter().find(|view| view.key == key).unwrap();
    let map = &node.datapath.policy[&shared_maps::EndpointId(view.id)];
    let open = map
        .keys()
        .filter(|entry| entry.sec_label == 0 && entry.lpm_len() == 0);
    (view.egress_enforced, view.ingress_enforced, open.count())
}

#[test]
fn an_endpoint_without_policy_is_open_by_default_and_said() {
    let node = node(PolicyMode::Default);
    assert_eq!(restricted(&node, "web"), (true, false, 1));
    assert_eq!(restricted(&node, "free"), (false, false, 2));
    let summary = node.core.summary();
    assert_eq!(summary.endpoints_unrestricted, 1);
    assert_eq!(summary.unrestricted, ["free"]);
}

#[test]
fn with_always_an_endpoint_without_policy_is_closed() {
    let node = node(PolicyMode::Always);
    assert_eq!(restricted(&node, "web"), (true, true, 0));
    assert_eq!(restricted(&node, "free"), (true, true, 0));
    assert_eq!(node.core.summary().endpoints_unrestricted, 0);
}

#[test]
fn with_never_no_policy_restricts_anything() {
    let mut node = node(PolicyMode::Never);
    assert_eq!(restricted(&node, "web"), (false, false, 2));
    node.policy(&WEB.replace("toCIDR: [10.9.0.53/32]", "toCIDR: [10.9.0.54/32]"));
    assert_eq!(restricted(&node, "web"), (false, false, 2));
    assert_eq!(node.core.summary().endpoints_unrestricted, 2);
}

#[test]
fn an_endpoints_own_mode_goes_before_the_agents() {
    let mut closed = node(PolicyMode::Default);
    closed.endpoint(with_mode("own", 9, PolicyMode::Always));
    assert_eq!(restricted(&closed, "own"), (true, true, 0));
    assert_eq!(restricted(&closed, "free"), (false, false, 2));
    let mut open = node(PolicyMode::Always);
    open.endpoint(with_mode("own", 9, PolicyMode::Default));
    assert_eq!(restricted(&open, "own"), (false, false, 2));
    // The mode changes, and the endpoint stays.
    let before = open.datapath.lxc.len();
    open.endpoint(with_mode("own", 9, PolicyMode::Always));
    assert_eq!(restricted(&open, "own"), (true, true, 0));
    assert_eq!(open.datapath.lxc.len(), before);
}

#[test]
fn status_does_not_count_a_pod_under_an_egress_firewall_as_unrestricted() {
    let mut node = node(PolicyMode::Default);
    assert_eq!(node.core.summary().unrestricted, ["free"]);
    node.policy(
        r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: default}
spec: {egress: [{type: Deny, to: {cidrSelector: 0.0.0.0/0}}]}
",
    );
    assert_eq!(node.core.summary().endpoints_unrestricted, 0);
}
