//! Names that are written while the core continues. They are durable once they are reported to be on disk.

use shared_maps::EndpointId;

use super::{
    restart::again,
    scenario::{Node, WEB, spec},
};
use crate::{
    core::{CoreConfig, Effect, Event},
    datapath::{plan::NamesWritten, plan::Step},
};

fn usual() -> Node {
    Node::usual_with(CoreConfig {
        names_kept_later: true,
        ..CoreConfig::default()
    })
}

/// Learns a name, and lets the write fall due. Gives the number of the write.
fn write(node: &mut Node, name: &str) -> u64 {
    node.learn(name, &["1.1.1.1"]);
    let due = node.core.next_deadline().unwrap();
    let steps = node.tick(due);
    let [Step::KeepNames(_, number, file)] = steps.as_slice() else {
        panic!("{steps:?}");
    };
    let text = file.make();
    assert!(text.contains(name), "{text}");
    assert_eq!(durable(node), 0);
    *number
}

fn kept(node: &mut Node, endpoint: EndpointId, number: u64, done: bool) {
    node.event(Event::NamesKept(NamesWritten {
        endpoint,
        number,
        failure: (!done).then(|| "no room".to_owned()),
    }));
}

/// How many results of the last event say that they are durable.
fn durable(node: &Node) -> usize {
    let is = |effect: &&Effect| matches!(effect, Effect::Result(result) if result.durable);
    node.effects.iter().filter(is).count()
}

#[test]
fn a_result_is_durable_once_its_write_is_told_to_be_done() {
    let mut node = usual();
    let id = node.id();
    let number = write(&mut node, "www.cilium.io.");
    kept(&mut node, id, number, true);
    assert_eq!(durable(&node), 1);
    kept(&mut node, id, number, true);
    assert_eq!(durable(&node), 0);
}

#[test]
fn a_failed_write_is_repeated_with_its_results() {
    let mut node = usual();
    let id = node.id();
    let number = write(&mut node, "www.cilium.io.");
    kept(&mut node, id, number, false);
    assert_eq!(durable(&node), 0);
    let summary = node.core.summary();
    assert_eq!(summary.pending_steps, 1);
    assert_eq!(summary.trouble.as_deref(), Some("no room"));
    let steps = node.tick(node.now.plus_secs(1));
    let [Step::KeepNames(_, again, _)] = steps.as_slice() else {
        panic!("{steps:?}");
    };
    assert_ne!(*again, number);
    kept(&mut node, id, *again, true);
    assert_eq!(durable(&node), 1);
    assert_eq!(node.core.summary().trouble, None);
}

#[test]
fn one_write_at_a_time() {
    let mut node = usual();
    let id = node.id();
    let number = write(&mut node, "www.cilium.io.");
    node.learn("sub.cilium.io", &["2.2.2.2"]);
    let steps = node.tick(node.now.plus_secs(10));
    assert!(steps.is_empty(), "{steps:?}");
    kept(&mut node, id, number, true);
    let steps = node.tick(node.now.plus_secs(1));
    assert!(
        matches!(steps.as_slice(), [Step::KeepNames(_, _, file)] if file.make().contains("sub.cilium.io.")),
        "{steps:?}"
    );
}

#[test]
fn a_write_for_new_rules_does_not_wait_and_makes_all_durable() {
    let mut node = usual();
    let id = node.id();
    let number = write(&mut node, "www.cilium.io.");
    let steps = node.policy(&WEB.replace("matchPattern: \"*\"", "matchPattern: \"*.cilium.io\""));
    assert!(
        steps
            .iter()
            .any(|step| matches!(step, Step::WriteEndpoint(..))),
        "{steps:?}"
    );
    assert_eq!(durable(&node), 1);
    // While the next write is under way, the report of the write that it replaced makes nothing
    // durable.
    let next = {
        node.learn("sub.cilium.io", &["2.2.2.2"]);
        let steps = node.tick(node.now.plus_secs(10));
        let [Step::KeepNames(_, next, _)] = steps.as_slice() else {
            panic!("{steps:?}");
        };
        *next
    };
    kept(&mut node, id, number, true);
    assert_eq!(durable(&node), 0);
    kept(&mut node, id, next, true);
    assert_eq!(durable(&node), 1);
}

/// An agent that takes over has hundreds of these files, and new pods wait for the core.
#[test]
fn files_of_the_earlier_run_are_written_again_without_a_wait_unless_their_rules_changed() {
    let config = || CoreConfig {
        names_kept_later: true,
        ..CoreConfig::default()
    };
    for (policy, waits) in [
        (WEB.to_owned(), 0),
        (
            WEB.replace(
                "dns: [{matchPattern: \"*\"}]",
                "dns: [{matchPattern: \"*.io\"}]",
            ),
            1,
        ),
    ] {
        let mut node = again(&usual(), config(), &[107]);
        node.begin();
        node.policy(&policy);
        node.endpoint(spec("web", 7, "app=web"));
        let steps = node.sync();
        let written = |kind: fn(&Step) -> bool| steps.iter().filter(|step| kind(step)).count();
        let waited_for = written(|step| matches!(step, Step::WriteEndpoint(..)));
        let later = written(|step| matches!(step, Step::KeepNames(..)));
        assert_eq!((waited_for, later), (waits, 1 - waits), "{steps:?}");
    }
}
