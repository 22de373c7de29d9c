//! Pods that containerd starts on a node with `netpol run` are under policy from their first packet on.
use std::net::IpAddr;
use std::time::{Duration, Instant};

use agent_datapath::tracked;
use anyhow::{Context, Result, anyhow, ensure};
use holdfast_e2e::cri::{
    Base, CriNode, PodName, Sandbox, Sent, describe_on_node, only_allowed_server_by_address,
};
use holdfast_e2e::netpol_run::NETPOL_METRICS;
use holdfast_e2e::{Lab, Program, config, until, with_lab};

/// Number of pods that start, one after another.
const PODS: u8 = 200;
const SOON: Duration = Duration::from_secs(30);

/// Documents as the API has them when a pod starts: without its address.
fn describe(lab: &Lab, pods: &[PodName]) -> Result<()> {
    let pods: Vec<_> = pods.iter().map(|pod| (pod.clone(), None)).collect();
    describe_on_node(lab, &pods)
}

/// Starts a pod while `netpol run` has no plugin: the probe receives datagrams that policy would
/// stop.
fn starts_open_without_the_plugin(node: &CriNode<'_>, lab: &Lab, sent: &Sent) -> Result<()> {
    let netpol = lab.start_netpol(&[])?;
    let open = node.run(&PodName::new("before"))?;
    sent.expect_open(open.address())?;
    node.stop(&open.id)?;
    netpol.terminate(SOON).map(drop)
}

#[test]
fn no_first_packet_of_a_pod_passes() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        only_allowed_server_by_address(lab)?;
        let count = config::cri_pods(PODS);
        let mut pods: Vec<_> = (0..count).map(|n| PodName::new(&format!("p{n}"))).collect();
        pods.push(PodName::new("before"));
        describe(lab, &pods)?;
        pods.pop();
        let sent = Sent::watch(lab)?;
        starts_open_without_the_plugin(&node, lab, &sent)?;
        let _netpol = node.start_netpol(Base::Ptp.name(), &[])?;
        let mut times = Vec::new();
        for pod in &pods {
            let begin = Instant::now();
            let sandbox = node.run(pod)?;
            times.push(begin.elapsed());
            sent.expect_judged(sandbox.address())
                .with_context(|| pod.name.clone())?;
            node.stop(&sandbox.id)?;
        }
        times.sort_unstable();
        println!(
            "{} pods, RunPodSandbox p50 {:?}, all {:?}",
            times.len(),
            times.get(times.len() / 2),
            times.iter().sum::<Duration>()
        );
        let pods = || lab.netpol_json(&["pods"]);
        until("pods go with their interfaces", SOON, pods, |pods| {
            pods.as_array().is_some_and(Vec::is_empty)
        })?;
        ensure!(node.leases()?.is_empty(), "a pod is left");
        Ok(())
    });
}

/// Starts a pod while no `netpol run` runs, then starts `netpol run`.
fn start_while_away(node: &CriNode<'_>, sent: &Sent, pod: &PodName) -> Result<(Sandbox, Program)> {
    let leases = node.leases()?.len();
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| node.run(pod));
        let waits = || node.leases();
        until("the pod has an address and waits", SOON, waits, |now| {
            now.len() > leases
        })?;
        let before = sent.senders();
        let netpol = node.start_netpol(Base::Ptp.name(), &[])?;
        let started = starting
            .join()
            .map_err(|_| anyhow!("the client panicked"))?;
        let sandbox = started?;
        ensure!(
            !before.contains(&sandbox.address()),
            "the pod ran before `netpol run` was there"
        );
        sent.expect_judged(sandbox.address())?;
        Ok((sandbox, netpol))
    })
}

/// Tracked connections of an address.
fn connections_of(lab: &Lab, address: IpAddr) -> Result<usize> {
    let mut found = 0;
    lab.node.enter(|| {
        tracked::delete(|connection| {
            found += usize::from(connection.source == address);
            false
        })
    })??;
    Ok(found)
}

/// Addresses of the pods that `netpol run` restricts.
fn addresses(lab: &Lab) -> Result<Vec<String>> {
    let pods = lab.netpol_json(&["pods"])?;
    let pods = pods.as_array().context("no list")?.iter();
    let addresses = pods.filter_map(|pod| pod["addresses"][0][0].as_str());
    Ok(addresses.map(str::to_owned).collect())
}

