//! The questions on overlaps of CFP-28427, and what a change touches.

use std::collections::BTreeSet;

use dns_policy::mapping::{Mapping, Realised, Refusal};

use shared_maps::{
    IdentityId,
    policy::{EGRESS, PolicyKey},
};

use super::{
    restart::left_behind,
    scenario::{Node, mapping, spec},
};
use crate::{
    core::{CoreConfig, Event, event::StreamId},
    datapath::{
        memory::MemoryDatapath,
        plan::{Datapath as _, Step},
    },
    fqdn::cleaned,
    ipcache::{
        metadata::Claim,
        owners::{Owner, Source},
    },
    labels::LabelSet,
    source_event::SourceEvent,
};

fn policy(rules: &str) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: p}}
spec:
  endpointSelector: {{}}
  egress:
  - toCIDR: [10.9.0.53/32]
    toPorts: [{{ports: [{{port: 53}}], rules: {{dns: [{{matchPattern: '*'}}]}}}}]
{rules}"
    )
}

fn node(rules: &str) -> Node {
    let mut node = Node::new();
    node.event(Event::StreamUp(StreamId(1)));
    node.begin();
    node.policy(&policy(rules));
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
    node
}

fn labels(node: &Node, address: &str) -> Vec<String> {
    let id = node.identity(address).unwrap().0;
    let snapshot = node.core.snapshot();
    let mut labels = snapshot
        .identities
        .iter()
        .find(|i| i.id == id)
        .unwrap()
        .labels
        .clone();
    labels.retain(|label| !label.starts_with("reserved:"));
    labels
}

fn selected(node: &Node, selector: &str) -> Vec<u32> {
    let snapshot = node.core.snapshot();
    snapshot
        .selectors
        .iter()
        .find(|s| s.selector == selector)
        .unwrap()
        .identities
        .clone()
}

#[test]
fn overlapping_fqdn_selectors() {
    let mut node = node("  - toFQDNs: [{matchPattern: '*.cilium.io'}, {matchName: www.cilium.io}]");
    node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2"]);
    node.learn("dev.cilium.io", &["1.1.1.2", "1.1.1.3"]);
    assert_eq!(
        labels(&node, "1.1.1.1"),
        ["fqdn:*.cilium.io", "fqdn:www.cilium.io"]
    );
    assert_eq!(node.identity("1.1.1.1"), node.identity("1.1.1.2"));
    assert_eq!(labels(&node, "1.1.1.3"), ["fqdn:*.cilium.io"]);
    let wide = selected(&node, "fqdn:*.cilium.io");
    let narrow = selected(&node, "fqdn:www.cilium.io");
    assert!(
        narrow
            .iter()
            .all(|id| *id == node.identity("1.1.1.1").unwrap().0 || !wide.contains(id))
    );
    assert!(wide.contains(&node.identity("1.1.1.1").unwrap().0));
    assert!(wide.contains(&node.identity("1.1.1.3").unwrap().0));
    assert!(!narrow.contains(&node.identity("1.1.1.3").unwrap().0));
}

#[test]
fn one_address_of_two_names() {
    let mut node = node("  - toFQDNs: [{matchName: foo.com}, {matchName: bar.com}]");
    node.learn("foo.com", &["1.1.1.1", "1.1.1.2"]);
    node.learn("bar.com", &["1.1.1.2", "1.1.1.3"]);
    assert_eq!(labels(&node, "1.1.1.1"), ["fqdn:foo.com"]);
    assert_eq!(labels(&node, "1.1.1.2"), ["fqdn:bar.com", "fqdn:foo.com"]);
    assert_eq!(labels(&node, "1.1.1.3"), ["fqdn:bar.com"]);
    // The two owners of one address are managed separately.
    node.event(Event::CleanNames(crate::core::event::CleanNames {
        pattern: Some("foo.com".into()),
        endpoint: None,
    }));
    node.event(Event::RevokeAcked(vec![crate::core::event::RevokeAck {
        stream: StreamId(1),
        id: 1,
    }]));
    assert_eq!(labels(&node, "1.1.1.2"), ["fqdn:bar.com"]);
    assert_eq!(node.identity("1.1.1.1"), None);
}

