//! A killed process leaves the table in force, and the next one finds it equal.

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::netpol_run::NETPOL_METRICS;
use holdfast_e2e::{Lab, eventually, with_lab};
use serde_json::json;

use super::{PORT, Pods, SOON, both, of, reaches, status_has};

fn changes(lab: &Lab) -> Result<f64> {
    lab.metric(
        NETPOL_METRICS,
        "holdfast_netpol_commits_total",
        "outcome=\"changed\"",
    )
}

#[test]
fn a_killed_process_changes_nothing_and_its_successor_writes_nothing() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let from_a = json!({
            "podSelector": of("b"),
            "ingress": [{"from": [{"podSelector": of("a")}], "ports": [{"port": PORT}]}],
        });
        lab.write_network_policy("b", &from_a)?;
        let netpol = lab.start_netpol(&[])?;
        eventually("both interfaces are known", SOON, || {
            let table = lab.netpol_table()?;
            ensure!(table.contains(&lab.a.host_side), "{table}");
            Ok(())
        })?;
        let before = lab.netpol_table()?;
        let stream = lab.a.stream(both(&lab.b, PORT)[0])?;
        netpol.kill_9()?;
        ensure!(lab.netpol_table()? == before, "the table changed");
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        stream.expect_alive()?;

        let netpol = lab.start_netpol(&[])?;
        ensure!(lab.netpol_table()? == before, "the table changed");
        ensure!(changes(lab)? < 0.5, "it was written");
        stream.expect_alive()?;

        // A change of the documents while no process runs.
        netpol.kill_9()?;
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        let netpol = lab.start_netpol(&[])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;

        // A stop leaves the table as well, unless `--flush-on-exit` is set.
        ensure!(netpol.terminate(SOON)?.success(), "exit code");
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        let netpol = lab.start_netpol(&["--flush-on-exit"])?;
        ensure!(netpol.terminate(SOON)?.success(), "exit code");
        ensure!(lab.netpol_table().is_err(), "the table is there");
        reaches(&lab.a, &both(&lab.b, PORT), true)
    });
}

#[test]
fn a_refused_document_at_the_start_keeps_the_last_table() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        let netpol = lab.start_netpol(&[])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        netpol.kill_9()?;
        // Neither the document nor its last good version can be read.
        lab.write_policy(
            "policy-b.json",
            "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, \
            metadata: {name: b, namespace: default}, spec: {podSelector: {}, ingres: []}}",
        )?;
        std::fs::remove_dir_all(lab.directory().join("netpol"))?;
        let _netpol = lab.begin_netpol(&[])?;
        super::status_has(
            lab,
            &[
                "the table of the last run stays",
                "spec.ingres",
                "is an unknown field",
            ],
        )?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        lab.remove_policy("policy-b.json")?;
        reaches(&lab.a, &both(&lab.b, PORT), true)
    });
}

#[test]
fn a_policy_that_is_too_large_is_set_aside_and_the_others_change() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let closed = json!({"podSelector": of("b"), "ingress": []});
        lab.write_network_policy("b", &closed)?;
        let netpol = lab.start_netpol(&[])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        reaches(&lab.b, &both(&lab.a, PORT), true)?;
        netpol.kill_9()?;
        // More peers than the table may have rules.
        let peers: Vec<_> = (0..20_001)
            .map(|n| json!({"podSelector": of(&n.to_string())}))
            .collect();
        lab.write_network_policy(
            "a",
            &json!({"podSelector": of("a"), "ingress": [{"from": peers}]}),
        )?;
        let _netpol = lab.start_netpol(&[])?;
        let problem = "NetworkPolicy/default/a is set aside";
        status_has(lab, &["Ready            yes", problem, "40002 rules"])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        reaches(&lab.b, &both(&lab.a, PORT), false)?;
        // `why` exits with 1, because policy denies the connection.
        let why = lab.netpol(&["why", "default/b", "default/a", "--port", &PORT.to_string()]);
        let why = format!("{:#}", why.err().context("it is denied")?);
        ensure!(
            why.contains("NetworkPolicy/default/a is set aside"),
            "{why}"
        );
        let metric = "holdfast_netpol_set_aside_policies";
        ensure!(lab.metric(NETPOL_METRICS, metric, "")? > 0.5, "the metric");

        // A change of another policy is in force.
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": [{}]}))?;
        reaches(&lab.a, &both(&lab.b, PORT), true)?;
        lab.write_network_policy("b", &closed)?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;

        lab.write_network_policy(
            "a",
            &json!({"podSelector": of("a"), "ingress": [{"from": [{"podSelector": of("b")}]}]}),
        )?;
        reaches(&lab.b, &both(&lab.a, PORT), true)?;
        eventually("nothing is set aside", SOON, || {
            let status = lab.netpol(&["status"])?;
            ensure!(!status.contains("set aside"), "{status}");
            Ok(())
        })
    });
}
