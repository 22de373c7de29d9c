//! `cargo xtask bench relay`: one relay, 200 agents that only read, 10,000 pods, 50 changes a second.
//! Figures: bytes for each change and agent, CPU time and memory of the relay, the time from the
//! change to each agent, and requests at the API server.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use fqdn_proto::relay::cluster_relay_client::ClusterRelayClient;
use fqdn_proto::relay::{FollowRequest, step::Step};
use holdfast_e2e::apiserver::{ApiServer, Options as ApiOptions, pod};
use holdfast_e2e::bench::usage;
use holdfast_e2e::relay::Certificates;
use holdfast_e2e::{Program, config, eventually};
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::task::TaskTracker;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

/// Longest wait until every agent has every pod.
const SYNC: Duration = Duration::from_secs(120);
/// Port that the relay listens on.
const PORT: u16 = 9971;

/// Work and memory of a relay.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Agents
    #[arg(long, default_value_t = 200)]
    agents: usize,
    /// Pods
    #[arg(long, default_value_t = 10_000)]
    pods: u32,
    /// Changes of pods in a second
    #[arg(long, default_value_t = 50)]
    rate: u32,
    /// Seconds of changes
    #[arg(long, default_value_t = 20)]
    seconds: u32,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/relay.json")]
    json: PathBuf,
}

/// Data of all agents together.
#[derive(Debug, Default)]
struct Seen {
    synced: AtomicUsize,
    bytes: AtomicU64,
    /// When each change was made, by key.
    begun: Mutex<HashMap<String, Instant>>,
    delays: Mutex<Vec<Duration>>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let api = ApiServer::start(None, directory.path(), ApiOptions::default())?;
    for n in 0..options.pods {
        api.put(a_pod(n, 0))?;
    }
    let (of_relay, of_agent) = Certificates::issue(&directory.path().join("tls"))?;
    let mut command = Command::new(config::program("holdfast-agent")?);
    command.args(["relay", "--metrics-address=off"]);
    command.arg(format!("--kubeconfig={}", api.files().kubeconfig.display()));
    command.arg(format!("--listen=127.0.0.1:{PORT}"));
    command.arg(format!("--tls-cert={}", of_relay.certificate.display()));
    command.arg(format!("--tls-key={}", of_relay.key.display()));
    command.arg(format!("--client-ca={}", of_relay.authority.display()));
    let begin = Instant::now();
    let log = directory.path().join("relay.log");
    let relay = Program::start("holdfast-agent relay", command, &log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let seen = Arc::new(Seen::default());
    let tasks = TaskTracker::new();
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(std::fs::read(&of_agent.authority)?))
        .identity(Identity::from_pem(
            std::fs::read(&of_agent.certificate)?,
            std::fs::read(&of_agent.key)?,
        ))
        .domain_name("holdfast-relay");
    let endpoint = Endpoint::from_shared(format!("https://127.0.0.1:{PORT}"))?;
    let endpoint = endpoint
        .tls_config(tls)?
        .initial_stream_window_size(1 << 20);

    // The first follower shows when the relay has read everything.
    let follower = |n: usize| {
        let (endpoint, seen, pods) = (endpoint.clone(), Arc::clone(&seen), options.pods);
        async move {
            if let Err(error) = follow(&endpoint, n, pods, &seen).await {
                eprintln!("agent {n}: {error:#}");
            }
        }
    };
    tasks.spawn_on(follower(0), runtime.handle());
    synced(&seen, 1)?;
    let first = begin.elapsed();
    let alone = usage::resident(relay.id())?;
    let begin = Instant::now();
    for n in 1..options.agents {
        tasks.spawn_on(follower(n), runtime.handle());
    }
    synced(&seen, options.agents)?;
    let all = begin.elapsed();
    let with_agents = usage::resident(relay.id())?;
    let requests = api.answered().len();

