//! While no agent answers, no pod starts, and running pods stay under policy and can end. A node
//! that was rebooted is closed until its agent is ready.
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use holdfast_e2e::cri::{
    Base, CriNode, PodName, Sandbox, Sent, describe, endpoints, only_allowed_server,
};
use holdfast_e2e::{Lab, Program, eventually, until, with_lab};

/// Longest wait until all pods run that start at the same time.
const AT_ONCE: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(30);

/// Starts a pod while no agent runs, then starts the agent. Returns the pod and the agent.
fn start_while_away(node: &CriNode<'_>, sent: &Sent, pod: &PodName) -> Result<(Sandbox, Program)> {
    let leases = node.leases()?;
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| {
            let started = node.run(pod);
            (started, Instant::now())
        });
        until(
            "the pod has an address and waits",
            SOON,
            || node.leases(),
            |now| now.len() > leases.len(),
        )?;
        let before = sent.senders();
        let agent = node.start_agent(Base::Ptp.name())?;
        let ready = Instant::now();
        let (started, at) = starting
            .join()
            .map_err(|_| anyhow!("the runtime panicked"))?;
        println!(
            "the pod started {:?} after the agent was ready",
            at.saturating_duration_since(ready)
        );
        let sandbox = started?;
        ensure!(
            !before.contains(&sandbox.address()),
            "the pod ran before the agent was there"
        );
        sent.expect_judged(sandbox.address())?;
        Ok((sandbox, agent))
    })
}

fn keys(pods: &[&Sandbox]) -> BTreeSet<String> {
    let key = |pod: &&Sandbox| format!("cni/{}/eth0", pod.id);
    pods.iter().map(key).collect()
}

#[test]
fn without_an_agent_no_pod_starts_and_pods_that_run_stay_under_policy_and_can_end() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let pods = ["p", "q", "r"].map(PodName::new);
        describe(lab, &pods)?;
        let [p, q, r] = &pods;
        let sent = Sent::watch(lab)?;
        let agent = node.start_agent(Base::Ptp.name())?;
        let p = node.run(p)?;
        let r = node.run(r)?;
        sent.expect_judged(r.address())?;
        agent.kill_9()?;
        let text = std::thread::scope(|scope| {
            let failing = scope.spawn(|| node.run_fails(q));
            // Meanwhile a pod ends, and the other one stays under policy.
            node.stop(&r.id)?;
            sent.expect_judged(p.address())?;
            failing
                .join()
                .map_err(|_| anyhow!("the runtime panicked"))?
        })?;
        println!("{text}");
        for wanted in [
            "holdfast-agent does not answer on",
            "the pod starts when it is back",
        ] {
            ensure!(text.contains(wanted), "no {wanted:?} in: {text}");
        }
        let known = BTreeSet::from([p.address(), r.address()]);
        let senders: BTreeSet<IpAddr> = sent.senders().into_iter().collect();
        ensure!(senders == known, "{senders:?} sent, but {known:?} ran");
        sent.expect_judged(p.address())?;
        let (q, _agent) = start_while_away(&node, &sent, &q.again())?;
        sent.expect_judged(p.address())?;
        let expected = keys(&[&p, &q]);
        until(
            "only the pods that run have endpoints",
            SOON,
            || Ok(endpoints(lab)?.into_iter().collect::<BTreeSet<_>>()),
            |found| *found == expected,
        )?;
        Ok(())
    });
}

#[test]
fn pods_start_and_are_judged_although_the_agent_is_killed_while_they_start() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let pods: Vec<PodName> = (0..6).map(|n| PodName::new(&format!("p{n}"))).collect();
        describe(lab, &pods)?;
        let sent = Sent::watch(lab)?;
        let agent = node.start_agent(Base::Ptp.name())?;
        let (started, _agent) = std::thread::scope(|scope| {
            let starting = scope.spawn(|| node.run_at_once(&pods, AT_ONCE));
            // Some pods wait for the agent, and at most one is under policy.
            let wait = until("pods wait", SOON, || node.leases(), |now| now.len() >= 3);
            let agent = wait
                .and_then(|_| agent.kill_9())
                .and_then(|()| node.start_agent(Base::Ptp.name()));
            let started = starting
                .join()
                .map_err(|_| anyhow!("the client panicked"))?;
            Ok::<_, anyhow::Error>((started?, agent?))
        })?;
        for one in &started {
            sent.expect_judged(one.sandbox.address())?;
        }
        let sandboxes: Vec<&Sandbox> = started.iter().map(|one| &one.sandbox).collect();
        let expected = keys(&sandboxes);
        until(
            "only the pods that run have endpoints",
            SOON,
            || Ok(endpoints(lab)?.into_iter().collect::<BTreeSet<_>>()),
            |found| *found == expected,
        )?;
        let open: Vec<IpAddr> = sent.senders();
        let known: Vec<IpAddr> = sandboxes.iter().map(|one| one.address()).collect();
        ensure!(
            open.iter().all(|from| known.contains(from)),
            "{open:?} sent, but {known:?} run"
        );
        Ok(())
    });
}

/// Removes what an agent loses in a reboot: pins, and everything below `/run`.
fn forget(lab: &Lab) -> Result<()> {
    let empty = |dir: &Path| -> Result<()> {
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            match path.is_dir() {
                true => std::fs::remove_dir_all(&path),
                false => std::fs::remove_file(&path),
            }
            .with_context(|| path.display().to_string())?;
        }
        Ok(())
    };
    empty(lab.bpf_root())?;
    empty(&lab.directory().join("state"))?;
    empty(&lab.directory().join("run"))
}

#[test]
fn a_node_that_was_rebooted_is_closed_until_its_agent_is_ready() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Ptp)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let pod = PodName::new("p");
        describe(lab, std::slice::from_ref(&pod))?;
        let sent = Sent::watch(lab)?;
        let agent = node.start_agent(Base::Ptp.name())?;
        let old = node.run(&pod)?;
        sent.expect_judged(old.address())?;
        agent.kill_9()?;
        node.reboot()?;
        forget(lab)?;
        sent.clear();
        ensure!(node.own().is_some(), "the configuration is gone");
        node.uses(Base::Ptp.name(), true)?;
        let (new, _agent) = start_while_away(&node, &sent, &pod.again())?;
        ensure!(
            sent.senders() == [new.address()],
            "another one sent: {:?}",
            sent.senders()
        );
        // The kubelet removes the sandbox from before the reboot.
        node.stop(&old.id)?;
        let expected = keys(&[&new]);
        eventually("one endpoint", SOON, || {
            let found: BTreeSet<String> = endpoints(lab)?.into_iter().collect();
            ensure!(found == expected, "{found:?}");
            Ok(())
        })?;
        sent.expect_judged(new.address())
    });
}
