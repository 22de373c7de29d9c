//! `cargo xtask bench dns`: the server asked directly, through a forwarder
//! that only moves datagrams, and through the proxy with 100 patterns;
//! interleaved rounds in one lab, dnsperf as load, NSD as server.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use holdfast_e2e::bench::{Latency, Throughput, latency, median, throughput};
use holdfast_e2e::lab::at;
use holdfast_e2e::policy::{dns_to, egress};
use holdfast_e2e::{Lab, Program, Query, config, eventually};
use serde_json::json;

const PATTERNS: u32 = 100;
const NAMES: u32 = 1000;
const SERVER: &str = "192.0.2.2";
const FORWARDER: &str = "10.77.0.1";
const FORWARDER_PORT: u16 = 5300;

/// DNS throughput and latency: direct, raw forwarder, standalone proxy.
#[derive(Debug, Parser)]
struct Options {
    /// Interleaved rounds
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of full load per path and round
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Source ports
    #[arg(long, default_value_t = 20)]
    sockets: u32,
    /// Queries per second while latency is measured
    #[arg(long, default_value_t = 1000)]
    rate: u32,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/dns.json")]
    json: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Path3 {
    Direct,
    RawForwarder,
    Sdp,
}

const PATHS: [Path3; 3] = [Path3::Direct, Path3::RawForwarder, Path3::Sdp];

fn main() -> Result<()> {
    let options = Options::parse();
    let lab = Lab::new()?;
    let _nsd = start_nsd(&lab)?;
    let _forwarder = start_forwarder(&lab)?;
    // Pod a is asked through the proxy; pod b is nobody's endpoint.
    let _programs = lab.start(&policy())?;
    let names = lab.directory().join("names");
    std::fs::write(
        &names,
        name_list()
            .map(|name| format!("{name} A\n"))
            .collect::<String>(),
    )?;
    for path in PATHS {
        let first = "n0.p0.bench.test";
        let (pod, to) = match path {
            Path3::Direct => (&lab.b, at(SERVER.parse()?, 53)),
            Path3::RawForwarder => (&lab.b, at(FORWARDER.parse()?, FORWARDER_PORT)),
            Path3::Sdp => (&lab.a, at(SERVER.parse()?, 53)),
        };
        eventually(path.name(), Duration::from_secs(10), || {
            let reply = pod.ask(&Query::a(first, to.ip()).port(to.port()))?;
            ensure!(
                reply.addresses().len() == 1,
                "{} {:?}",
                reply.code(),
                reply.addresses()
            );
            Ok(())
        })?;
        // Once over all names: measured is the state in which they are known.
        throughput(path.load(&lab), &names, options.sockets, 2)?;
    }

    let mut results: Vec<(Path3, Throughput, Latency)> = Vec::new();
    for round in 1..=options.rounds {
        for path in PATHS {
            let full = throughput(path.load(&lab), &names, options.sockets, options.seconds)?;
            let steady = latency(path.load(&lab), &names, options.rate, 3)?;
            println!(
                "round {round} {:<14} {:>8.0} queries/s  lost {:<5} wrong {:<5} p50 {:.3} ms  p99 {:.3} ms",
                path.name(),
                full.qps,
                full.lost,
                full.wrong,
                steady.p50_ms,
                steady.p99_ms
            );
            results.push((path, full, steady));
        }
    }
    report(&options, &results)
}

fn report(options: &Options, results: &[(Path3, Throughput, Latency)]) -> Result<()> {
    let of = |path: Path3, value: fn(&Throughput, &Latency) -> f64| {
        let rounds = results.iter().filter(|(of, ..)| *of == path);
        median(rounds.map(|(_, full, steady)| value(full, steady)))
    };
    let qps = |path| of(path, |full, _| full.qps);
    println!("\nmedian of {} rounds", options.rounds);
    println!(
        "{:<14} {:>10} {:>9} {:>9} {:>6}",
        "path", "queries/s", "p50 ms", "p99 ms", "lost"
    );
    let mut rounds = Vec::new();
    for path in PATHS {
        let p50 = of(path, |_, steady| steady.p50_ms);
        let p99 = of(path, |_, steady| steady.p99_ms);
        let all = results.iter().filter(|(of, ..)| *of == path);
        let lost: u64 = all
            .map(|(_, full, steady)| full.lost + full.wrong + steady.lost)
            .sum();
        println!(
            "{:<14} {:>10.0} {p50:>9.3} {p99:>9.3} {lost:>6}",
            path.name(),
            qps(path)
        );
        rounds.push(json!({
            "name": path.name(), "qps": qps(path), "p50_ms": p50, "p99_ms": p99, "lost": lost,
        }));
    }
    let over_raw = qps(Path3::Sdp) / qps(Path3::RawForwarder);
    let over_direct = qps(Path3::Sdp) / qps(Path3::Direct);
    println!("sdp over raw forwarder {over_raw:.2}, over direct {over_direct:.2}");
    let figures = json!({
        "rounds": rounds,
        "ratios": { "sdp_over_raw_forwarder": over_raw, "sdp_over_direct": over_direct },
    });
    if let Some(directory) = options.json.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&options.json, serde_json::to_string_pretty(&figures)?)
        .with_context(|| format!("write {}", options.json.display()))?;
    println!("written to {}", options.json.display());
    Ok(())
}

