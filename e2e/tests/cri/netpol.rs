//! Pods that containerd starts on a node with `netpol run` are under policy from their first packet on.
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::cri::{
    Base, CriNode, PodName, Sent, describe_on_node, only_allowed_server_by_address,
};
use holdfast_e2e::{Lab, config, until, with_lab};

/// Pods that start, one after another.
const PODS: u8 = 200;
const SOON: Duration = Duration::from_secs(30);

/// Documents as the API has them when a pod starts: without its address.
fn describe(lab: &Lab, pods: &[PodName]) -> Result<()> {
    let pods: Vec<_> = pods.iter().map(|pod| (pod.clone(), None)).collect();
    describe_on_node(lab, &pods)
}

/// Starts a pod while `netpol run` has no plugin: the probe receives what policy would stop.
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
        let _netpol = node.start_netpol(Base::Ptp.name())?;
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
