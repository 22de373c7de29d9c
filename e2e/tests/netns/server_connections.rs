//! A pod that sends each query over a TCP connection of its own uses up no ports of the node: other
//! pods' queries over TCP to the same server are answered.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, Lab, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{Query, with_lab};

/// Number of the node's ports for connections to one server: few, so that the attack takes seconds.
const PORTS: u64 = 600;
/// Number of connections of the attacker to each server, with one query each.
const CONNECTIONS: u64 = 3 * PORTS;
/// Number of queries of the victim over TCP.
const VICTIM: usize = 50;
/// Number of threads of the attacker that send queries at the same time.
const THREADS: usize = 4;
/// Number of the state TIME_WAIT in `/proc/net/tcp`.
const TIME_WAIT: &str = "06";
/// Maximum number of closed connections to servers, of all pods, that still have their ports.
const MOST_CLOSED: usize = 50;

#[test]
fn connections_of_one_pod_take_no_ports_from_another() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.node.sysctl(&[(
            "net.ipv4.ip_local_port_range",
            &format!("40000 {}", 40_000 + PORTS - 1),
        )])?;
        let _programs = lab.start(&good_names())?;
        lab.add_endpoint(&lab.b, WEB)?;
        for server in [DNS4, DNS6] {
            let query = Query::a("www.good.test", server).tcp();
            lab.a.ask(&query)?.expect(web4(10))?;
            lab.b.ask(&query)?.expect(web4(10))?;

            let (stop, made, failed) =
                (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
            let right = std::thread::scope(|scope| -> Result<usize> {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        let attack = || {
                            while !stop.load(Ordering::Relaxed) {
                                let answered =
                                    query.send().and_then(|reply| reply.expect(web4(10)));
                                failed.fetch_add(answered.is_err().into(), Ordering::Relaxed);
                                made.fetch_add(1, Ordering::Relaxed);
                            }
                        };
                        lab.b.netns.enter(attack)
                    });
                }
                holdfast_e2e::eventually("many connections", Duration::from_secs(60), || {
                    let made = made.load(Ordering::Relaxed);
                    ensure!(made >= CONNECTIONS, "{made} connections");
                    Ok(())
                })
                .inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
                let answered = |_: &usize| {
                    let reply = lab.a.ask(&query);
                    reply.and_then(|reply| reply.expect(web4(10))).is_ok()
                };
                let right = (0..VICTIM).filter(answered).count();
                stop.store(true, Ordering::Relaxed);
                Ok(right)
            })?;
            let closed = closed(lab)?;
            println!(
                "{server}: attacker {made:?}, {failed:?} without an answer; victim {right} of \
                 {VICTIM}; {closed} in TIME_WAIT"
            );
            ensure!(
                right == VICTIM,
                "the victim got {right} of {VICTIM} answers"
            );
            ensure!(closed <= MOST_CLOSED, "{closed} sockets in TIME_WAIT");
            let failed = failed.load(Ordering::Relaxed);
            ensure!(
                failed == 0,
                "{failed} queries of the attacker had no answer"
            );
        }
        Ok(())
    });
}

/// Number of the node's connections to port 53 in state TIME_WAIT.
fn closed(lab: &Lab) -> Result<usize> {
    let read = || -> Result<usize> {
        let mut closed = 0;
        for table in ["tcp", "tcp6"] {
            let path = format!("/proc/thread-self/net/{table}");
            let text = std::fs::read_to_string(&path).context(path)?;
            let lines = text.lines().map(|line| line.split_whitespace());
            let of_state = lines.filter_map(|mut line| Some((line.nth(2)?, line.next()?)));
            closed += of_state
                .filter(|(remote, state)| remote.ends_with(":0035") && *state == TIME_WAIT)
                .count();
        }
        Ok(closed)
    };
    lab.node.enter(read)?
}