#[test]
fn names_and_blocks() {
    let mut node =
        node("  - toFQDNs: [{matchPattern: '*.cilium.io'}]\n  - toCIDR: [52.58.254.0/24]");
    node.learn("www.cilium.io", &["52.58.254.253"]);
    assert_eq!(
        labels(&node, "52.58.254.253"),
        ["cidr:52.58.254.0/24", "fqdn:*.cilium.io"]
    );
    let id = node.identity("52.58.254.253").unwrap().0;
    assert!(selected(&node, "cidr:52.58.254.0/24").contains(&id));
    assert!(selected(&node, "fqdn:*.cilium.io").contains(&id));
}

/// CFP-28427, proposal 2: each block has its own label, and the broad selector selects both.
#[test]
fn blocks_within_blocks() {
    let node = node("  - toCIDR: [192.168.0.0/24]\n  - toCIDR: [192.168.0.0/25]");
    let of = |prefix: &str| {
        let snapshot = node.core.snapshot();
        let view = snapshot.ipcache.iter().find(|view| view.prefix == prefix);
        let id = view.unwrap().identity;
        let identity = snapshot.identities.iter().find(|view| view.id == id);
        (id, identity.unwrap().labels.clone())
    };
    let (broad, labels) = of("192.168.0.0/24");
    assert_eq!(labels, ["cidr:192.168.0.0/24", "reserved:world-ipv4"]);
    let (narrow, labels) = of("192.168.0.0/25");
    assert_eq!(labels, ["cidr:192.168.0.0/25", "reserved:world-ipv4"]);
    assert_eq!(
        BTreeSet::from_iter(selected(&node, "cidr:192.168.0.0/24")),
        BTreeSet::from([broad, narrow])
    );
    assert_eq!(selected(&node, "cidr:192.168.0.0/25"), [narrow]);
}

/// CFP-28427, "IP Labels Lifecycle": two names of one address, each with its own owner. A removed
/// selector takes away only the label of its own names.
#[test]
fn a_selector_that_goes_leaves_the_labels_of_others() {
    let both = "  - toFQDNs: [{matchPattern: '*.com'}, {matchPattern: '*.io'}]";
    let mut node = node(both);
    node.learn("ebpf.com", &["1.2.3.4"]);
    node.learn("cilium.io", &["1.2.3.4"]);
    assert_eq!(labels(&node, "1.2.3.4"), ["fqdn:*.com", "fqdn:*.io"]);
    let snapshot = node.core.snapshot();
    let owners = |address: &str| {
        let mut views = snapshot.ipcache.iter();
        views
            .find(|view| view.prefix == address)
            .unwrap()
            .owners
            .clone()
    };
    assert_eq!(
        owners("1.2.3.4/32"),
        [
            "fqdn-name-manager/cilium.io.",
            "fqdn-name-manager/ebpf.com."
        ]
    );
    node.policy(&policy("  - toFQDNs: [{matchPattern: '*.com'}]"));
    assert_eq!(labels(&node, "1.2.3.4"), ["fqdn:*.com"]);
    // A new selector labels names that were learned before.
    node.policy(&policy(both));
    assert_eq!(labels(&node, "1.2.3.4"), ["fqdn:*.com", "fqdn:*.io"]);
    node.policy(&policy(""));
    assert_eq!(node.identity("1.2.3.4"), None);
}

