//! Pods that containerd starts are under policy from their first packet on, one after another and
//! many at once.
use std::time::{Duration, Instant};

use anyhow::Context;
use holdfast_e2e::cri::{Base, CriNode, PodName, Sent, describe, endpoints, only_allowed_server};
use holdfast_e2e::{config, until, with_lab};

/// Longest wait until all pods run that start at the same time.
const AT_ONCE: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(30);

fn names(count: u8) -> Vec<PodName> {
    (0..count).map(|n| PodName::new(&format!("p{n}"))).collect()
}

/// Prints the median and the 99th percentile.
fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |hundredths: usize| {
        let time = times.get((times.len() - 1) * hundredths / 100);
        time.copied().unwrap_or_default()
    };
    let (p50, p99) = (at(50), at(99));
    println!("{what}: {} times, p50 {p50:?}, p99 {p99:?}", times.len());
}

#[test]
fn a_pod_that_sends_at_once_is_judged_from_its_first_packet_on() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        println!("{}", node.version()?);
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let pods = names(config::cri_pods(20));
        describe(lab, &pods)?;
        let sent = Sent::watch(lab)?;
        // The probe receives datagrams that no policy stops.
        let open = node.run(&PodName::new("before"))?;
        sent.expect_open(open.address())?;
        let _agent = node.start_agent(Base::Ptp.name())?;
        let mut times = Vec::new();
        for pod in &pods {
            let begin = Instant::now();
            let sandbox = node.run(pod)?;
            times.push(begin.elapsed());
            sent.expect_judged(sandbox.address())
                .with_context(|| pod.name.clone())?;
            node.stop(&sandbox.id)?;
        }
        print_times("RunPodSandbox, one after another", times);
        until(
            "endpoints go with their pods",
            SOON,
            || endpoints(lab),
            Vec::is_empty,
        )?;
        Ok(())
    });
}

#[test]
fn pods_that_start_at_the_same_time_all_start_and_are_all_judged() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let pods = names(config::cri_pods(20));
        describe(lab, &pods)?;
        let sent = Sent::watch(lab)?;
        let _agent = node.start_agent(Base::Ptp.name())?;
        let started = node.run_at_once(&pods, AT_ONCE)?;
        let attempts: u32 = started.iter().map(|one| one.attempts).sum();
        println!("{} pods in {attempts} attempts", started.len());
        let times = started.iter().map(|one| one.after).collect();
        print_times("until a pod runs, all at once", times);
        for one in &started {
            sent.expect_judged(one.sandbox.address())?;
        }
        Ok(())
    });
}
