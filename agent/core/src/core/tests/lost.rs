//! The state directory is lost, and the datapath is as the last run left it.

use shared_maps::EndpointId;

use super::{
    restart::left_behind,
    scenario::{Node, WEB, spec},
};
use crate::{
    core::{CoreConfig, Restored},
    datapath::{memory::MemoryDatapath, plan::Step},
};

/// What a start finds: the maps and no file.
fn only_maps(node: &Node) -> Node {
    let found = left_behind(&node.datapath, &[107]);
    let restored = Restored {
        now: node.now.plus_secs(2),
        local_identities: Vec::new(),
        endpoint_identities: Vec::new(),
        endpoints: Vec::new(),
        programs: [(node.id(), [107].into())].into(),
        ..found
    };
    let datapath = MemoryDatapath {
        log: Vec::new(),
        ..node.datapath.clone()
    };
    let config = CoreConfig {
        start: 2,
        ..CoreConfig::default()
    };
    Node::with(config, restored, datapath)
}

/// A node with a pod's programs and policy, of which nothing is left on disk, and the pod's number.
fn started_without_files() -> (Node, EndpointId) {
    let mut before = Node::usual();
    before.learn("www.cilium.io", &["1.1.1.1"]);
    let mut node = only_maps(&before);
    node.begin();
    node.policy(WEB);
    (node, before.id())
}

#[test]
fn what_is_left_of_a_pod_stays_until_the_pod_is_added_again() {
    let (mut node, id) = started_without_files();
    let steps = node.sync();
    let opens = |step: &Step| matches!(step, Step::Detach(_) | Step::RemovePolicyMap(_));
    assert!(!steps.iter().any(opens), "{steps:?}");
    // The meaning of identities is lost as well, so the map has no entries, and programs drop every
    // packet.
    assert!(node.datapath.policy[&id].is_empty(), "{steps:?}");
    assert_eq!(node.core.left_behind(), [(id, 107)]);
    let steps = node.tick(node.now.plus_secs(3600));
    assert!(!steps.iter().any(opens), "{steps:?}");
    // An endpoint at another interface does not replace the programs that are left.
    let steps = node.endpoint(spec("other", 8, "app=other"));
    assert!(!steps.iter().any(opens), "{steps:?}");
    // The new endpoint has its programs before the programs of the old number are removed.
    let steps = node.endpoint(spec("web", 7, "app=web"));
    let at = |wanted: &dyn Fn(&Step) -> bool| steps.iter().position(wanted);
    let attached = at(&|step| matches!(step, Step::Attach(_)));
    let detached = at(&|step| matches!(step, Step::Detach(old) if *old == id));
    assert!(attached.is_some() && attached < detached, "{steps:?}");
    assert!(node.core.left_behind().is_empty());
    let ids = node
        .core
        .snapshot()
        .endpoints
        .into_iter()
        .map(|view| view.id);
    assert!(!ids.collect::<Vec<_>>().contains(&id.0));
    // The number is free for the next endpoint, and nothing of it is left.
    assert!(!node.datapath.policy.contains_key(&id));
}

#[test]
fn an_endpoint_whose_file_alone_is_lost_is_not_cut() {
    let (mut node, id) = started_without_files();
    node.endpoint(spec("web", 7, "app=web"));
    let steps = node.sync();
    let at = |wanted: &dyn Fn(&Step) -> bool| steps.iter().position(wanted);
    let attached = at(&|step| matches!(step, Step::Attach(_)));
    let cut = at(&|step| match step {
        Step::Detach(old) => *old == id,
        Step::UnsetPolicy(old, ..) => *old == id,
        _ => false,
    });
    assert!(attached.is_some() && attached < cut, "{steps:?}");
    assert!(node.core.left_behind().is_empty());
}
