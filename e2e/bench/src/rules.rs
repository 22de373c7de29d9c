//! `cargo xtask bench rules`: memory of the compiled rules of 10,000 endpoints, time to replace the
//! rules of one endpoint, and time of a lookup in 10 to 100,000 names.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use dns_policy::{
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
    table::{PolicyHandle, Question},
    verdict::Verdict,
};
use holdfast_e2e::bench::usage;
use serde_json::json;
use shared_maps::{EndpointId, IdentityId};

const SERVER: IdentityId = IdentityId(1053);
/// Number of look-ups in the mean of a figure.
const LOOKUPS: u32 = 1_000_000;

/// Memory and speed of the policy table.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Endpoints
    #[arg(long, default_value_t = 10_000)]
    endpoints: u16,
    /// Replacements of one endpoint's rules
    #[arg(long, default_value_t = 1000)]
    updates: u16,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/rules.json")]
    json: PathBuf,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let before = usage::resident(std::process::id())?;
    let policy = PolicyHandle::new();
    for endpoint in 0..options.endpoints {
        let errors = policy.apply(&[many(endpoint, 0)], &[]);
        ensure!(errors.is_empty(), "{errors:?}");
    }
    let memory = usage::resident(std::process::id())?.saturating_sub(before);
    println!(
        "{} endpoints, 630 patterns each: {:.1} MiB more in memory",
        options.endpoints,
        mebibytes(memory)?
    );
    let mut updates = replace(&policy, options);
    updates.sort_unstable();
    let at = |percent: usize| updates.get((updates.len() - 1) * percent / 100);
    let (p50, p99) = at(50).zip(at(99)).context("no --updates")?;
    println!(
        "rules of one endpoint replaced: p50 {:.0} us, p99 {:.0} us",
        micros(*p50),
        micros(*p99)
    );
    let mut lookups = Vec::new();
    for rules in [10, 1_000, 100_000] {
        let policy = PolicyHandle::new();
        policy.apply(&[sized(rules)], &[]);
        for (what, name, allowed) in [
            ("name", format!("host-{}.example.org.", rules / 2 - 1), true),
            (
                "wildcard",
                format!("www.team-{}.example.com.", rules / 2 - 1),
                true,
            ),
            ("refused", "www.elsewhere.example.".to_owned(), false),
        ] {
            let took = look_up(&policy, &name, allowed)?;
            println!("{rules:>7} rules, {what:<9} {took:>6.0} ns");
            lookups.push(json!({"rules": rules, "name": what, "ns": took}));
        }
    }
    let figures = json!({
        "endpoints": options.endpoints, "patterns": 630, "memory_bytes": memory,
        "update_us": {"p50": micros(*p50), "p99": micros(*p99)}, "lookups": lookups,
    });
    if let Some(directory) = options.json.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&options.json, serde_json::to_string_pretty(&figures)?)
        .with_context(|| format!("write {}", options.json.display()))?;
    println!("written to {}", options.json.display());
    Ok(())
}

/// Duration of each replacement. Every replacement changes the rules.
fn replace(policy: &PolicyHandle, options: &Options) -> Vec<Duration> {
    (1..=options.updates)
        .map(|version| {
            let changed = [many(version % options.endpoints.max(1), version)];
            let start = Instant::now();
            policy.apply(&changed, &[]);
            start.elapsed()
        })
        .collect()
}

/// Mean time of one look-up, nanoseconds.
fn look_up(policy: &PolicyHandle, name: &str, allowed: bool) -> Result<f64> {
    let question = Question {
        endpoint: EndpointId(1),
        port: 53,
        transport: Transport::Udp,
        server: SERVER,
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        name,
    };
    ensure!(
        (policy.load().check(&question) == Verdict::Allow) == allowed,
        "{name}"
    );
    let start = Instant::now();
    for _ in 0..LOOKUPS {
        black_box(policy.load().check(black_box(&question)));
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(LOOKUPS))
}

/// 600 names and 30 wildcards that all endpoints have. Nine of ten endpoints have two names of
/// their own, and one name contains `version`.
fn many(endpoint: u16, version: u16) -> RulesOf {
    let mut names: Vec<_> = (0..600)
        .map(|n| NameRule::Name(format!("host-{n}.service.example.org")))
        .collect();
    names.extend((0..30).map(|n| NameRule::Pattern(format!("*.team-{n}.example.com"))));
    if !endpoint.is_multiple_of(10) || version > 0 {
        names.extend([
            NameRule::Name(format!("own-{endpoint}.example.org")),
            NameRule::Name(format!("own-{endpoint}-{version}.example.org")),
        ]);
    }
    rules(endpoint, names)
}

/// `count` rules, half of them names, half wildcards.
fn sized(count: u32) -> RulesOf {
    let names = (0..count / 2).flat_map(|n| {
        [
            NameRule::Name(format!("host-{n}.example.org")),
            NameRule::Pattern(format!("*.team-{n}.example.com")),
        ]
    });
    rules(1, names.collect())
}

fn rules(endpoint: u16, names: Vec<NameRule>) -> RulesOf {
    let rule = SelectorRule {
        selector: "kube-dns".to_owned(),
        servers: Servers::Identities([SERVER].into()),
        names: NameRules::Names(names),
    };
    let port = |transport| PortRules {
        port: 53,
        transport,
        rules: vec![rule.clone()],
    };
    let ports = vec![port(Transport::Udp), port(Transport::Tcp)];
    RulesOf {
        endpoint: EndpointId(endpoint),
        rules: EndpointRules { ports },
    }
}

fn mebibytes(bytes: u64) -> Result<f64> {
    Ok(f64::from(u32::try_from(bytes / 1024)?) / 1024.0)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
