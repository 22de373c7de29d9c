//! Rows and their text, from objects as the API server sends them.

use serde_json::{Value, json};

use super::*;
use crate::cli::cluster::text::text;

const SINCE: &str = "2026-11-26T10:00:00Z";

fn node(name: &str) -> Node {
    let labels =
        json!({"kubernetes.io/arch": if name.starts_with("arm") { "arm64" } else { "amd64" }});
    of(json!({"metadata": {"name": name, "labels": labels}}))
}

fn of<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn pod(name: &str, node: &str, state: &Value) -> Pod {
    of(json!({
        "metadata": {"name": name}, "spec": {"nodeName": node},
        "status": {"phase": "Running", "containerStatuses": [
            {"name": "holdfast-agent", "restartCount": 2, "state": state,
             "lastState": {"terminated": {"reason": "Error", "message": "state directory: full\n"}}},
        ]},
    }))
}

fn running(name: &str, node: &str) -> Pod {
    pod(name, node, &json!({"running": {"startedAt": SINCE}}))
}

fn agent(version: &str, problems: &[&str]) -> Agent {
    let answer = json!({
        "version": version, "ready": true, "problems": problems,
        "summary": {"endpoints": 3, "policies_rejected": problems.len()},
    });
    Agent::parse(answer.to_string().as_bytes(), Enforcement::Programs).unwrap()
}

fn cluster(nodes: &[&str], pods: Vec<Pod>) -> Cluster {
    Cluster {
        nodes: nodes.iter().map(|name| node(name)).collect(),
        pods,
        sets: vec![of(json!({"spec": {"template": {"spec": {
            "nodeSelector": {"kubernetes.io/arch": "amd64"},
        }}}}))],
        ..Cluster::default()
    }
}

fn order(report: &Report) -> Vec<(&str, State)> {
    let rows = report.nodes.iter();
    rows.map(|row| (row.node.as_str(), row.state)).collect()
}

#[test]
fn problems_come_first_and_a_node_without_an_agent_on_purpose_last() {
    let pods = vec![running("p1", "a"), running("p2", "b"), running("p3", "d")];
    let mut cluster = cluster(&["a", "arm", "b", "c", "d"], pods);
    cluster.answers = BTreeMap::from([
        ("p1".to_owned(), Ok(agent("0.1.0", &[]))),
        (
            "p2".to_owned(),
            Ok(agent("0.1.1", &["1 document", "other"])),
        ),
        ("p3".to_owned(), Err("no answer within 10s".to_owned())),
    ]);
    let report = Report::of(&cluster);
    let expected = [
        ("b", State::Problem),
        ("c", State::Problem),
        ("d", State::Problem),
        ("a", State::Fine),
        ("arm", State::Excluded),
    ];
    assert_eq!(order(&report), expected);
    assert!(!report.is_fine());
    let text = text(&report);
    for part in [
        "1 document (and 1 more)",
        "no agent: no pod is there",
        "no answer within 10s",
        "no agent on purpose: nodeSelector",
        SINCE,
        "5 nodes: 1 fine, 3 with problems, 1 without an agent on purpose. 6 endpoints, 2 documents \
         refused at most on a node, 0 pods not under policy, 0 started open. Versions: 0.1.0 on 1 node, \
         0.1.1 on 1 node",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
}

#[test]
fn other_versions_and_nodes_that_were_taken_out_are_no_problem() {
    let mut cluster = cluster(
        &["a", "b", "c"],
        vec![running("p1", "a"), running("p2", "b")],
    );
    cluster.left.insert("c".to_owned());
    cluster.answers = BTreeMap::from([
        ("p1".to_owned(), Ok(agent("0.1.0", &[]))),
        ("p2".to_owned(), Ok(agent("0.2.0", &[]))),
    ]);
    assert!(cluster.lacks_pods());
    let report = Report::of(&cluster);
    assert!(report.is_fine(), "{report:?}");
    assert!(
        report.nodes[2]
            .excluded
            .as_ref()
            .unwrap()
            .contains("holdfast.io/left")
    );
    cluster
        .unread
        .push("cannot list nodes: forbidden".to_owned());
    assert!(!Report::of(&cluster).is_fine());
}

#[test]
fn a_pod_that_does_not_run_says_why() {
    let crashed = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}});
    let waits: Pod = of(json!({
        "metadata": {"name": "p2"},
        "spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": ["b"]},
            ]}],
        }}}},
        "status": {"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/2 nodes are available: 1 Insufficient cpu.",
        }]},
    }));
    let mut cluster = cluster(&["a", "b"], vec![pod("p1", "a", &crashed), waits]);
    cluster.nodes[0] = of(
        json!({"metadata": {"name": "a"}, "status": {"conditions": [{
            "type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting node status.",
        }]}}),
    );
    let report = Report::of(&cluster);
    assert_eq!(
        report.nodes[0].problems,
        [
            "pod p1 does not run: CrashLoopBackOff: back-off 5m0s; the last run ended: Error: state \
             directory: full",
            "the node is not ready: Kubelet stopped posting node status.",
        ]
    );
    assert_eq!(
        report.nodes[1].problems,
        ["pod p2 does not run: Unschedulable: 0/2 nodes are available: 1 Insufficient cpu."]
    );
}

