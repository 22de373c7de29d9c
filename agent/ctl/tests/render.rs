//! `policy render`: forms of policies, verdicts by each, and errors that name what is wrong.

use std::{
    fs,
    process::{Command, Output},
};

use tempfile::TempDir;

/// Two nodes; web may send only to db, on the port that db names.
const CLUSTER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {team: a}}
---
apiVersion: v1
kind: Pod
metadata: {name: web-0, namespace: shop, labels: {app: web}}
spec: {nodeName: one, containers: [{name: c}]}
status: {podIP: 10.1.0.1}
---
apiVersion: v1
kind: Pod
metadata: {name: db-0, namespace: shop, labels: {app: db}}
spec: {nodeName: two, containers: [{name: c, ports: [{name: sql, containerPort: 5432}]}]}
status: {podIP: 10.1.0.2}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: db}}}]
    ports: [{port: sql}]
";

fn file(text: &str) -> (TempDir, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("cluster.yaml");
    fs::write(&file, text).expect("a file");
    let path = file.to_str().expect("UTF-8").to_owned();
    (dir, path)
}

fn run(text: &str, arguments: &[&str]) -> Output {
    let (_dir, file) = file(text);
    Command::new(env!("CARGO_BIN_EXE_holdfast-agent"))
        .args(["policy", "render", "-f", &file])
        .args(arguments)
        .env_clear()
        .output()
        .expect("holdfast-agent runs")
}