impl Path3 {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::RawForwarder => "raw_forwarder",
            Self::Sdp => "sdp",
        }
    }

    fn load(self, lab: &Lab) -> Command {
        let (pod, server, port) = match self {
            Self::Direct => (&lab.b, SERVER, 53),
            Self::RawForwarder => (&lab.b, FORWARDER, FORWARDER_PORT),
            Self::Sdp => (&lab.a, SERVER, 53),
        };
        let mut command = pod.netns.command("dnsperf");
        command.arg("-s").arg(server).arg(format!("-p{port}"));
        command
    }
}

/// 100 patterns, each of which matches ten of the names.
fn policy() -> String {
    let mut rules = String::new();
    let patterns: Vec<String> = (0..PATTERNS)
        .map(|p| format!("{{matchPattern: \"*.p{p}.bench.test\"}}"))
        .collect();
    let list = patterns.join(", ");
    let any = "{matchPattern: \"PATTERNS\"}";
    rules += &dns_to("PATTERNS", &[&format!("{SERVER}/32")]).replace(any, &list);
    let _ = writeln!(rules, "- toFQDNs: [{list}]");
    egress("bench", "web", &rules)
}

fn name_list() -> impl Iterator<Item = String> {
    (0..NAMES).map(|n| format!("n{n}.p{}.bench.test", n % PATTERNS))
}

fn start_nsd(lab: &Lab) -> Result<Program> {
    let directory = lab.directory().join("nsd");
    std::fs::create_dir_all(&directory)?;
    let mut zone = String::from(
        "$ORIGIN bench.test.\n$TTL 600\n@ IN SOA ns hostmaster 1 3600 600 86400 60\n@ IN NS ns\nns IN A 192.0.2.2\n",
    );
    for (n, name) in name_list().enumerate() {
        let address = IpAddr::from([100, 64, u8::try_from(n / 250)?, u8::try_from(n % 250 + 1)?]);
        writeln!(zone, "{name}. IN A {address}")?;
    }
    std::fs::write(directory.join("bench.test"), zone)?;
    let show = |path: &Path| path.display().to_string();
    let configuration = format!(
        "server:\n  ip-address: {SERVER}\n  username: \"\"\n  chroot: \"\"\n  zonesdir: {dir}\n  database: \"\"\n\
         \x20 pidfile: \"\"\n  xfrdfile: {dir}/xfrd\n  zonelistfile: {dir}/zones\n  server-count: 1\n\
         \x20 rrl-ratelimit: 0\n  rrl-whitelist-ratelimit: 0\n\
         remote-control:\n  control-enable: no\nzone:\n  name: bench.test\n  zonefile: bench.test\n",
        dir = show(&directory)
    );
    let file = directory.join("nsd.conf");
    std::fs::write(&file, configuration)?;
    let mut command = lab.world.command("nsd");
    command.arg("-d").arg("-c").arg(&file);
    Program::start("nsd", command, &lab.directory().join("log/nsd.log"))
}

fn start_forwarder(lab: &Lab) -> Result<Program> {
    let program = config::program("raw_forwarder")?;
    let mut command = lab.node.command(&program.display().to_string());
    command
        .arg(format!("{FORWARDER}:{FORWARDER_PORT}"))
        .arg(format!("{SERVER}:53"));
    Program::start(
        "raw_forwarder",
        command,
        &lab.directory().join("log/raw_forwarder.log"),
    )
}
