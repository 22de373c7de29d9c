//! A pod with other addresses is the same endpoint; another pod is not.

use dns_policy::mapping::{Realised, Refusal};
use shared_maps::ipcache::IpcacheKey;

use super::{
    restart::again,
    scenario::{Node, WEB, mapping, spec},
};
use crate::{core::CoreConfig, endpoint::spec::EndpointSpec};

const NAMES: [(&str, &str); 3] = [
    ("a.cilium.io", "1.1.1.1"),
    ("b.cilium.io", "1.1.1.2"),
    ("c.cilium.io", "1.1.1.3"),
];

fn at(host: u8) -> EndpointSpec {
    let addresses = spec("web", host, "app=web").addresses;
    EndpointSpec {
        addresses,
        ..spec("web", 7, "app=web")
    }
}

fn learned() -> Node {
    let mut node = Node::usual();
    for (name, address) in NAMES {
        node.learn(name, &[address]);
    }
    node.tick(node.now.plus_secs(6));
    node
}

/// Starts again after the pod became `now`, and ends the grace.
fn started_again(node: &Node, now: EndpointSpec) -> Node {
    let mut node = again(node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(now);
    node.sync();
    node
}

fn pod_has(node: &Node, address: [u8; 4]) -> bool {
    let key = IpcacheKey::v4(address, 32);
    let value = node.datapath.ipcache.get(&key);
    value.is_some_and(|value| shared_maps::IdentityId(value.sec_identity).is_endpoint())
}

#[test]
fn a_pod_keeps_its_number_and_its_names() {
    let before = learned();
    for restarts in [true, false] {
        let (mut node, id) = match restarts {
            true => (started_again(&before, at(9)), before.id()),
            false => {
                let mut node = learned();
                node.endpoint(at(9));
                let id = node.id();
                (node, id)
            }
        };
        assert_eq!(node.id(), id);
        assert_eq!(node.datapath.policy.len(), 1);
        assert!(pod_has(&node, [10, 0, 0, 9]) && !pod_has(&node, [10, 0, 0, 7]));
        assert_eq!(node.datapath.lxc.len(), 1, "{:?}", node.datapath.lxc);
        node.tick(node.now.plus_secs(31));
        for (_, address) in NAMES {
            assert!(node.identity(address).is_some(), "{address} is closed");
        }
        assert_eq!(node.core.snapshot().names.len(), NAMES.len());
        // The names are on disk, and the next run has them.
        node.tick(node.now.plus_secs(6));
        let next = started_again(&node, at(9));
        assert_eq!(next.core.snapshot().names.len(), NAMES.len());
    }
}

#[test]
fn a_mapping_of_its_former_address_counts_if_it_was_seen_before_the_change() {
    let before = learned();
    let seen = mapping(&before, "late.cilium.io", &["1.1.1.4"]);
    let mut node = started_again(&before, at(9));
    let (_, result) = node.mapping(seen.clone());
    assert_eq!(result.realised, Realised::Yes);
    assert!(node.identity("1.1.1.4").is_some());
    // Another pod may have had the former address since then.
    let mut later = mapping(&node, "later.cilium.io", &["1.1.1.5"]);
    node.tick(node.now.plus_secs(1));
    later.seen_at = node.now;
    let (_, result) = node.mapping(later);
    assert_eq!(result.realised, Realised::No(Refusal::EndpointUnknown));
    assert_eq!(node.identity("1.1.1.5"), None);
}

#[test]
fn another_pod_gets_neither_the_number_nor_the_names() {
    let of_pod = |uid: &str, host: u8| EndpointSpec {
        pod_uid: Some(uid.to_owned()),
        ..at(host)
    };
    let elsewhere = |change: fn(&mut EndpointSpec)| {
        let mut spec = at(9);
        change(&mut spec);
        spec
    };
    for other in [
        elsewhere(|spec| spec.interface.ifindex = 109),
        elsewhere(|spec| spec.interface.ifname = "lxc9".to_owned()),
        elsewhere(|spec| spec.netns = "other".to_owned()),
        // Its former address at another interface.
        EndpointSpec {
            addresses: at(7).addresses,
            ..elsewhere(|spec| spec.interface.ifindex = 109)
        },
    ] {
        let node = started_again(&learned(), other.clone());
        let names = node.core.snapshot().names;
        assert!(names.is_empty(), "{other:?}: {names:?}");
    }
    let mut node = learned();
    node.endpoint(of_pod("one", 7));
    assert_eq!(node.core.snapshot().names.len(), NAMES.len());
    node.endpoint(of_pod("one", 8));
    assert_eq!(node.core.snapshot().names.len(), NAMES.len());
    node.endpoint(of_pod("two", 9));
    let names = node.core.snapshot().names;
    assert!(names.is_empty(), "{names:?}");
}