fn prints(text: &str, arguments: &[&str]) -> String {
    let output = run(text, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn fails(text: &str, arguments: &[&str], names: &[&str]) {
    let output = run(text, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
    for name in names {
        assert!(
            error.contains(name),
            "{arguments:?} does not name {name}: {error}"
        );
    }
}

#[test]
fn rules_and_tables_are_printed_for_every_node() {
    let rules = prints(CLUSTER, &["--format=rules"]);
    assert_eq!(
        rules,
        "node one\n\
         pod shop/web-0 (10.1.0.1)\n  receives: not restricted\n  sends:\n\
         \x20   PERMIT  any -> 10.1.0.2/32  5432/TCP\n\
         \x20   DENY    any -> any  any protocol\n\
         node two\n\
         pod shop/db-0 (10.1.0.2)\n  receives: not restricted\n  sends: not restricted\n"
    );
    let tables = prints(CLUSTER, &["--format=tables", "--node=one"]);
    assert!(
        tables.contains("PERMIT  10.1.0.1/32 -> 10.1.0.2/32  5432/TCP"),
        "{tables}"
    );
    let only = prints(CLUSTER, &["--format=rules", "--pod=db-0"]);
    assert!(
        only.contains("shop/db-0") && !only.contains("web-0"),
        "{only}"
    );
}

#[test]
fn forms_that_other_programs_read_are_about_one_node() {
    for format in ["--format=nft", "--format=acl", "--format=sessions"] {
        fails(CLUSTER, &[format], &["--node", "one, two"]);
        assert!(!prints(CLUSTER, &[format, "--node=one"]).is_empty());
        assert!(!prints(CLUSTER, &[format, "--pod=shop/web-0"]).is_empty());
    }
    let nft = prints(CLUSTER, &["--format=nft", "--node=one"]);
    assert!(
        nft.starts_with("table inet holdfast_policies_v1 {"),
        "{nft}"
    );
    let acl = prints(CLUSTER, &["--format=acl", "--node=one", "-o=json"]);
    let acl: serde_json::Value = serde_json::from_str(&acl).expect("JSON");
    assert_eq!(acl["acls"].as_array().map(Vec::len), Some(3));
}

#[test]
fn a_packet_is_judged_by_every_rendering() {
    let packet = ["--pod=web-0", "--to=db-0", "--port=5432"];
    let passes = prints(CLUSTER, &packet);
    let first = "shop/web-0 (10.1.0.1) to shop/db-0 (10.1.0.2), 5432/TCP: passes\n";
    assert!(passes.starts_with(first), "{passes}");
    for rendering in ["reading", "rules", "nft", "tables", "acl", "sessions"] {
        assert!(
            passes.contains(&format!("passes   {rendering}")),
            "{passes}"
        );
    }
    let dropped = prints(
        CLUSTER,
        &["--pod=web-0", "--to=192.0.2.1", "--port=443/TCP"],
    );
    assert!(dropped.contains("443/TCP: is dropped"), "{dropped}");
    assert!(dropped.contains("NetworkPolicy/shop/web"), "{dropped}");
}

#[test]
fn errors_name_the_remedy() {
    let policy = CLUSTER.split("---").last().expect("a document");
    fails(policy, &["--format=rules"], &["no Pod", "kubectl get"]);
    fails(
        CLUSTER,
        &["--format=rules", "--node=three"],
        &["--node three", "one, two"],
    );
    fails(
        CLUSTER,
        &["--format=rules", "--pod=shop/no"],
        &["--pod shop/no", "shop/db-0"],
    );
    let elsewhere = ["--format=rules", "--pod=web-0", "--node=two"];
    fails(CLUSTER, &elsewhere, &["runs on node one"]);
    let sessions = ["--format=sessions", "--node=one"];
    for (port, reason) in [
        ("{protocol: SCTP, port: 5432}", "SCTP"),
        ("{port: 1, endPort: 1025}", "1,024"),
    ] {
        let text = CLUSTER.replace("{port: sql}", port);
        let field = "NetworkPolicy/shop/web spec.egress[0].ports[0]";
        fails(&text, &sessions, &[field, reason, "ACLs"]);
    }
    let text = CLUSTER.replace("10.1.0.1", "2001:db8::1");
    fails(&text, &sessions, &["pod shop/web-0", "IPv4 only"]);
    fails(
        CLUSTER,
        &["--format=nft", "--node=one", "-o=json"],
        &["-o json"],
    );
}

#[test]
fn an_empty_export_says_so_and_prints_nothing() {
    let pods = CLUSTER.rsplit_once("---").expect("documents").0;
    for format in ["--format=acl", "--format=sessions"] {
        let output = run(pods, &[format, "--node=one"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        assert!(output.stdout.is_empty(), "{output:?}");
        assert!(error.contains("nothing to export"), "{error}");
        let json = prints(pods, &[format, "--node=one", "-o=json"]);
        assert!(json.contains("[]"), "{json}");
    }
}

#[test]
fn the_lists_of_one_pod_name_no_other_and_say_that_they_are_a_part() {
    let one_node = CLUSTER.replace("nodeName: two", "nodeName: one");
    let output = run(&one_node, &["--format=acl", "--pod=db-0"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("of one pod"), "{error}");
    let lists = String::from_utf8_lossy(&output.stdout);
    assert!(lists.contains("pod:shop/db-0"), "{lists}");
    assert!(!lists.contains("pod:shop/web-0"), "{lists}");
    assert!(!lists.contains("node-output"), "{lists}");
}

#[test]
fn objects_that_mean_nothing_are_left_out_and_unknown_policies_are_not() {
    let deployment =
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d, namespace: shop}\nspec: {}\n";
    let output = run(&format!("{CLUSTER}---\n{deployment}"), &["--format=rules"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(error.contains("1 document is of kinds"), "{error}");
    let misspelt = CLUSTER.replace("kind: NetworkPolicy", "kind: NetworkPolcy");
    fails(&misspelt, &["--format=rules"], &["NetworkPolcy"]);
}

#[test]
fn a_form_is_required_and_flags_without_effect_are_refused() {
    for (flags, names) in [
        (&[][..], &["--format", "--to"][..]),
        (
            &["--format=rules", "--node-output-interface=up"],
            &["needs --format acl"],
        ),
        (
            &["--format=nft", "--node=one", "--nat-loopback=10.0.0.1"],
            &["--nat-loopback"],
        ),
        (
            &["--pod=web-0", "--to=db-0", "--port=80", "--node=one"],
            &["--node"],
        ),
    ] {
        let output = run(CLUSTER, flags);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{flags:?}");
        for name in names {
            assert!(error.contains(name), "{flags:?}: no {name} in: {error}");
        }
    }
    let help = run(CLUSTER, &["--help"]);
    let help = String::from_utf8_lossy(&help.stdout);
    assert!(
        help.contains("<--format <FORMAT>|--to <DESTINATION>>"),
        "{help}"
    );
}
