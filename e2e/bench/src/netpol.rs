//! `cargo xtask bench netpol`: NetworkPolicies by nftables, while the node, its policies and the
//! cluster grow. Fails if a promise is broken.
//!
//! The agent is the real program, and the API server is the server of the tests. Pods have
//! documents but no network namespaces: no packet is sent.

mod renderings;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use agent_datapath::nf_tables::TableEvents;
use anyhow::{Context as _, Result, ensure};
use clap::Args;
use holdfast_e2e::apiserver::{ApiServer, Options as ApiOptions};
use holdfast_e2e::bench::usage;
use holdfast_e2e::netpol_run::{NETPOL_METRICS, NODE, TABLE};
use holdfast_e2e::{Lab, Program, eventually};
use netpol::render::nft;
use serde_json::{Value, json};

use crate::cluster::objects;
use crate::cluster::report::Report;

/// CPU time of a change, and memory, while everything grows.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A tenth of the cluster and of the policies
    #[arg(long)]
    short: bool,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/netpol.json")]
    json: PathBuf,
}

/// Highest ratio of the cost of a change in the largest cluster to the cost in the smallest.
const FLAT: f64 = 2.0;
/// Highest ratio of the time of a batch to the time of `nft` for the same change.
const OF_NFT: f64 = 0.05;
/// Maximum memory in addition to the memory of `netpol run` without policies and pods, MiB.
const MEMORY_MIB: f64 = 64.0;
/// Longest time from a change at the API server until the kernel's table has it, 99th percentile.
const DELAY: Duration = Duration::from_millis(50);
/// Maximum CPU time from the start until the first table is in force. The tests' API server needs
/// most of the elapsed time.
const FIRST: Duration = Duration::from_secs(3);

/// Number of changes that come one after another.
const ALONE: usize = 100;
/// Number of changes that come at a fixed rate, and this rate per second.
const PACED: usize = 1_000;
const RATE: u32 = 200;
/// Pause between changes that must not share a batch: longer than the agent waits for more changes.
const APART: Duration = Duration::from_millis(60);
/// Number of runs of `nft`.
const RUNS: u32 = 20;
/// Number of pods that change: their labels bring them into a group, and out of it.
const CHANGING: usize = 100;
/// Number of the first pod of this node.
const LOCAL: usize = 50_000;
/// Number of pods with equal labels.
const REPLICAS: usize = 10;
const LIMIT: Duration = Duration::from_secs(120);

/// Numbers of the node's pods, of policies, and of the cluster's pods.
#[derive(Clone, Copy, Debug)]
struct Size {
    local: usize,
    policies: usize,
    pods: usize,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let tenth = if options.short { 10 } else { 1 };
    let small = Size {
        local: 10,
        policies: 10,
        pods: 1_000,
    };
    let large = Size {
        local: 110,
        policies: 1_000 / tenth,
        pods: 10_000 / tenth,
    };
    let grown = [
        ("small", small),
        (
            "local",
            Size {
                local: large.local,
                ..small
            },
        ),
        (
            "policies",
            Size {
                policies: large.policies,
                ..small
            },
        ),
        (
            "pods",
            Size {
                pods: large.pods,
                ..small
            },
        ),
        ("all", large),
    ];
    let mut report = Report::default();
    renderings::measure(&mut report)?;
    let empty = {
        let node = Node::start(Size {
            local: 0,
            policies: 0,
            pods: 0,
        })?;
        mib(usage::resident(node.netpol.id())?)
    };
    report.add("memory-empty", "MiB", empty);
    let mut first = None;
    for (name, size) in grown {
        let node = Node::start(size)?;
        let seconds = node.first.as_secs_f64();
        report.add(&format!("first-{name}"), "s", seconds);
        report.promise(
            &format!("first-cpu-{name}"),
            "s CPU",
            node.first_cpu.as_secs_f64(),
            "<= 3 s",
            node.first_cpu <= FIRST,
        );
        let more = mib(usage::resident(node.netpol.id())?) - empty;
        report.promise(
            &format!("memory-{name}"),
            "MiB more",
            more,
            "<= 64 MiB",
            more <= MEMORY_MIB,
        );
        let delays = node.delays()?;
        let at = |percent: usize| delays.get((delays.len() - 1) * percent / 100).copied();
        let (median, slow) = at(50).zip(at(99)).context("delays")?;
        report.add(
            &format!("delay-{name}-p50"),
            "ms",
            median.as_secs_f64() * 1e3,
        );
        let slow_ms = slow.as_secs_f64() * 1e3;
        report.promise(
            &format!("delay-{name}-p99"),
            "ms",
            slow_ms,
            "<= 50 ms",
            slow <= DELAY,
        );
        let micros = node.cost()?.as_secs_f64() * 1e6;
        let ratio = micros / *first.get_or_insert(micros);
        let promise = format!("{ratio:.2} of the smallest, <= {FLAT}");
        report.promise(
            &format!("change-{name}"),
            "us CPU",
            micros,
            &promise,
            ratio <= FLAT,
        );
        let (ours, theirs) = (node.commit()?, node.by_nft()?);
        report.add(&format!("batch-{name}"), "us", ours.as_secs_f64() * 1e6);
        report.add(&format!("nft-{name}"), "us", theirs.as_secs_f64() * 1e6);
        let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
        let promise = format!("<= {OF_NFT}");
        report.promise(
            &format!("batch-of-nft-{name}"),
            "",
            ratio,
            &promise,
            ratio <= OF_NFT,
        );
    }
    report.write(&options.json)?;
    println!("written to {}", options.json.display());
    let broken = report.broken();
    ensure!(broken.is_empty(), "broken: {}", broken.join(", "));
    Ok(())
}

