//! Pods that containerd starts are under policy from their first packet on, one after another and
//! many at once.
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use holdfast_e2e::cri::{Base, CriNode, PodName, Sent, describe, endpoints, only_allowed_server};
use holdfast_e2e::{config, until, with_lab};

const SOON: Duration = Duration::from_secs(30);

fn names(count: u8) -> Vec<PodName> {
    (0..count).map(|n| PodName::new(&format!("p{n}"))).collect()
}

/// Prints the median and the slowest but one in a hundred.
fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |hundredths: usize| times.get((times.len() - 1) * hundredths / 100);
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
        let begin = Instant::now();
        let started = std::thread::scope(|scope| {
            let start = |pod| {
                let node = &node;
                scope.spawn(move || Ok::<_, anyhow::Error>((node.run(pod)?, begin.elapsed())))
            };
            let starting: Vec<_> = pods.iter().map(start).collect();
            let started = starting.into_iter().map(|one| one.join());
            let started = started.map(|one| one.map_err(|_| anyhow!("the runtime panicked"))?);
            started.collect::<Result<Vec<_>>>()
        })?;
        let times = started.iter().map(|(_, took)| *took).collect();
        print_times("RunPodSandbox, all at once", times);
        for (sandbox, _) in &started {
            sent.expect_judged(sandbox.address())?;
        }
        Ok(())
    });
}
