//! Answers open no metadata service (DNS rebinding).

use std::net::IpAddr;

use dns_policy::mapping::Realised;
use shared_maps::policy::{EGRESS, PolicyKey};

use super::{
    restart::again,
    scenario::{Node, WEB, spec},
};
use crate::{
    core::{CoreConfig, Event},
    fqdn::{embedded, refused::RefusedPrefixes},
    ipcache::table::key_of,
};

const METADATA: &str = "169.254.169.254";

fn config(refused_prefixes: RefusedPrefixes) -> CoreConfig {
    CoreConfig {
        refused_prefixes,
        ..CoreConfig::default()
    }
}

/// Identity of an IPv6 address in the ipcache.
fn identity(node: &Node, address: &str) -> Option<u32> {
    let address: IpAddr = address.parse().unwrap();
    let value = node.datapath.ipcache.get(&key_of(address.into()))?;
    Some(value.sec_identity)
}

#[test]
fn an_answer_does_not_open_the_metadata_service_and_is_not_held_for_it() {
    let mut node = Node::usual();
    let (steps, result) = node.learn("www.cilium.io", &[METADATA]);
    assert!(steps.is_empty(), "{steps:?}");
    // There is nothing to write to the datapath: the answer is released at once, both this time and
    // under its lease.
    assert_eq!(result.realised, Realised::Yes);
    assert!(result.lease_end.is_some());
    let (_, result) = node.learn("www.cilium.io", &["1.1.1.1", METADATA, "fd00:ec2::254"]);
    assert_eq!(result.realised, Realised::Yes);
    assert!(node.identity("1.1.1.1").is_some());
    assert_eq!(node.identity(METADATA), None);
    let names = node.core.snapshot().names;
    assert!(
        names.iter().all(|view| view.address == "1.1.1.1"),
        "{names:?}"
    );
    assert_eq!(node.core.summary().counters.addresses_refused, 3);
}

/// Addresses of the node, of a pod, of the metadata service, of loopback and of a multicast group, in forms
/// that a NAT64 gateway or a tunnel sends on.
#[test]
fn an_ipv6_form_of_an_address_that_no_answer_opens_is_not_opened() {
    let mut node = Node::usual();
    let own = "192.0.2.7".parse().unwrap();
    node.event(Event::NodeAddresses(vec![own]));
    let pod = spec("web", 7, "app=web").addresses[0].to_string();
    for v4 in [
        "192.0.2.7",
        pod.as_str(),
        METADATA,
        "127.0.0.1",
        "224.0.0.1",
    ] {
        for address in embedded::with(v4.parse().unwrap()) {
            let address = address.to_string();
            let (steps, result) = node.learn("www.cilium.io", &[&address]);
            assert!(steps.is_empty(), "{v4} as {address}: {steps:?}");
            assert_eq!(result.realised, Realised::Yes);
            assert_eq!(identity(&node, &address), None, "{v4} as {address}");
        }
    }
    node.learn("www.cilium.io", &["64:ff9b::1.1.1.1"]);
    assert!(identity(&node, "64:ff9b::1.1.1.1").is_some());
}

#[test]
fn without_refused_prefixes_it_opens_as_with_cilium() {
    let mut node = Node::usual_with(config(RefusedPrefixes::none()));
    node.learn("www.cilium.io", &[METADATA]);
    assert!(node.identity(METADATA).is_some());
}

#[test]
fn a_rule_about_its_block_opens_it() {
    let block =
        "  - toCIDR: [169.254.169.254/32]\n    toPorts: [{ports: [{port: '80', protocol: TCP}]}]\n";
    let mut node = Node::synced(CoreConfig::default(), &format!("{WEB}{block}"));
    node.learn("www.cilium.io", &[METADATA]);
    let identity = node.identity(METADATA).unwrap();
    let open = |port| {
        let key = PolicyKey::new(identity.0, EGRESS, 6, port, 16);
        node.datapath.policy[&node.id()].contains_key(&key)
    };
    assert!(open(80) && !open(443));
}

/// The earlier run had no refused prefixes, or was of a release without them.
#[test]
fn a_restart_closes_what_the_run_before_opened() {
    let mut node = Node::usual_with(config(RefusedPrefixes::none()));
    node.learn("www.cilium.io", &[METADATA, "1.1.1.1"]);
    node.tick(node.now.plus_secs(6));
    let before = node.identity("1.1.1.1");
    assert_eq!(node.identity(METADATA), before);
    let mut node = again(&node, CoreConfig::default(), &[107]);
    node.begin();
    node.policy(WEB);
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    assert_eq!(node.identity("1.1.1.1"), before);
    assert_ne!(node.identity(METADATA), before);
    node.tick(node.now.plus_secs(31));
    assert_eq!(node.identity(METADATA), None);
}
