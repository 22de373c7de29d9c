//! ADD of the CNI plugin, with an agent in its own lab.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::cni::{Runtime, Sandbox};
use holdfast_e2e::lab::web4;
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually, policy};

use super::steps::print;

/// Last byte of the first pod's address, after the addresses of the lab's own pods.
const FIRST: u8 = 13;
/// Longest wait until all endpoints of a restarted agent are in force.
const SOON: Duration = Duration::from_secs(120);

/// Starts `one_by_one` pods one after the other, then `at_once` pods together, and then the agent
/// again.
pub(crate) fn measure(one_by_one: u8, at_once: u8) -> Result<()> {
    // Without the check of repairs, whose time limit fits labs with a few pods.
    let lab = &Lab::new()?;
    let rules = format!("- toCIDR: [\"{}/32\"]\n", web4(10));
    lab.write_policy("web.yaml", &policy::egress("web", "web", &rules))?;
    let agent = start(lab)?;
    let mut pods = Vec::new();
    for host in (FIRST..).take(usize::from(one_by_one) + usize::from(at_once)) {
        let name = format!("p{host}");
        pods.push((lab.add_pod(&name, host)?, name));
    }
    describe(lab, &pods)?;
    let sandboxes: Vec<Sandbox> = pods
        .iter()
        .map(|(pod, name)| Sandbox::new(pod, name))
        .collect();
    let runtime = Runtime::new(lab)?;
    let (first, rest) = sandboxes.split_at(usize::from(one_by_one));
    let add = |sandbox: &Sandbox| -> Result<Duration> {
        let begin = Instant::now();
        runtime.start(sandbox)?;
        Ok(begin.elapsed())
    };
    let mut taken: Vec<Duration> = first.iter().map(add).collect::<Result<_>>()?;
    print("ADD, one after the other", &mut taken);
    let begin = Instant::now();
    let mut taken = std::thread::scope(|scope| {
        let threads: Vec<_> = rest
            .iter()
            .map(|sandbox| scope.spawn(|| add(sandbox)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|taken| taken.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect::<Result<Vec<_>>>()
    })?;
    let all = begin.elapsed();
    print("ADD, all at once", &mut taken);
    println!("all at once: {:.2} s", all.as_secs_f64());

    drop(agent);
    let begin = Instant::now();
    let agent = start(lab)?;
    println!(
        "the agent again, ready: {:.2} s",
        begin.elapsed().as_secs_f64()
    );
    in_force(lab, sandboxes.len())?;
    println!("all in force: {:.2} s", begin.elapsed().as_secs_f64());
    drop(agent);
    Ok(())
}

fn start(lab: &Lab) -> Result<Program> {
    let socket = format!("--cni-socket={}", lab.cni_socket().display());
    lab.start_agent(&AgentOptions::default().flag(&socket))
}

fn describe(lab: &Lab, pods: &[(Pod, String)]) -> Result<()> {
    let documents: String = pods
        .iter()
        .map(|(_, name)| {
            format!(
                r"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default, uid: uid-{name}, labels: {{app: web}}}}
---
"
            )
        })
        .collect();
    lab.write_policy("pods.yaml", &documents)
}

fn in_force(lab: &Lab, count: usize) -> Result<()> {
    eventually("all endpoints are in force", SOON, || {
        let list = lab.agent_json(&["endpoint", "list"])?;
        let list = list.as_array().context("no list")?;
        let ready = list.iter().filter(|endpoint| endpoint["state"] == "ready");
        let ready = ready.count();
        ensure!(ready == count, "{ready} of {count}");
        Ok(())
    })
}
