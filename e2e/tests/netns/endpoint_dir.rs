//! Endpoints by file: added, relabelled and removed while the agent runs.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, Lab, at, web4};
use holdfast_e2e::policy::{CLIENT, WEB, cidr, egress, good_names};
use holdfast_e2e::{AgentOptions, Pod, Query, SdpOptions, eventually, with_lab};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(20);

fn document(netns: &str, labels: &str) -> String {
    format!("netns: {netns}\nlabels: [{labels}]\n---\n")
}

/// Writes the only endpoint file at once, as `Lab::write_policy` does.
fn write(lab: &Lab, text: &str) -> Result<()> {
    let new = lab.directory().join("pods.new");
    std::fs::write(&new, text)?;
    std::fs::rename(&new, lab.directory().join("endpoints/pods.yaml"))?;
    Ok(())
}

/// Keys and reasons of the documents that are not in force.
fn unresolved(lab: &Lab) -> Result<Vec<(String, String)>> {
    let status = lab.agent_json(&["status"])?;
    let list = status
        .get("endpoints_unresolved")
        .and_then(Value::as_array)
        .with_context(|| format!("no endpoints_unresolved: {status}"))?;
    let text = |item: &Value, key| item.get(key).and_then(Value::as_str).map(str::to_owned);
    list.iter()
        .map(|item| Some((text(item, "key")?, text(item, "reason")?)))
        .collect::<Option<_>>()
        .context("key and reason")
}

/// The pod's entry of `cilium_lxc` in the kernel.
fn lxc(lab: &Lab, pod: &Pod) -> Result<Option<Value>> {
    let own = Value::String(pod.v4.to_string());
    let list = lab.bpf_json(&["lxc", "list"])?;
    let list = list.as_array().context("no list")?;
    Ok(list
        .iter()
        .find(|entry| entry.get("address") == Some(&own))
        .cloned())
}

#[test]
fn files_add_change_and_remove_endpoints() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let client = egress("client", "client", &cidr("203.0.113.12/32"));
        lab.write_policy("client.yaml", &client)?;
        let (a, b) = (lab.a.netns.name(), lab.b.netns.name());
        // One of the three pods does not exist, and another document is not an endpoint.
        let absent = document("hf-e2e-absent", WEB);
        let wrong = "netns: somewhere\nlabels: []\n---\n";
        write(lab, &(absent.clone() + &document(a, WEB) + wrong))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;

        let id = lab.endpoint_id(&lab.a)?;
        lab.proxies_in_step()?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_refused()?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.b.expect_open(at(web4(11), 80))?;
        let problems = unresolved(lab)?;
        let [(missing, why), (empty, what)] = &problems[..] else {
            panic!("two documents are not in force: {problems:?}");
        };
        assert_eq!(
            (&missing[..], &empty[..]),
            ("dir/pods.yaml", "dir/pods.yaml#3")
        );
        assert!(why.contains("hf-e2e-absent"), "{why}");
        assert!(what.contains("labels"), "{what}");

        // Added: the second pod replaces the absent one.
        write(lab, &(document(b, CLIENT) + &document(a, WEB)))?;
        lab.endpoint_id(&lab.b)?;
        // Nothing passes until the pod's programs are attached.
        eventually("the added pod is under policy", SOON, || {
            lab.b.expect_closed(at(web4(11), 80))?;
            lab.b.expect_open(at(web4(12), 80))
        })?;
        assert_eq!(unresolved(lab)?, [], "nothing is missing any more");
        lab.a.expect_open(at(web4(10), 80))?;

        // Relabelled: the pod gets the other policy and keeps its number.
        let stream = lab.a.stream(at(web4(10), 80))?;
        let before = lxc(lab, &lab.a)?.context("pod a is in the map")?;
        write(lab, &(document(b, CLIENT) + &document(a, CLIENT)))?;
        eventually("the new labels count", SOON, || {
            lab.a.expect_open(at(web4(12), 80))
        })?;
        lab.a.expect_closed(at(web4(10), 80))?;
        stream.expect_cut(SOON)?;
        assert_eq!(lab.endpoint_id(&lab.a)?, id);
        let after = lxc(lab, &lab.a)?.context("pod a is in the map")?;
        assert_eq!(after.get("endpoint"), before.get("endpoint"));
        assert_ne!(after.get("identity"), before.get("identity"));

        // Unreadable: the last contents stay in force.
        write(lab, "netns: [")?;
        eventually("the broken file is reported", SOON, || {
            ensure!(!unresolved(lab)?.is_empty(), "not yet");
            Ok(())
        })?;

        // Removed: only that endpoint is removed.
        write(lab, &document(a, CLIENT))?;
        eventually("the removed pod is free", SOON, || {
            lab.b.expect_open(at(web4(11), 80))
        })?;
        eventually("its entry is gone", SOON, || {
            ensure!(lxc(lab, &lab.b)?.is_none(), "still there");
            Ok(())
        })?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.a.expect_open(at(web4(12), 80))?;
        Ok(())
    });
}
