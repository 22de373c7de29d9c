//! R2: a proxy that starts while the agent is down answers immediately.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::setup::{LEAVES, SERVER4, Setup};
use super::{FIRST_ANSWER, Row, Tally};
use crate::dns::probe::Query;
use crate::dns::server::DnsServer;
use crate::netns::Netns;
use crate::pod::Pod;
use crate::policy::{WEB, egress};
use crate::process::Program;
use crate::traffic::names as zone;
use crate::wait::eventually;

/// Promised time to the first right answer.
const PROMISED: Duration = Duration::from_millis(250);
/// Like [`PROMISED`], for debug builds in tests: shorter than the timeout of any step.
const UNDER_TEST: Duration = Duration::from_secs(1);
/// How long to wait for an answer before the next query is sent.
const NEXT_QUERY: Duration = Duration::from_millis(12);
const SERVER_LABELS: &str = "k8s:app=dns,k8s:io.kubernetes.pod.namespace=default";
/// The new address of the server pod.
const MOVED: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 24));
const MOVED_NAME: &str = "moved.good.test";

/// Times the first right answer for three queries: by a pod that sent queries before, by a pod that
/// never did, and to a DNS server whose pod has a new address.
pub(super) fn cold(setup: &Setup) -> Result<Vec<Row>> {
    let lab = &setup.lab;
    let agent = lab.start_agent(&setup.agent_options())?;
    let first = setup.replica(0)?;
    lab.add_endpoint(&lab.a, WEB)?;
    lab.add_endpoint(&lab.b, WEB)?;
    let asked = Query::a(&zone::name(1), SERVER4);
    eventually("an answer", LEAVES, || {
        lab.a.ask(&asked)?.expect(zone::v4(1).into())
    })?;
    let server = setup.clients().last().context("a pod to serve")?;
    let _server = move_server(setup, server)?;
    agent.kill_9()?;
    first.terminate(LEAVES)?;

    let moved = Query::a(MOVED_NAME, MOVED);
    let cases = [
        ("a pod that had asked", &lab.a, &asked, zone::v4(1)),
        ("a pod that never asked", &lab.b, &asked, zone::v4(1)),
        ("a server that had moved", &lab.a, &moved, zone::v4(2)),
    ];
    let mut rows = Vec::new();
    let mut number = 1;
    for (name, pod, query, address) in cases {
        let mut times = Vec::new();
        let mut wrong = 0;
        for _ in 0..setup.size.starts {
            let (took, others) = first_answer(setup, number, pod, query, address.into())?;
            number += 1;
            times.push(took);
            wrong += others;
        }
        let within = if setup.size.judges_times {
            PROMISED
        } else {
            UNDER_TEST
        };
        rows.push(row(name, &mut times, within, wrong));
    }
    Ok(rows)
}

fn row(name: &str, times: &mut [Duration], within: Duration, wrong: u64) -> Row {
    times.sort();
    let sent = times.len() as u64;
    let right = times.iter().filter(|took| **took < within).count() as u64;
    let ms = |at: Option<&Duration>| at.map_or(0, Duration::as_millis);
    let note = format!(
        "{sent} starts: {} ms at best, {} ms at worst",
        ms(times.first()),
        ms(times.last())
    );
    let tally = Tally {
        sent,
        right,
        wrong,
        lost: sent - right,
        slowest_ms: u64::try_from(ms(times.last())).unwrap_or(u64::MAX),
        ..Tally::default()
    };
    Row {
        name: name.to_owned(),
        promise: FIRST_ANSWER,
        sent,
        right,
        wrong,
        lost: tally.lost,
        // Other processes may use the machine, so one start within the limit is enough.
        holds: right > 0 && wrong == 0,
        note,
        udp: tally,
        tcp: Tally::default(),
        source_ports: 0,
        samples: Vec::new(),
    }
}

/// The pod of the DNS server gets another address and keeps its labels.
fn move_server(setup: &Setup, pod: &Pod) -> Result<DnsServer> {
    let lab = &setup.lab;
    let rules = r#"
- toEndpoints: [{matchLabels: {app: dns}}]
  toPorts:
  - ports: [{port: "53", protocol: ANY}]
    rules: {dns: [{matchPattern: "*.good.test"}]}
"#;
    lab.write_policy("server.yaml", &egress("server", "web", rules))?;
    // Another pod with the same labels keeps the identity alive when the old address is gone.
    let sibling = setup.clients().nth(2).context("a third pod")?;
    lab.add_endpoint(sibling, SERVER_LABELS)?;
    let before = lab.add_endpoint(pod, SERVER_LABELS)?;
    let identity = |id: u64| -> Result<Value> {
        let listing = lab.agent_json(&["endpoint", "list"])?;
        let all = listing.as_array().context("a list")?;
        let own = all.iter().find(|e| e.get("id") == Some(&id.into()));
        let own = own.and_then(|e| e.get("identity"));
        own.cloned()
            .with_context(|| format!("no identity: {listing}"))
    };
    let identity_before = identity(before)?;
    lab.agent(&["endpoint", "remove", &before.to_string()])?;
    let old = pod.v4;
    pod.netns.batch(&format!(
        "address add {MOVED}/32 dev eth0\naddress del {old}/32 dev eth0"
    ))?;
    lab.node.batch(&format!(
        "route add {MOVED}/32 dev {0}\nroute del {old}/32 dev {0}",
        pod.host_side
    ))?;
    let IpAddr::V4(v4) = MOVED else {
        anyhow::bail!("the new address is IPv4")
    };
    let moved = Pod {
        netns: Netns::existing(pod.netns.name()),
        v4,
        v6: pod.v6,
        host_side: pod.host_side.clone(),
        answers: Default::default(),
    };
    let id = lab.add_endpoint(&moved, SERVER_LABELS)?;
    ensure!(identity(id)? == identity_before, "its identity changed");
    lab.zone.set(MOVED_NAME, &[zone::v4(2).into()], 600);
    DnsServer::start(&pod.netns, &[MOVED], &lab.zone)
}

/// Starts a proxy and repeats a query until the answer is right. Returns the time since the start,
/// and the number of wrong answers before.
fn first_answer(
    setup: &Setup,
    number: u32,
    pod: &Pod,
    query: &Query,
    address: IpAddr,
) -> Result<(Duration, u64)> {
    let options = setup.sdp_options(number);
    let command = setup.lab.sdp_command(&options)?;
    let log = setup
        .lab
        .directory()
        .join(format!("log/sdp-{}.log", options.name));
    let query = query.clone().within(NEXT_QUERY);
    pod.netns.enter(|| -> Result<_> {
        let start = Instant::now();
        // The command itself enters the lab's node; only the query is sent from the pod.
        let proxy = Program::start("holdfast-sdp", command, &log)?;
        let mut wrong = 0;
        loop {
            match query.send() {
                Ok(reply) if reply.clone().expect(address).is_ok() => break,
                Ok(_) => wrong += 1,
                Err(_) => {}
            }
            ensure!(start.elapsed() < LEAVES, "no answer:\n{}", proxy.log());
        }
        let took = start.elapsed();
        proxy.kill_9()?;
        Ok((took, wrong))
    })?
}