/// See CFP-28427, "FQDN identity pre-allocation".
#[test]
fn a_selector_has_its_identity_before_its_first_address() {
    let mut node = node("  - toFQDNs: [{matchPattern: '*.cilium.io'}]");
    let ahead = selected(&node, "fqdn:*.cilium.io");
    assert_eq!(ahead.len(), 2, "one of each family");
    let before = node.core.summary().counters;
    let addresses = ["1.1.1.1", "2001:db8::1"];
    node.learn("www.cilium.io", &addresses);
    let after = node.core.summary().counters;
    assert_eq!(after.policy_writes, before.policy_writes);
    assert_eq!(after.ipcache_writes, before.ipcache_writes + 2);
    let names = node.core.snapshot().ipcache.into_iter();
    let names = names.filter(|view| view.owners == ["fqdn-name-manager/www.cilium.io."]);
    assert_eq!(
        names.map(|view| view.identity).collect::<BTreeSet<_>>(),
        ahead.into_iter().collect()
    );
}

/// CFP-28427, "Lifecycle" of labels that flow down.
#[test]
fn a_change_of_a_block_looks_at_what_is_within_and_at_nothing_else() {
    let rules = "  - toFQDNs: [{matchPattern: '*.io'}]";
    let mut node = node(rules);
    for n in 0..200 {
        let inside = if n < 10 { "10.1.0" } else { "10.2.0" };
        node.learn(&format!("n{n}.io"), &[&format!("{inside}.{n}")]);
    }
    let resolved = |node: &Node| node.core.summary().counters.prefixes_resolved;
    let before = resolved(&node);
    node.policy(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: block}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: [10.1.0.0/16]
",
    );
    assert_eq!(resolved(&node), before + 11, "the block and ten addresses");
    assert_eq!(labels(&node, "10.1.0.9"), ["cidr:10.1.0.0/16", "fqdn:*.io"]);
}

/// The host has one identity, with the labels of all its addresses.
#[test]
fn an_api_server_on_this_node_is_the_host() {
    let mut node = node("  - toEntities: [kube-apiserver]");
    node.event(Event::NodeAddresses(vec!["10.0.0.1".parse().unwrap()]));
    assert_eq!(selected(&node, "entity:kube-apiserver"), [7]);
    let api = || Owner::Object(Source::KubeApiserver, "api".into());
    let label = LabelSet::parse(&["reserved:kube-apiserver"]).unwrap();
    let address = "10.0.0.1/32".parse().unwrap();
    let ipcache = &mut node.core.state.ipcache;
    ipcache.claim(address, api(), Claim::Labels(label));
    node.event(Event::Tick);
    assert_eq!(node.identity("10.0.0.1"), Some(IdentityId::HOST));
    assert_eq!(selected(&node, "entity:kube-apiserver"), [1, 7]);
    let to_host = |node: &Node| {
        let map = &node.datapath.policy[&node.id()];
        map.contains_key(&PolicyKey::new(1, EGRESS, 0, 0, 0))
    };
    assert!(to_host(&node));
    node.core.state.ipcache.unclaim(address, &api());
    node.event(Event::Tick);
    assert_eq!(selected(&node, "entity:kube-apiserver"), [7]);
    assert!(!to_host(&node));
}

#[test]
fn a_node_that_has_this_ones_address_under_another_name_is_told() {
    let mut node = node("  - toEntities: [remote-node]");
    node.event(Event::NodeAddresses(vec!["10.0.0.1".parse().unwrap()]));
    let warned = |node: &Node| {
        let warnings = node.core.policy_warnings();
        warnings
            .iter()
            .any(|text| text.contains("--node-name worker-1"))
    };
    let other = r"
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: worker-1}
spec: {addresses: [{type: InternalIP, ip: 10.0.0.2}]}
";
    node.policy(other);
    assert!(!warned(&node));
    node.policy(&other.replace("10.0.0.2", "10.0.0.1"));
    assert!(warned(&node));
}

