//! A restart of the agent keeps what names opened and denied, and nothing else.

use super::*;
use crate::core::tests::{restart::again, scenario::spec};

/// The next run, with these firewalls and the pod.
fn restarted(node: &Node, firewalls: &str) -> Node {
    let mut node = again(node, config(), &[107]);
    node.begin();
    node.policy(&format!("{DNS}{firewalls}"));
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    node
}

#[test]
fn a_restart_of_the_agent_cuts_nothing() {
    let mut node = node(&example());
    node.learn("www.example.com", &["1.1.1.1"]);
    learn_untrusted(&mut node, "www.example.com", "6.6.6.6");
    node.tick(node.now.plus_secs(6));
    let before = node.identity("1.1.1.1");
    let mut node = restarted(&node, &example());
    assert_eq!(node.identity("1.1.1.1"), before);
    node.tick(node.now.plus_secs(15));
    assert_eq!(
        labels(&node, "1.1.1.1"),
        ["dnsname:*.example.com", "dnsname:www.example.com"],
        "after the grace the file keeps it"
    );
    assert_eq!(labels(&node, "6.6.6.6"), [""; 0]);
    // Only a connection keeps the address: a further restart does not cut the connection either.
    let ended = node.now.plus_secs(200);
    node.tick(ended);
    node.tick(ended.plus_secs(10));
    alive(&mut node, &["1.1.1.1"]);
    node.tick(node.now.plus_secs(10));
    let mut node = restarted(&node, &example());
    node.tick(node.now.plus_secs(60));
    assert!(!labels(&node, "1.1.1.1").is_empty());
}

#[test]
fn trust_that_ended_does_not_come_back_with_a_restart() {
    let mut node = node(&example());
    node.learn("www.example.com", &["1.1.1.1"]);
    let learned = node.now;
    node.now = learned.plus_secs(110);
    for _ in 0..2 {
        let mut answer = mapping(&node, "www.example.com", &["1.1.1.1"]);
        answer.server = "10.9.0.54:53".parse().unwrap();
        answer.ttl = 6000;
        node.mapping(answer);
    }
    node.tick(learned.plus_secs(130));
    node.now = learned.plus_secs(131);
    alive(&mut node, &[]);
    assert!(labels(&node, "1.1.1.1").is_empty());
    node.tick(node.now.plus_secs(10));
    let mut node = restarted(&node, &example());
    node.tick(node.now.plus_secs(15));
    node.now = node.now.plus_secs(16);
    alive(&mut node, &[]);
    assert!(labels(&node, "1.1.1.1").is_empty());
}

#[test]
fn a_denied_address_in_a_refused_prefix_stays_denied_after_a_restart() {
    const METADATA: &str = "169.254.169.254";
    let rules = firewall(&["type: Deny, to: {dnsName: metadata.example.com}"]);
    let mut node = node(&rules);
    let mut answer = mapping(&node, "metadata.example.com", &[METADATA]);
    answer.ttl = 86_400;
    node.mapping(answer);
    let closed = ["dnsname-closed:metadata.example.com"];
    assert_eq!(labels(&node, METADATA), closed);
    node.tick(node.now.plus_secs(6));
    let mut node = restarted(&node, &rules);
    node.tick(node.now.plus_secs(60));
    node.now = node.now.plus_secs(1);
    alive(&mut node, &[]);
    assert_eq!(labels(&node, METADATA), closed);
}