    seen.bytes.store(0, Ordering::Relaxed);
    let (begin, cpu) = (Instant::now(), usage::cpu_time(relay.id())?);
    let changes = options.rate * options.seconds;
    for n in 0..changes {
        let due = begin + Duration::from_secs(1) * n / options.rate;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let n = n % options.pods;
        let pod = a_pod(n, 1);
        seen.begun.lock().insert(key(n), Instant::now());
        api.put(pod)?;
    }
    let wanted = usize::try_from(changes.min(options.pods))? * options.agents;
    eventually("every agent has every change", SYNC, || {
        let have = seen.delays.lock().len();
        ensure!(have >= wanted, "{have} of {wanted}");
        Ok(())
    })?;
    let took = begin.elapsed();
    let cpu = usage::cpu_time(relay.id())?.saturating_sub(cpu);
    let mut delays = seen.delays.lock().clone();
    delays.sort_unstable();
    let at = |thousandth: usize| delays.get((delays.len() - 1) * thousandth / 1000).copied();
    let (p50, p99, most) = (at(500), at(990), at(1000));
    let (p50, p99, most) = (
        p50.context("p50")?,
        p99.context("p99")?,
        most.context("max")?,
    );
    let bytes = seen.bytes.load(Ordering::Relaxed) / u64::try_from(wanted)?;
    let percent = cpu.as_secs_f64() / took.as_secs_f64() * 100.0;
    let mib = |bytes: u64| f64::from(u32::try_from(bytes >> 10).unwrap_or(u32::MAX)) / 1024.0;
    let each = with_agents.saturating_sub(alone) / u64::try_from(options.agents.max(2) - 1)?;
    let watches = api.answered();
    let watches = watches
        .iter()
        .filter(|one| one.verb == "watch" && one.resource == "pods");
    let watches = watches.count();
    println!(
        "{} pods, {} agents, {} changes/s",
        options.pods, options.agents, options.rate
    );
    println!(
        "first agent has every pod after {first:.1?}; {} more after {all:.1?}",
        options.agents - 1
    );
    println!("for each change and agent: {bytes} bytes of frames");
    println!("change to agent: p50 {p50:.1?}, p99 {p99:.1?}, most {most:.1?}");
    println!(
        "relay: {percent:.0} % of a CPU, {:.1} MiB with one agent, {:.1} MiB with all: {} KiB each",
        mib(alone),
        mib(with_agents),
        each >> 10
    );
    println!(
        "API server: {requests} requests before the changes, watches of pods begun: {watches}"
    );
    let figures = json!({
        "pods": options.pods, "agents": options.agents, "rate": options.rate,
        "first_ms": first.as_millis(), "all_ms": all.as_millis(), "octets": bytes,
        "p50_us": p50.as_micros(), "p99_us": p99.as_micros(), "max_us": most.as_micros(),
        "cpu_percent": percent, "resident": alone, "resident_with_agents": with_agents,
        "requests": requests,
    });
    if let Some(directory) = options.json.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&options.json, format!("{figures:#}\n"))?;
    Ok(())
}

/// A pod as in a Deployment with a hundred replicas.
fn a_pod(n: u32, generation: u32) -> serde_json::Value {
    let address = format!("10.{}.{}.{}", 100 + generation, n / 250, n % 250 + 1);
    let labels = json!({
        "app.kubernetes.io/name": format!("app-{}", n / 100),
        "app.kubernetes.io/instance": "production",
        "pod-template-hash": "7d4b9c8f6d",
    });
    let node = format!("ip-10-0-{}-{}.example.internal", n / 250 % 250, n % 250);
    pod("bench", &name(n), labels, &node, &[&address])
}

fn name(n: u32) -> String {
    format!("app-{}-7d4b9c8f6d-{n:05}", n / 100)
}

fn key(n: u32) -> String {
    format!("Pod/bench/{}", name(n))
}

fn synced(seen: &Seen, agents: usize) -> Result<()> {
    eventually("agents have every pod", SYNC, || {
        let synced = seen.synced.load(Ordering::Relaxed);
        ensure!(synced >= agents, "{synced} of {agents}");
        Ok(())
    })
}

/// Tries to connect until the relay is ready, then counts what arrives.
async fn follow(endpoint: &Endpoint, n: usize, pods: u32, seen: &Seen) -> Result<()> {
    let request = FollowRequest {
        version: "bench".to_owned(),
        node: format!("n{n}"),
        after: None,
    };
    let mut frames = loop {
        let begun = async {
            let channel: Channel = endpoint.connect().await?;
            let client = ClusterRelayClient::new(channel);
            let mut client = client.max_decoding_message_size(16 << 20);
            anyhow::Ok(client.follow(request.clone()).await?.into_inner())
        };
        match begun.await {
            Ok(frames) => break frames,
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    let (mut have, mut is_synced) = (0, false);
    while let Some(frame) = frames.message().await? {
        let bytes = prost::Message::encoded_len(&frame);
        seen.bytes
            .fetch_add(u64::try_from(bytes)?, Ordering::Relaxed);
        let now = Instant::now();
        for step in frame.steps.into_iter().filter_map(|step| step.step) {
            match step {
                Step::Put(put) if is_synced => {
                    let begun = seen.begun.lock().get(&put.key).copied();
                    if let Some(begun) = begun {
                        seen.delays
                            .lock()
                            .push(now.saturating_duration_since(begun));
                    }
                }
                Step::Put(put) if put.key.starts_with("Pod/") => have += 1,
                // A view marks the end of a snapshot.
                Step::View(_) if !is_synced => {
                    ensure!(have == pods, "{have} pods in the snapshot");
                    is_synced = true;
                    seen.synced.fetch_add(1, Ordering::Relaxed);
                }
                _ => {}
            }
        }
    }
    Ok(())
}