#[test]
fn a_lease_is_revoked_before_its_pair_goes() {
    let mut node = node("  - toFQDNs: [{matchName: foo.com}]");
    node.learn("foo.com", &["1.1.1.1"]);
    node.event(Event::CleanNames(Default::default()));
    let revoked = node.effects.iter().find_map(|effect| match effect {
        crate::core::Effect::Revoke(revocation) => Some(revocation.clone()),
        _ => None,
    });
    let revoked = revoked.unwrap();
    assert_eq!(revoked.streams, [StreamId(1)]);
    assert!(node.identity("1.1.1.1").is_some());
    node.event(Event::RevokeAcked(vec![crate::core::event::RevokeAck {
        stream: StreamId(1),
        id: revoked.id,
    }]));
    assert!(node.identity("1.1.1.1").is_none());
}

#[test]
fn what_was_cleaned_is_not_told_again() {
    let mut node = node("  - toFQDNs: [{matchPattern: '*.com'}]");
    let mut seen_before = ["foo.com", "bar.com"].map(|name| mapping(&node, name, &["1.1.1.1"]));
    for mapping in &mut seen_before {
        mapping.replayed = true;
    }
    let [foo, bar] = seen_before;
    node.event(Event::CleanNames(crate::core::event::CleanNames {
        pattern: Some("foo.com".into()),
        endpoint: None,
    }));
    let (_, result) = node.mapping(foo.clone());
    assert_eq!(result.realised, Realised::No(Refusal::NotAllowed));
    assert_eq!(node.mapping(bar).1.realised, Realised::Yes);
    node.now = node.now.plus_secs(1);
    let seen_since = Mapping {
        seen_at: node.now,
        ..foo
    };
    assert_eq!(node.mapping(seen_since).1.realised, Realised::Yes);
}

#[test]
fn cleanings_are_remembered_once_each_and_those_of_an_endpoint_not_for_ever() {
    let allowed = "  - toFQDNs: [{matchPattern: '*.com'}]";
    let clean = |of: &mut Node, pattern: Option<&str>, endpoint| {
        of.event(Event::CleanNames(crate::core::event::CleanNames {
            pattern: pattern.map(str::to_owned),
            endpoint,
        }));
        let text = of.datapath.cleaned.as_deref().unwrap();
        cleaned::parse(text).unwrap().cleanings.len()
    };
    let mut one = node(allowed);
    assert_eq!(clean(&mut one, Some("foo.com"), None), 1);
    assert_eq!(clean(&mut one, Some("foo.com"), None), 1);
    assert_eq!(clean(&mut one, Some("*.com"), None), 2);
    let all = clean(&mut one, None, None);
    assert_eq!(all, 1, "everything is more than these");
    for n in 0..100 {
        assert!(clean(&mut one, Some(&format!("name{n}.com")), None) <= 64);
    }
    // The pre-cache may have a name of the node for as long as its file says.
    one.now = one.now.plus_secs(8 * 86_400);
    assert_eq!(clean(&mut one, Some("foo.com"), None), 64);

    let mut other = node(allowed);
    let endpoint = Some(other.id());
    assert_eq!(clean(&mut other, Some("foo.com"), endpoint), 1);
    other.now = other.now.plus_secs(8 * 86_400);
    assert_eq!(clean(&mut other, Some("bar.com"), endpoint), 1);
}

#[test]
fn a_lease_outlives_its_stream() {
    for revoked_first in [true, false] {
        let mut node = node("  - toFQDNs: [{matchName: foo.com}]");
        let (_, result) = node.learn("foo.com", &["1.1.1.1"]);
        let end = result.lease_end.unwrap();
        assert!(end > node.now);
        let events = [
            Event::CleanNames(Default::default()),
            Event::StreamDown(StreamId(1)),
        ];
        let mut events = Vec::from(events);
        if !revoked_first {
            events.reverse();
        }
        for event in events {
            node.event(event);
        }
        node.event(Event::StreamUp(StreamId(2)));
        node.event(Event::RevokeAcked(vec![crate::core::event::RevokeAck {
            stream: StreamId(2),
            id: 1,
        }]));
        node.tick(end);
        assert!(node.identity("1.1.1.1").is_some(), "{revoked_first}");
        node.tick(end.plus_secs(5));
        assert!(node.identity("1.1.1.1").is_none(), "{revoked_first}");
    }
}