#[test]
fn the_pod_that_does_not_end_counts() {
    let mut ending = running("old", "a");
    ending.metadata.deletion_timestamp = Some(SINCE.to_owned());
    let mut cluster = cluster(&["a"], vec![ending, running("new", "a")]);
    cluster.answers = BTreeMap::from([
        ("old".to_owned(), Err("it ends".to_owned())),
        ("new".to_owned(), Ok(agent("0.1.0", &[]))),
    ]);
    let report = Report::of(&cluster);
    assert_eq!(report.nodes[0].pod.as_deref(), Some("new"));
    assert!(report.is_fine());
}

#[test]
fn sums_of_absurd_numbers_do_not_overflow() {
    let answer = format!(
        r#"{{"version": "x", "ready": true, "summary": {{"endpoints": {0}, "policies_rejected": {0}}}}}"#,
        u64::MAX
    );
    let liar = || Ok(Agent::parse(answer.as_bytes(), Enforcement::Programs).unwrap());
    let mut cluster = cluster(&["a", "b"], vec![running("p1", "a"), running("p2", "b")]);
    cluster.answers = BTreeMap::from([("p1".to_owned(), liar()), ("p2".to_owned(), liar())]);
    assert_eq!(Report::of(&cluster).summary.endpoints, u64::MAX);
}

#[test]
fn policies_that_nodes_with_nftables_cannot_enforce_are_a_row() {
    let on_nftables = |name: &str, node: &str| -> Pod {
        of(json!({
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "holdfast-netpol"}},
            "spec": {"nodeName": node},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "holdfast-netpol", "state": {"running": {"startedAt": SINCE}}},
            ]},
        }))
    };
    let pods = vec![
        running("p1", "a"),
        on_nftables("p2", "b"),
        on_nftables("p3", "c"),
    ];
    let mut cluster = cluster(&["a", "b", "c"], pods);
    let netpol = |policies: u64| {
        let answer = json!({
            "version": "0.1.0", "ready": true, "pods": 4,
            "not_enforced": {"CiliumNetworkPolicy": policies, "EgressFirewall": 0},
        });
        Agent::parse(answer.to_string().as_bytes(), Enforcement::Nftables)
    };
    cluster.answers = BTreeMap::from([
        ("p1".to_owned(), Ok(agent("0.1.0", &[]))),
        ("p2".to_owned(), Ok(netpol(2).unwrap())),
        ("p3".to_owned(), Ok(netpol(1).unwrap())),
    ]);
    let report = Report::of(&cluster);
    assert_eq!(report.summary.endpoints, 11);
    let text = text(&report);
    let row = |node: &str| text.lines().find(|line| line.starts_with(node)).unwrap();
    assert!(row("a ").contains("programs"), "{text}");
    assert!(row("b ").contains("nftables"), "{text}");
    let kind = row("CiliumNetworkPolicy: ");
    assert!(
        kind.contains("2 policies not enforced on 2 nodes"),
        "{text}"
    );
    assert!(!text.contains("EgressFirewall"), "{text}");
}
