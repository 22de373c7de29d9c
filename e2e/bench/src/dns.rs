//! `cargo xtask bench dns`: compares paths to the server in interleaved rounds in one lab: the
//! direct path, forwarders that only copy datagrams or bytes, dnsdist, and the proxy. The client is
//! dnsperf (and a load of our own), the server NSD.

mod paths;
mod report;
mod servers;
mod under_cilium;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use holdfast_e2e::bench::perf_event::{Counting, Tracepoints};
use holdfast_e2e::bench::wake_up::WakeUp;
use holdfast_e2e::bench::{Latency, Throughput, connections, latency, ports, throughput, usage};
use holdfast_e2e::policy::{dns_to, egress};
use holdfast_e2e::{Lab, Programs, Query, eventually};
use shared_maps::pin;

use self::paths::{Kind, PATHS, PATTERNS, PORT, PORT_MANY, Route, SERVER, SERVER6};
use self::report::{Calls, Kept, Measured};
use self::servers::Servers;
use self::under_cilium::UnderCilium;

const PATTERNS_MANY: u32 = 10_000;
const NAMES: u32 = 1000;
/// Seconds of steady load per path and round.
const STEADY: u32 = 2;

/// DNS throughput and latency: direct, forwarders, standalone proxy.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Interleaved rounds; ratios are taken in each
    #[arg(long, default_value_t = 15)]
    rounds: u32,
    /// Seconds of full load per path and round
    #[arg(long, default_value_t = 2)]
    seconds: u32,
    /// Source ports
    #[arg(long, default_value_t = 20)]
    sockets: u32,
    /// Source ports of the rows with many
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u16).range(1000..=55_000))]
    ports: u16,
    /// Queries per second while latency is measured
    #[arg(long, default_value_t = 1000)]
    rate: u32,
    /// These paths; "all" for every one, which takes some minutes
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "direct,raw_forwarder,sdp,sdp_10000_patterns,direct_new_names,sdp_new_names"
    )]
    paths: Vec<String>,
    /// Threads of the proxy [default: its own default]
    #[arg(long)]
    workers: Option<u16>,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/dns.json")]
    json: PathBuf,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let wanted: Vec<&paths::Path> = PATHS
        .iter()
        .filter(|path| options.paths.iter().any(|p| p == path.name || p == "all"))
        .collect();
    ensure!(
        options.paths == ["all"] || wanted.len() == options.paths.len(),
        "--paths: there are all, {}",
        PATHS.map(|path| path.name).join(", ")
    );
    let lab = Lab::new()?;
    for netns in [&lab.node, &lab.world, &lab.a.netns, &lab.b.netns] {
        // A connection per query leaves more ports in TIME_WAIT than exist.
        netns.sysctl(&[("net.ipv4.tcp_max_tw_buckets", "1000")])?;
    }
    let fresh = fresh_names(options.rounds * options.rate * STEADY);
    let servers = Servers::start(&lab, known_names().chain(fresh.iter().cloned()))?;
    // Queries of pod a go through the proxy. Pod b is not an endpoint.
    let transparent = wanted.iter().any(|p| p.route == Route::ProxyTransparent);
    let programs = start_proxy(&lab, options.workers, transparent)?;
    let under_cilium = wanted
        .iter()
        .any(|p| p.route == Route::ProxyUnderCilium)
        .then(|| UnderCilium::start(known_names(), options.workers))
        .transpose()?;
    let bench = Bench {
        under_cilium,
        names: write_names(&lab, "names", &mut known_names())?,
        lab: &lab,
        servers: &servers,
        programs: &programs,
        options,
        transparent,
    };
    let resident = usage::resident(programs.sdp.id())?;
    let wanted: Vec<&paths::Path> = wanted
        .into_iter()
        .filter(|path| servers.has(path.route))
        .collect();
    for path in &wanted {
        bench.warm_up(path)?;
    }
    let wake_up = WakeUp::measure()?;
    let mut measured = Vec::new();
    for round in 0..options.rounds {
        let of_round = options.rate * STEADY;
        let fresh = fresh.iter().skip((round * of_round) as usize);
        let mut fresh = fresh.take(of_round as usize).cloned();
        let fresh = write_names(&lab, &format!("fresh-{round}"), &mut fresh)?;
        for path in &wanted {
            let one = bench.measure(path, round, &fresh)?;
            println!("round {} {one}", round + 1);
            measured.push(one);
        }
    }
    let kept = Kept {
        rounds: options.rounds,
        measured,
        calls: bench.count_calls(&wanted)?,
        resident,
        wake_up,
    };
    kept.print_and_write(&options.json)
}