#[test]
fn a_stream_without_a_lease_delays_no_revocation() {
    let mut node = node("  - toFQDNs: [{matchName: foo.com}]");
    node.event(Event::StreamUp(StreamId(2)));
    node.learn("foo.com", &["1.1.1.1"]);
    node.event(Event::CleanNames(Default::default()));
    node.event(Event::StreamDown(StreamId(2)));
    assert!(node.identity("1.1.1.1").is_some());
    node.event(Event::RevokeAcked(vec![crate::core::event::RevokeAck {
        stream: StreamId(1),
        id: 1,
    }]));
    assert!(node.identity("1.1.1.1").is_none());
}

#[test]
fn an_endpoint_that_goes_leaves_nothing() {
    let mut node = node("  - toFQDNs: [{matchName: foo.com}]");
    let steps = node.event(Event::Endpoints(SourceEvent::Delete("web".into())));
    let at = |wanted: fn(&Step) -> bool| steps.iter().position(wanted).unwrap();
    let order = [
        at(|s| matches!(s, Step::UnsetIpcache(_))),
        at(|s| matches!(s, Step::UnsetLxc(_))),
        at(|s| matches!(s, Step::Detach(_))),
        at(|s| matches!(s, Step::RemoveEndpoint(_))),
        at(|s| matches!(s, Step::RemovePolicyMap(_))),
    ];
    assert!(order.is_sorted(), "{order:?}");
    assert!(node.datapath.lxc.is_empty() && node.datapath.files.is_empty());
    assert!(node.datapath.policy.is_empty() && node.datapath.attached.is_empty());
}

/// CFP-28427, the example of "identity restoration on restart": an address comes back with fewer
/// names than it had; what the broader selector opens is open all along.
#[test]
fn an_address_that_comes_back_with_fewer_names_is_not_dropped() {
    let rules = r"
  - toFQDNs: [{matchPattern: '*'}]
    toPorts: [{ports: [{port: '443', protocol: TCP}]}]
  - toFQDNs: [{matchName: one.one.one.one}]
";
    let mut node = node(rules);
    node.learn("one.one.one.one", &["1.1.1.1"]);
    node.learn("dns.test", &["1.1.1.1"]);
    let both = node.identity("1.1.1.1");
    node.tick(node.now.plus_secs(20));
    let mut restored = left_behind(&node.datapath, &[107]);
    for file in &mut restored.endpoints {
        file.history
            .retain(|entry| entry.name.as_str() == "dns.test.");
    }
    restored.now = node.now.plus_secs(2);
    let mut again = Node::with(CoreConfig::default(), restored, node.datapath.clone());
    again.begin();
    again.policy(&policy(rules));
    again.endpoint(spec("web", 7, "app=web"));
    let is_open = |node: &Node| {
        let identity = node.identity("1.1.1.1").expect("it has an entry");
        let key = PolicyKey::new(identity.0, EGRESS, 6, 443, 16);
        let everything = PolicyKey::new(identity.0, EGRESS, 0, 0, 0);
        let map = &node.datapath.policy[&node.id()];
        map.contains_key(&key) || map.contains_key(&everything)
    };
    again.sync();
    assert_eq!(
        again.identity("1.1.1.1"),
        both,
        "as long as the grace lasts"
    );
    // The address is open at the end of the grace, and after each step on the way there.
    let synced = again.now;
    let before = again.datapath.clone();
    again.tick(synced.plus_secs(30));
    assert_ne!(again.identity("1.1.1.1"), both);
    assert_eq!(labels(&again, "1.1.1.1"), ["fqdn:*"]);
    assert!(is_open(&again));
    let steps = again.datapath.log[before.log.len()..].to_vec();
    again.datapath = MemoryDatapath {
        log: Vec::new(),
        ..before
    };
    for step in steps {
        again.datapath.apply(&step).unwrap();
        assert!(is_open(&again), "after {step:?}");
    }
}
