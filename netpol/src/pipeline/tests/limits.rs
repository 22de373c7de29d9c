//! Policies that do not fit into the table.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::lab::*;
use crate::{
    cache::Object,
    pipeline::Pipeline,
    render::nft::{Limits, TooLarge},
    set_aside::{Scarce, SetAside},
};

const LIMITS: Limits = Limits {
    addresses: 30,
    rows: 20,
};

/// A policy with `apps` peers, each of which selects one app.
fn from_apps(id: &str, apps: usize) -> Object {
    let of = |n| json!({"podSelector": {"matchLabels": {"app": format!("app-{n}")}}});
    let peers: Vec<Value> = (0..apps).map(of).collect();
    policy(
        id,
        &json!({"podSelector": {}, "ingress": [{"from": peers}]}),
    )
}

/// A policy with `peers` peers, each of which selects every pod.
fn from_all_but(id: &str, peers: usize) -> Object {
    let of = |n| {
        let all = json!({"key": "app", "operator": "NotIn", "values": [format!("none-{n}")]});
        json!({"podSelector": {"matchExpressions": [all]}, "namespaceSelector": {}})
    };
    let peers: Vec<Value> = (0..peers).map(of).collect();
    policy(
        id,
        &json!({"podSelector": {}, "ingress": [{"from": peers}]}),
    )
}

/// A pod of this node in each of two namespaces, and a pod of another node that is `app-1`.
fn tenants() -> Vec<Object> {
    vec![
        object(pod("shop/web", &[], &["10.0.0.1"])),
        object(pod("evil/m", &[], &["10.0.0.2"])),
        object(elsewhere(pod(
            "shop/one",
            &[("app", "app-1")],
            &["10.0.1.1"],
        ))),
        object(elsewhere(pod(
            "evil/one",
            &[("app", "app-1")],
            &["10.0.1.2"],
        ))),
    ]
}

fn set_aside(lab: &Lab) -> Vec<String> {
    let set_aside = lab.pipeline.set_aside().iter();
    set_aside
        .map(|(id, why)| format!("{id} {}", why.needs))
        .collect()
}

/// Whether 10.0.1.1 reaches the first tenant's pod, and 10.0.1.2 the second tenant's.
fn reached(lab: &Lab) -> (bool, bool) {
    let passes = |n| lab.passes(&format!("10.0.1.{n}"), &format!("10.0.0.{n} 80/TCP"));
    (passes(1), passes(2))
}

#[test]
fn a_policy_that_does_not_fit_alone_is_set_aside_and_the_rest_goes_on() {
    let mut lab = Lab::within(LIMITS);
    lab.put(tenants());
    // The namespace `shop` needs the most, and its policies fit.
    lab.put([from_apps("shop/a", 6), from_apps("shop/b", 9)]);
    lab.put([from_apps("evil/large", 21)]);
    assert_eq!(set_aside(&lab), ["evil/large 21"]);
    let why = SetAside {
        of: Scarce::Rules,
        needs: 21,
        limit: 20,
    };
    assert_eq!(lab.pipeline.set_aside().values().next(), Some(&why));
    assert_eq!(reached(&lab), (true, false), "closed, not open");
    // A change of another policy comes into force.
    lab.remove(&policy_key("shop/a"));
    lab.put([from_apps("shop/b", 1)]);
    assert_eq!(reached(&lab), (false, false));
    lab.put([from_apps("evil/large", 2)]);
    assert_eq!(set_aside(&lab), [""; 0]);
    assert_eq!(reached(&lab), (false, true));
    lab.put([from_apps("evil/large", 21)]);
    let commit = lab.remove(&pod_key("evil/m"));
    assert!(set_aside(&lab).is_empty(), "it is about no pod");
    assert!(!commit.change.is_empty());
}

#[test]
fn the_largest_policies_of_the_largest_namespace_go_until_the_rest_fits() {
    let mut lab = Lab::within(LIMITS);
    let sizes = [("shop/a", 8), ("evil/a", 4), ("evil/b", 5), ("evil/c", 6)];
    lab.put(tenants());
    lab.put(sizes.map(|(id, apps)| from_apps(id, apps)));
    // One rule of each chain drops all other packets.
    assert_eq!(set_aside(&lab), ["evil/c 6"]);
    assert_eq!(reached(&lab), (true, true));
    lab.put([from_apps("evil/d", 5)]);
    assert_eq!(set_aside(&lab), ["evil/b 5", "evil/c 6"]);
    // Once the largest policy is set aside, the other namespace needs the most, and then the first
    // one again.
    lab.put([from_apps("shop/b", 9), from_apps("shop/c", 1)]);
    assert_eq!(set_aside(&lab), ["evil/b 5", "evil/c 6", "shop/b 9"]);
    for id in ["shop/a", "shop/b", "shop/c"] {
        lab.remove(&policy_key(id));
    }
    assert_eq!(set_aside(&lab), ["evil/c 6"]);
}