/// The lab, the programs and the options of all measurements.
struct Bench<'a> {
    lab: &'a Lab,
    servers: &'a Servers,
    programs: &'a Programs,
    /// The lab of the proxy under a stand-in Cilium agent.
    under_cilium: Option<UnderCilium>,
    options: &'a Options,
    names: PathBuf,
    /// Whether the proxy can be switched to transparent mode.
    transparent: bool,
}

impl Bench<'_> {
    fn lab(&self, path: &paths::Path) -> &Lab {
        match &self.under_cilium {
            Some(under_cilium) if path.route == Route::ProxyUnderCilium => &under_cilium.lab,
            _ => self.lab,
        }
    }

    /// Waits until the path works, and queries every name once. The measurement begins with known
    /// names.
    fn warm_up(&self, path: &paths::Path) -> Result<()> {
        self.switch(path.route)?;
        let to = path.address();
        let pod = path.pod(self.lab(path));
        eventually(path.name, Duration::from_secs(10), || {
            let query = Query::a("n0.p0.bench.test", to.ip()).port(to.port());
            let reply = pod.ask(&if path.is_tcp() { query.tcp() } else { query })?;
            ensure!(
                reply.addresses().len() == 1,
                "{} {:?}",
                reply.code(),
                reply.addresses()
            );
            Ok(())
        })?;
        if path.kind != Kind::New {
            throughput(
                path.dnsperf(self.lab(path)),
                &self.names,
                self.options.sockets,
                1,
            )?;
        }
        Ok(())
    }

    fn measure(&self, path: &'static paths::Path, round: u32, fresh: &Path) -> Result<Measured> {
        self.switch(path.route)?;
        let process = self.process(path);
        let mut measured = Measured {
            path,
            round,
            full: None,
            steady: None,
            cpu: None,
        };
        if path.kind != Kind::New {
            let before = process.map(usage::cpu_time).transpose()?;
            let full = self.full(path)?;
            let after = process.map(usage::cpu_time).transpose()?;
            measured.cpu = before.zip(after).map(|(before, after)| {
                (after - before) / u32::try_from(full.answered.max(1)).unwrap_or(u32::MAX)
            });
            measured.full = Some(full);
        }
        measured.steady = self.steady(path, fresh)?;
        Ok(measured)
    }

    /// Counts the kernel's work for the processes on the paths under full load. This is a separate
    /// run, because the counters slow down each system call.
    fn count_calls(&self, paths: &[&'static paths::Path]) -> Result<Vec<Calls>> {
        let tracepoints = Tracepoints::read()?;
        let mut calls = Vec::new();
        for path in paths.iter().filter(|path| path.kind != Kind::New) {
            let Some(process) = self.process(path) else {
                continue;
            };
            self.switch(path.route)?;
            let mut counting = Counting::start(process, &tracepoints)?;
            let answered = self.full(path)?.answered;
            calls.push(Calls {
                path: path.name,
                answered,
                counts: counting.counts()?,
            });
        }
        Ok(calls)
    }

    /// The process between client and server.
    fn process(&self, path: &paths::Path) -> Option<u32> {
        match path.route {
            Route::ProxyUnderCilium => self
                .under_cilium
                .as_ref()
                .map(|under_cilium| under_cilium.sdp.id()),
            route if route.is_proxy() => Some(self.programs.sdp.id()),
            route => self.servers.process(route, path.kind == Kind::Ipv6),
        }
    }

    /// Switches the proxy to the source address that the path needs, as the agent would.
    fn switch(&self, route: Route) -> Result<()> {
        if !self.transparent || !route.is_proxy() || route == Route::ProxyUnderCilium {
            return Ok(());
        }
        let wanted = route == Route::ProxyTransparent;
        let said = self.lab.bpf_root().join(pin::TRANSPARENT);
        match wanted {
            true => std::fs::create_dir_all(said)?,
            false if said.exists() => std::fs::remove_dir(said)?,
            false => {}
        }
        let mode = if wanted { "on" } else { "blocked" };
        eventually("the proxy has switched", Duration::from_secs(10), || {
            let status = self.lab.sdp_json("one", &["status"])?;
            ensure!(status["transparent"] == mode, "{}", status["transparent"]);
            Ok(())
        })
    }

    fn full(&self, path: &paths::Path) -> Result<Throughput> {
        let (names, seconds) = (&self.names, self.options.seconds);
        if path.kind == Kind::ManyPorts {
            let pod = path.pod(self.lab(path));
            let (own, to, ports) = (pod.v4.into(), path.address(), self.options.ports);
            return pod
                .netns
                .enter(|| ports::throughput(own, to, ports, names, seconds))?;
        }
        if path.kind == Kind::TcpSingle {
            let to = path.address();
            let netns = &path.pod(self.lab(path)).netns;
            return netns.enter(|| connections::throughput(to, names, seconds))?;
        }
        throughput(
            path.dnsperf(self.lab(path)),
            names,
            self.options.sockets,
            seconds,
        )
    }

    fn steady(&self, path: &paths::Path, fresh: &Path) -> Result<Option<Latency>> {
        let rate = self.options.rate;
        let (names, seconds) = match path.kind {
            Kind::Main => (self.names.as_path(), Some(STEADY)),
            Kind::New => (fresh, None),
            _ => return Ok(None),
        };
        latency(path.dnsperf(self.lab(path)), names, rate, seconds).map(Some)
    }
}

