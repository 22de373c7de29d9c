//! The agent's network configuration follows the base, survives a base that is damaged, and
//! `cleanup` leaves the base working.
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::cri::{Base, CriNode, PodName, SUBNET, Sent, describe, only_allowed_server};
use holdfast_e2e::{Lab, config, eventually, shell, until, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

/// Waits until the agent's configuration is one that `wanted` accepts.
fn follows(node: &CriNode<'_>, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<()> {
    let begin = Instant::now();
    until(
        what,
        SOON,
        || Ok(node.own()),
        |own| own.as_ref().is_some_and(&wanted),
    )?;
    println!("{what}: after {:?}", begin.elapsed());
    Ok(())
}

fn reports(lab: &Lab, problem: &str) -> Result<()> {
    until(
        "status reports the problem",
        SOON,
        || lab.agent(&["status"]),
        |status| status.contains("CNI: ") && status.contains(problem),
    )?;
    Ok(())
}

fn reports_none(lab: &Lab) -> Result<()> {
    let status = || lab.agent(&["status"]);
    until("status reports no problem of CNI", SOON, status, |status| {
        !status.contains("CNI: ")
    })?;
    Ok(())
}

/// A routed network with a further plugin.
fn with_tuning(name: &str, subnet: &str) -> Value {
    let tuning = json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "512"}});
    json!({"cniVersion": "1.0.0", "name": name, "plugins": [Base::Ptp.plugin(subnet), tuning]})
}

fn has_tuning(list: &Value) -> bool {
    let plugins = list["plugins"].as_array();
    plugins.is_some_and(|plugins| plugins.iter().any(|plugin| plugin["type"] == "tuning"))
}

#[test]
fn the_agents_configuration_follows_the_base_and_survives_a_damaged_one() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let pods: Vec<PodName> = ["p", "q", "r", "s", "t", "u"].map(PodName::new).into();
        describe(lab, &pods)?;
        let sent = Sent::watch(lab)?;
        let _agent = node.start_agent("routed")?;
        let mut names = pods.iter();
        let mut judged = || -> Result<String> {
            let sandbox = node.run(names.next().context("a further pod")?)?;
            sent.expect_judged(sandbox.address())?;
            Ok(sandbox.id)
        };
        let first = judged()?;

        node.write_base(&with_tuning("routed", SUBNET).to_string())?;
        follows(&node, "a further plugin of the base", has_tuning)?;
        // The base's file is cut off, then empty, then missing: pods still start, under policy.
        let whole = node.own();
        node.write_base(r#"{"cniVersion": "1.0.0", "name": "routed", "plugins": [{"ty"#)?;
        reports(lab, "10-base.conflist is not JSON")?;
        let while_torn = judged()?;
        node.write_base("")?;
        reports(lab, "10-base.conflist is not JSON")?;
        node.remove_base()?;
        reports(lab, "has no CNI configuration")?;
        ensure!(node.own() == whole, "ours changed: {:?}", node.own());
        judged()?;
        node.write_base(&with_tuning("routed", SUBNET).to_string())?;
        reports_none(lab)?;

        // Another program changes the agent's configuration.
        let mut foreign = whole.context("ours")?;
        foreign["name"] = json!("foreign");
        node.write_own(&foreign.to_string())?;
        follows(&node, "our file with another name", |own| {
            own["name"] == "routed"
        })?;
        node.uses("routed", true)?;
        node.remove_own()?;
        follows(&node, "our file, deleted", |_| true)?;
        // The base is another network. Pods of the old network can still end.
        node.write_base(&with_tuning("other", "10.98.0.0/24").to_string())?;
        follows(&node, "another network", |own| own["name"] == "other")?;
        node.uses("other", true)?;
        judged()?;
        node.stop(&first)?;
        node.stop(&while_torn)?;

        // The base is a single plugin in place of a list.
        let mut single = Base::Ptp.plugin("10.97.0.0/24");
        single["name"] = json!("single");
        single["cniVersion"] = json!("0.2.0");
        node.remove_base()?;
        node.write("20-single.conf", &single.to_string())?;
        follows(&node, "a single plugin", |own| own["name"] == "single")?;
        node.uses("single", true)?;
        judged()?;
        node.write_base(&Base::Ptp.conflist().to_string())?;
        node.uses("routed", true)?;

        // A configuration that runtimes prefer, because its name sorts first.
        node.write(
            "00-first.conflist",
            &with_tuning("first", SUBNET).to_string(),
        )?;
        reports(lab, "00-first.conflist sorts before 05-holdfast.conflist")?;
        node.remove("00-first.conflist")?;
        reports_none(lab)?;
        node.uses("routed", true)?;
        judged()?;
        Ok(())
    });
}

#[test]
fn a_directory_that_is_read_only_is_reported_with_the_flag_and_written_later() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        let mount = |arguments: &[&str]| shell::finish(node.command("mount").args(arguments));
        let directories = [node.bin_dir(), node.conf_dir()];
        let [bin, conf] = &directories;
        for directory in [bin, conf].map(|path| path.to_str()) {
            let directory = directory.context("a path that is not UTF-8")?;
            mount(&["--bind", directory, directory])?;
            mount(&["-o", "remount,bind,ro", directory])?;
        }
        let _agent = lab.start_agent(&node.agent_options())?;
        reports(
            lab,
            "bin/holdfast-cni: Read-only file system (os error 30); correct --cni-bin-dir",
        )?;
        shell::finish(node.command("umount").arg(bin))?;
        reports(
            lab,
            "05-holdfast.conflist: Read-only file system (os error 30); correct --cni-conf-dir",
        )?;
        ensure!(node.own().is_none(), "ours is there");
        node.uses("routed", false)?;
        shell::finish(node.command("umount").arg(conf))?;
        node.uses("routed", true)?;
        reports_none(lab)
    });
}

#[test]
fn after_cleanup_pods_start_on_the_base_and_pods_of_before_can_end() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let pods = ["p", "q"].map(PodName::new);
        describe(lab, &pods)?;
        let sent = Sent::watch(lab)?;
        let agent = node.start_agent("routed")?;
        let [p, q] = &pods;
        let [p, q] = [node.run(p)?, node.run(q)?];
        sent.expect_judged(p.address())?;
        sent.expect_judged(q.address())?;
        let status = agent.terminate(SOON)?;
        ensure!(status.success(), "the agent: {status}");
        sent.expect_judged(p.address())?;
        let program = config::program("holdfast-agent")?;
        let mut cleanup = node.command(program.to_str().context("a path that is not UTF-8")?);
        cleanup.arg("cleanup").arg("--bpf-root").arg(lab.bpf_root());
        cleanup
            .arg("--state-dir")
            .arg(lab.directory().join("state"));
        cleanup.arg("--cni-conf-dir").arg(node.conf_dir());
        shell::finish(&mut cleanup)?;
        ensure!(node.own().is_none(), "our configuration is left");
        ensure!(node.has_plugin("holdfast-cni"), "the plugin is gone");
        node.uses("routed", false)?;
        // After the cleanup, the older pods are open, and can end.
        sent.expect_open(p.address())?;
        node.stop(&q.id)?;
        let new = node.run(&PodName::new("new"))?;
        sent.expect_open(new.address())?;
        node.stop(&p.id)?;
        node.stop(&new.id)?;
        eventually("addresses are free again", SOON, || {
            let leases = node.leases()?;
            ensure!(leases.is_empty(), "{leases:?}");
            Ok(())
        })
    });
}
