//! A killed process leaves the table in force, and the next one finds it equal.

use anyhow::{Result, ensure};
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

        // A stop leaves it as well, unless it is asked to.
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
fn a_start_with_policies_that_are_too_large_keeps_the_table_of_the_last_run() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        let netpol = lab.start_netpol(&[])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        netpol.kill_9()?;
        let before = lab.netpol_table()?;
        // More peers than the table may have rules.
        let peers: Vec<_> = (0..20_001)
            .map(|n| json!({"podSelector": of(&n.to_string())}))
            .collect();
        lab.write_network_policy(
            "a",
            &json!({"podSelector": of("a"), "ingress": [{"from": peers}]}),
        )?;
        let netpol = lab.begin_netpol(&[])?;
        status_has(lab, &["no: see PROBLEM", "at most 20000"])?;
        ensure!(lab.netpol_table()? == before, "the table changed");
        reaches(&lab.a, &both(&lab.b, PORT), false)?;

        lab.remove_policy("policy-a.json")?;
        status_has(lab, &["Ready            yes"])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        drop(netpol);
        Ok(())
    });
}