fn start_proxy(lab: &Lab, workers: Option<u16>, transparent: bool) -> Result<Programs> {
    const FLAG: &str = "--dnsproxy-enable-transparent-mode";
    const OUTSIDE: &str = "--transparent-mode-outside-cluster";
    lab.write_policy("web.yaml", &policy())?;
    // One pod generates the load of many here.
    let mut options = holdfast_e2e::AgentOptions::default().flag("--endpoint-dns-quota=0");
    if transparent {
        options = options.flag(FLAG).flag(OUTSIDE);
    }
    let agent = lab.start_agent(&options)?;
    let mut options = holdfast_e2e::SdpOptions::default();
    if transparent {
        options = options.flag(FLAG).flag(OUTSIDE);
    }
    if let Some(workers) = workers {
        options = options.flag(&format!("--workers={workers}"));
    }
    let sdp = lab.start_sdp(&options)?;
    lab.add_endpoint(&lab.a, holdfast_e2e::policy::WEB)?;
    Ok(Programs { agent, sdp })
}

/// The policy has 100 patterns on the usual port, and 10,000 on another port. Each name matches one
/// pattern on each port.
fn policy() -> String {
    let list = |count| {
        let patterns: Vec<String> = (0..count)
            .map(|p| format!("{{matchPattern: \"*.p{p}.bench.test\"}}"))
            .collect();
        patterns.join(", ")
    };
    let any = "{matchPattern: \"PATTERNS\"}";
    let rule = dns_to(
        "PATTERNS",
        &[&format!("{SERVER}/32"), &format!("{SERVER6}/128")],
    );
    let port = |port: u16| format!("\"{port}\"");
    let few = rule.replace(any, &list(PATTERNS));
    let many = rule
        .replace(any, &list(PATTERNS_MANY))
        .replace(&port(PORT), &port(PORT_MANY));
    let learned = format!("- toFQDNs: [{}]\n", list(PATTERNS));
    egress("bench", "web", &(few + &many + &learned))
}

fn known_names() -> impl Iterator<Item = String> {
    (0..NAMES).map(|n| format!("n{n}.p{}.bench.test", n % PATTERNS))
}

/// Names that are queried once.
fn fresh_names(count: u32) -> Vec<String> {
    (0..count)
        .map(|n| format!("f{n}.p{}.bench.test", n % PATTERNS))
        .collect()
}

fn write_names(lab: &Lab, file: &str, names: &mut dyn Iterator<Item = String>) -> Result<PathBuf> {
    let path = lab.directory().join(file);
    let lines: String = names.map(|name| format!("{name} A\n")).collect();
    std::fs::write(&path, lines)?;
    Ok(path)
}
