//! `cluster status` with a script in place of kubectl: the faults of a child process. No cluster is
//! involved.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// The name of a pod tells the script how to answer for it.
const SCRIPT: &str = r#"#!/bin/sh
directory=${0%/*}
case "$*" in
*" nodes") cat "$directory/nodes" ;;
*" pods "*) cat "$directory/pods" ;;
*" daemonsets "*) echo '{"items": []}' ;;
*" ciliumnodes.cilium.io "*) echo 'no such kind' >&2; exit 1 ;;
*pod/nftables*"holdfast-netpol -- holdfast-agent netpol status"*) echo '{"version": "0.1.0", "ready": true, "pods": 5, "not_enforced": {"EgressFirewall": 1}}' ;;
*pod/fine*) echo '{"version": "0.1.0", "ready": true, "summary": {"endpoints": 3}}' ;;
*pod/hangs*) echo $$ > "$directory/hangs.pid"; exec sleep 600 ;;
*pod/garbage*) printf '\033[2Jnot JSON' ;;
*pod/floods*) exec cat /dev/zero ;;
*pod/fails*) printf 'Error from server: the\033[31m kubelet is away\n' >&2; exit 1 ;;
*) echo "unexpected: $*" >&2; exit 1 ;;
esac
"#;

fn cluster(directory: &Path, pods: &[&str]) {
    let node = |pod: &&str| json!({"metadata": {"name": format!("node-{pod}")}});
    let nodes: Vec<Value> = pods.iter().map(node).collect();
    let pod = |pod: &&str| {
        let name = match pod.starts_with("nftables") {
            true => "holdfast-netpol",
            false => "holdfast-agent",
        };
        let labels = json!({"app.kubernetes.io/name": name});
        json!({
            "metadata": {"name": pod, "labels": labels}, "spec": {"nodeName": format!("node-{pod}")},
            "status": {"containerStatuses": [{
                "name": name, "state": {"running": {"startedAt": "2026-11-26T10:00:00Z"}},
            }]},
        })
    };
    let pods: Vec<Value> = pods.iter().map(pod).collect();
    let list = |items: Vec<Value>| json!({"items": items}).to_string();
    let write = |name: &str, text: &str| {
        fs::write(directory.join(name), text).expect("the directory is writable");
    };
    write("nodes", &list(nodes));
    write("pods", &list(pods));
    write("kubectl", SCRIPT);
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(directory.join("kubectl"), executable).expect("its mode can be set");
}

fn status(directory: &Path, further: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_holdfast-agent"))
        .args(["cluster", "status", "--kubectl"])
        .arg(directory.join("kubectl"))
        .args(further)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .output()
        .expect("holdfast-agent runs")
}

#[test]
fn one_fault_of_a_pod_is_one_row_and_the_others_are_shown() {
    let directory = tempfile::tempdir().unwrap();
    let pods = ["fine", "hangs", "garbage", "floods", "fails"];
    cluster(directory.path(), &pods);
    let began = Instant::now();
    let output = status(directory.path(), &["--timeout=5s"]);
    assert!(began.elapsed() < Duration::from_secs(60));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let row = |node: &str| {
        let mut lines = text.lines();
        let line = lines.find(|line| line.starts_with(node));
        line.unwrap_or_else(|| panic!("no {node} in\n{text}"))
    };
    for (node, part) in [
        ("node-hangs", "no answer within 5s"),
        ("node-garbage", "the answer is no state of an agent"),
        ("node-floods", "the answer has more than 4194304 bytes"),
        ("node-fails", "Error from server: the [31m kubelet is away"),
        ("node-fine", "0.1.0"),
        ("5 nodes: 1 fine, 4 with problems", "3 endpoints"),
    ] {
        assert!(row(node).contains(part), "no {part:?} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let last = pods.len();
    assert!(
        text.lines().nth(last).unwrap().starts_with("node-fine"),
        "{text}"
    );

    let pid = fs::read_to_string(directory.path().join("hangs.pid")).unwrap();
    let ended = || !Path::new("/proc").join(pid.trim()).join("exe").exists();
    let limit = Instant::now() + Duration::from_secs(10);
    while !ended() {
        assert!(
            Instant::now() < limit,
            "the process that hangs was not ended"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_cluster_without_problems_ends_with_0() {
    let directory = tempfile::tempdir().unwrap();
    cluster(directory.path(), &["fine"]);
    let output = status(directory.path(), &["-o", "json", "--context=c"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let agent = json!({
        "version": "0.1.0", "enforcement": "programs", "ready": true, "endpoints": 3, "refused": 0,
        "unmanaged": [], "started_open": [], "not_enforced": {},
    });
    assert_eq!(report["nodes"][0]["state"], "fine");
    assert_eq!(report["nodes"][0]["agent"], agent);
    assert_eq!(report["summary"]["versions"], json!({"0.1.0": 1}));
}

#[test]
fn without_kubectl_or_agents_the_error_names_the_flag() {
    let directory = tempfile::tempdir().unwrap();
    let output = status(directory.path(), &[]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("--kubectl"), "{errors}");
    cluster(directory.path(), &[]);
    let output = status(directory.path(), &["-n", "elsewhere"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("namespace elsewhere"), "{errors}");
}

#[test]
fn nodes_with_nftables_are_asked_in_their_own_container() {
    let directory = tempfile::tempdir().unwrap();
    cluster(directory.path(), &["fine", "nftables"]);
    let output = status(directory.path(), &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for part in [
        "nftables",
        "EgressFirewall: 1 policy not enforced on 1 node",
        "2 nodes: 2 fine",
        "8 endpoints",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
}