#[test]
fn addresses_are_counted_with_those_that_peers_share() {
    let mut lab = Lab::within(LIMITS);
    lab.put(tenants());
    lab.put((3..=8).map(|n| object(pod(&format!("shop/{n}"), &[], &[&format!("10.0.2.{n}")]))));
    // These two policies have the same groups.
    lab.put(["shop/a", "shop/b"].map(|id| from_all_but(id, 2)));
    assert_eq!(set_aside(&lab), [""; 0]);
    assert_eq!(lab.pipeline.size().addresses, 20);
    lab.put([from_all_but("evil/a", 4)]);
    assert_eq!(set_aside(&lab), ["evil/a 40"]);
    lab.put([from_all_but("evil/a", 3), from_all_but("evil/b", 4)]);
    assert_eq!(set_aside(&lab), ["evil/b 40"]);
    assert_eq!(lab.pipeline.size().addresses, 30);
    lab.remove(&policy_key("evil/b"));
    // One more pod, of any node, is too many.
    lab.put([object(elsewhere(pod("shop/far", &[], &["10.0.3.1"])))]);
    assert_eq!(set_aside(&lab), ["evil/a 33"]);
    assert_eq!(lab.pipeline.size().addresses, 22);
    lab.pipeline.remove(&pod_key("shop/far"));
    lab.pipeline.commit().unwrap();
    assert_eq!(set_aside(&lab), ["evil/a 33"], "not looked at again");
    lab.pipeline.reconsider();
    lab.pipeline.commit().unwrap();
    assert_eq!(set_aside(&lab), [""; 0]);
}

#[test]
fn what_does_not_fit_is_not_expanded() {
    let mut lab = Lab::new();
    lab.put(tenants());
    let peer = |n| json!({"podSelector": {"matchLabels": {"app": format!("app-{n}")}}});
    let peers: Vec<Value> = (0..3_000).map(peer).collect();
    let ports: Vec<Value> = (0..3_000)
        .map(|n| json!({"port": format!("p{n}")}))
        .collect();
    let spec = json!({
        "podSelector": {},
        "policyTypes": ["Egress"],
        "egress": [{"to": peers, "ports": ports}],
    });
    let begin = Instant::now();
    lab.put([policy("evil/product", &spec)]);
    assert_eq!(set_aside(&lab), ["evil/product 9000000"]);
    // Too many addresses also set a policy aside. Here it needs some 100,000,000.
    let pods = (0..10_000u32).map(|n| {
        let address = std::net::Ipv4Addr::from(0x0a80_0000 + n).to_string();
        object(elsewhere(pod(&format!("far/{n}"), &[], &[&address])))
    });
    lab.put(pods);
    lab.put([from_all_but("evil/all", 10_000)]);
    let found: Vec<_> = lab.pipeline.set_aside().values().collect();
    assert_eq!(found[0].of, Scarce::Addresses);
    assert!(found[0].needs > 1_000_000, "{found:?}");
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(60), "{took:?}");
}

#[test]
fn chains_that_are_too_many_even_so_are_refused_whole() {
    let limits = Limits { rows: 2, ..LIMITS };
    let mut pipeline = Pipeline::new(HERE, limits);
    let closed = |name: &str| {
        let of = json!({"podSelector": {"matchLabels": {"app": name}}});
        policy(&format!("shop/{name}"), &of)
    };
    let app = |name: &str, address: &str| {
        object(pod(&format!("shop/{name}"), &[("app", name)], &[address]))
    };
    let egress = json!({"podSelector": {}, "policyTypes": ["Egress"]});
    for object in [
        closed("a"),
        app("a", "10.0.0.1"),
        app("b", "2001:db8::1"),
        policy("shop/out", &egress),
    ] {
        pipeline.put(object);
    }
    assert!(pipeline.commit().is_err());
    assert!(!pipeline.has_committed(), "its table is of no use");
    pipeline.remove(&pod_key("shop/b"));
    pipeline.commit().unwrap();
    assert!(pipeline.has_committed());
    let good = pipeline.table();

    pipeline.put(app("b", "2001:db8::1"));
    let refused = pipeline.commit().unwrap_err();
    assert_eq!(refused, TooLarge::Rows { found: 3, limit: 2 });
    assert_eq!(pipeline.table(), good);
    // The next commit also has the changes of the refused commit.
    pipeline.remove(&pod_key("shop/a"));
    let commit = pipeline.commit().unwrap();
    assert_eq!(commit.ended, ["10.0.0.1".parse().unwrap()].into());
    assert_ne!(pipeline.table(), good);
}