/// A node on which `netpol run` enforces the policies of a cluster.
struct Node {
    lab: Lab,
    api: ApiServer,
    netpol: Program,
    /// Time from the start of `netpol run` until the first table was in force.
    first: Duration,
    /// CPU time of `netpol run` until the first table was in force.
    first_cpu: Duration,
}

impl Node {
    fn start(size: Size) -> Result<Self> {
        let lab = Lab::new()?;
        let directory = lab.directory().join("apiserver");
        let api = ApiServer::start(Some(&lab.node), &directory, ApiOptions::default())?;
        for number in 0..objects::NAMESPACES {
            api.put(objects::namespace(number))?;
        }
        api.put(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": NODE}, "status": {"addresses": []},
        }))?;
        for number in 0..size.pods {
            api.put(objects::pod(number, "stable"))?;
        }
        for number in LOCAL..LOCAL + size.local {
            let mut pod = objects::pod(number, "stable");
            pod["spec"]["nodeName"] = json!(NODE);
            api.put(pod)?;
        }
        for number in 0..size.policies {
            api.put(policy(number, size))?;
        }
        let kubeconfig = format!("--kubeconfig={}", api.files().kubeconfig.display());
        let begin = Instant::now();
        let netpol = lab.start_netpol(&["--kubernetes", &kubeconfig])?;
        let node = Self {
            first: begin.elapsed(),
            first_cpu: usage::cpu_time(netpol.id())?,
            lab,
            api,
            netpol,
        };
        node.settle()?;
        Ok(node)
    }

    /// Changes the labels of a pod, so that it leaves its group or comes back.
    fn change(&self, n: usize) -> Result<()> {
        let track = ["canary", "stable"][n / CHANGING % 2];
        self.api.put(objects::pod(n % CHANGING, track)).map(|_| ())
    }

    /// Sorted times from a change until the kernel reports it, for changes one after another.
    fn delays(&self) -> Result<Vec<Duration>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let mut delays = Vec::new();
        self.lab.node.enter(|| {
            runtime.block_on(async {
                let events = TableEvents::open(nft::TABLE)?;
                // The number of rounds is even, so that every pod is unchanged at the end.
                for n in 0..2 * ALONE {
                    let begin = Instant::now();
                    self.change(n)?;
                    let changed = tokio::time::timeout(LIMIT, events.changed());
                    changed.await.context("the table does not change")??;
                    delays.push(begin.elapsed());
                    // With this pause, the next change is not in the same batch and finds an idle
                    // agent.
                    let quiet = Duration::from_millis(60);
                    while tokio::time::timeout(quiet, events.changed()).await.is_ok() {}
                }
                anyhow::Ok(())
            })
        })??;
        delays.sort_unstable();
        Ok(delays)
    }

    /// CPU time of the agent for each change, at a fixed rate of changes.
    fn cost(&self) -> Result<Duration> {
        self.settle()?;
        let before = usage::cpu_time(self.netpol.id())?;
        let start = Instant::now();
        for n in 0..PACED {
            let due = start + Duration::from_secs(1) / RATE * u32::try_from(n)?;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            self.change(n)?;
        }
        self.settle()?;
        Ok((usage::cpu_time(self.netpol.id())? - before) / u32::try_from(PACED)?)
    }

    /// Mean time of batches of one change each.
    fn commit(&self) -> Result<Duration> {
        let before = self.commits()?;
        // The number of rounds is even, so that every pod is unchanged at the end.
        for n in 0..2 * CHANGING {
            self.change(n)?;
            std::thread::sleep(APART);
        }
        Ok(self.commits()?.mean_since(&before))
    }

    fn commits(&self) -> Result<Commits> {
        let of = |name: &str| self.lab.metric(NETPOL_METRICS, name, "");
        Ok(Commits {
            seconds: of("holdfast_netpol_commit_seconds_sum")?,
            count: of("holdfast_netpol_commit_seconds_count")?,
        })
    }

    /// Mean time of `nft` for one more member of a set, in a copy of the table.
    fn by_nft(&self) -> Result<Duration> {
        let node = &self.lab.node;
        let [family, table] = TABLE;
        let copy = "copy";
        let text = node.run("nft", &["list", "table", family, table])?;
        let set = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("set g4_"))
            .context("no group")?;
        let set = format!("g4_{}", set.trim_end_matches(" {"));
        self.nft(&text.replacen(table, copy, 1))?;
        let begin = Instant::now();
        for n in 0..RUNS {
            self.nft(&format!(
                "add element {family} {copy} {set} {{ 192.0.2.{} }}\n",
                n + 1
            ))?;
        }
        Ok(begin.elapsed() / RUNS)
    }

    fn nft(&self, text: &str) -> Result<()> {
        let mut command = self.lab.node.command("nft");
        command.args(["-f", "-"]).stdin(Stdio::piped());
        let mut child = command.spawn().context("nft")?;
        let mut input = child.stdin.take().context("it is piped")?;
        input.write_all(text.as_bytes())?;
        drop(input);
        ensure!(child.wait()?.success(), "nft refuses the text");
        Ok(())
    }

    /// Waits until the agent has nothing to do.
    fn settle(&self) -> Result<()> {
        let still = Duration::from_secs(2);
        eventually("netpol run becomes idle", LIMIT, || {
            let before = usage::cpu_time(self.netpol.id())?;
            std::thread::sleep(still);
            let used = usage::cpu_time(self.netpol.id())? - before;
            ensure!(used < still / 10, "{used:?} in {still:?}");
            Ok(())
        })
    }
}

/// Total time and number of the agent's batches that did not write a whole table.
struct Commits {
    seconds: f64,
    count: f64,
}

impl Commits {
    /// Mean time of the batches that came after `before`.
    fn mean_since(&self, before: &Self) -> Duration {
        Duration::from_secs_f64((self.seconds - before.seconds) / (self.count - before.count))
    }
}

/// A policy that lets pods of an app in the cluster reach pods of this node.
fn policy(number: usize, size: Size) -> Value {
    let local = number % (size.local / REPLICAS).max(1) * REPLICAS + LOCAL;
    let peer = number % (size.pods / REPLICAS).max(1);
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": objects::namespace_of(local), "name": format!("policy-{number}")},
        "spec": {
            "podSelector": {"matchLabels": {"app": format!("app-{}", local / REPLICAS)}},
            "ingress": [{
                "from": [{
                    "namespaceSelector": {},
                    "podSelector": {"matchLabels": {"app": format!("app-{peer}"), "track": "stable"}},
                }],
                "ports": [{"port": 8080}],
            }],
        },
    })
}

fn mib(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 10).unwrap_or(u32::MAX)) / 1024.0
}