#[test]
fn a_restart_before_documents_have_an_address_opens_nothing_and_ended_pods_are_forgotten() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        only_allowed_server_by_address(lab)?;
        let [p, q] = ["p", "q"].map(PodName::new);
        describe(lab, &[p.clone(), q.clone()])?;
        let sent = Sent::watch(lab)?;
        let netpol = node.start_netpol(Base::Ptp.name(), &[])?;
        let first = node.run(&p)?;
        sent.expect_judged(first.address())?;
        netpol.kill_9()?;
        sent.expect_judged(first.address())?;
        let (second, _netpol) = start_while_away(&node, &sent, &q)?;
        // The documents do not have the pods' addresses yet.
        sent.expect_judged(first.address())?;
        sent.expect_judged(second.address())?;
        let both = [(p, Some(first.address())), (q, Some(second.address()))];
        describe_on_node(lab, &both)?;
        sent.expect_judged(first.address())?;
        sent.expect_judged(second.address())?;
        ensure!(connections_of(lab, first.address())? > 0, "not tracked");
        node.stop(&first.id)?;
        until(
            "tracked connections end with their pod",
            SOON,
            || connections_of(lab, first.address()),
            |count| *count == 0,
        )?;
        // The document of the stopped pod has its address until the document changes.
        ensure!(addresses(lab)?.len() == 2, "{:?}", addresses(lab)?);
        let [_, second_only] = both;
        describe_on_node(lab, &[second_only])?;
        let left = vec![second.address().to_string()];
        until(
            "one pod is left",
            SOON,
            || addresses(lab),
            |now| *now == left,
        )?;
        sent.expect_judged(second.address())
    });
}

#[test]
fn a_pod_that_no_document_describes_does_not_start_and_pods_of_a_bridge_are_judged() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Bridge)?;
        only_allowed_server_by_address(lab)?;
        let pods = ["p", "q"].map(PodName::new);
        describe(lab, &pods)?;
        let sent = Sent::watch(lab)?;
        let bridge = |value| {
            let names = ["iptables", "ip6tables"];
            let names = names.map(|name| format!("net.bridge.bridge-nf-call-{name}"));
            lab.node.sysctl(&[(&names[0], value), (&names[1], value)])
        };
        bridge("0")?;
        let _netpol = node.start_netpol(Base::Bridge.name(), &[])?;
        let [p, q] = &pods;
        let (unknown, unset) = std::thread::scope(|scope| {
            let unset = scope.spawn(|| node.run_fails(p));
            let unknown = node.run_fails(&PodName::new("unknown"));
            let unset = unset.join().map_err(|_| anyhow!("the client panicked"));
            Ok::<_, anyhow::Error>((unknown?, unset??))
        })?;
        let wanted = "no Pod document of default/unknown has arrived";
        ensure!(unknown.contains(wanted), "{unknown}");
        let wanted = "net.bridge.bridge-nf-call-iptables is not 1";
        ensure!(unset.contains(wanted), "{unset}");
        ensure!(sent.senders().is_empty(), "{:?} ran", sent.senders());
        bridge("1")?;
        for pod in [&p.again(), q] {
            let (sandbox, _) = node.run_as_kubelet(pod, SOON)?;
            sent.expect_judged(sandbox.address())?;
        }
        let failures = lab.metric(
            NETPOL_METRICS,
            "holdfast_cni_add_failures_total",
            "reason=\"policy\"",
        )?;
        ensure!(failures >= 2.0, "{failures} failures");
        Ok(())
    });
}

#[test]
fn exports_follow_pods_of_the_plugin() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        only_allowed_server_by_address(lab)?;
        let pod = PodName::new("p");
        describe(lab, std::slice::from_ref(&pod))?;
        let exports = lab.directory().join("exports");
        std::fs::create_dir(&exports)?;
        let flag = format!("--vpp-export-dir={}", exports.display());
        let flags = [&flag, "--node-output-interface=uplink0"];
        let _netpol = node.start_netpol(Base::Ptp.name(), &flags)?;
        let text = || Ok(std::fs::read_to_string(exports.join("acl.txt"))?);
        let name = format!("{}/{}", pod.namespace, pod.name);
        until("the files are written", SOON, text, |text| {
            !text.contains(&name)
        })?;
        let sandbox = node.run(&pod)?;
        until("the pod is in the file", SOON, text, |text| {
            text.contains(&name)
        })?;
        node.stop(&sandbox.id)?;
        until("it is in no file", SOON, text, |text| !text.contains(&name)).map(drop)
    });
}
