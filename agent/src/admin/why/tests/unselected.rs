//! Pods that no rule of the policy selects.

use super::*;

#[test]
fn a_block_that_covers_a_pod_is_named_and_opens_nothing() {
    let mut pod = read();
    pod.peer = PeerFound {
        labels: Some(vec!["k8s:app=db".to_owned()]),
        verdict: Some(Verdict::NoRule),
        ..PeerFound::default()
    };
    pod.entries = Ok(Entries::default());
    pod.blocks = vec![RuleView {
        document: "NetworkPolicy/shop/web".to_owned(),
        rule: "spec.egress[0]".to_owned(),
        selector: Some("cidr:192.0.2.0/24".to_owned()),
        ..RuleView::default()
    }];
    let why = why(&found(), &[pod], true);
    assert!(!why.allowed);
    let says = "a block covers its address, but means no pods or nodes: NetworkPolicy/shop/web \
                spec.egress[0] (cidr:192.0.2.0/24; every port); add a rule with labels";
    assert!(text(&why).contains(says), "{}", text(&why));
}

#[test]
fn a_pod_that_a_pruned_node_does_not_read_is_named_as_such() {
    let labels = |text: &str| {
        let mut read = read();
        read.peer.labels = Some(vec![text.to_owned()]);
        read.peer.about.clear();
        read.peer.by.clear();
        read.peer.verdict = Some(Verdict::NoRule);
        read.entries = Ok(Entries::default());
        [read]
    };
    let pruned = Findings {
        is_pruned: true,
        ..found()
    };
    let unread = labels("reserved:unmanaged");
    missing(
        &why(&pruned, &unread, true),
        "identity",
        "--high-scale-prune",
    );
    for (found, read) in [(&found(), &unread), (&pruned, &labels("k8s:app=web"))] {
        let why = why(found, read, true);
        missing(&why, "identity", "no selector of the policy selects it");
        assert!(!text(&why).contains("--high-scale-prune"));
    }
}
