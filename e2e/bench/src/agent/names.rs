//! Names: cost of an update with 2,001 selectors, and a name whose addresses change all the time.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use agent_core::{
    core::{CoreConfig, Event, event::MappingEvent},
    policy::document::PolicyDocument,
};
use anyhow::{Result, ensure};
use holdfast_e2e::policy::{dns_to, egress};

use super::calibration::Calibration;
use super::report::Figure;
use holdfast_e2e::in_memory::{Cost, DNS, Node, config, document, web};

/// Number of pairs of selectors: a name, and a wildcard under it.
const PAIRS: usize = 1000;
/// Microseconds of one update in Cilium's name manager on this kind of machine.
const PEER: f64 = 179.0;
/// Promised cost of an update, in units of the calibration of the same run: 3.6 us where a unit
/// takes 0.3 us, as on two idle cores.
const PROMISE: f64 = 12.0;
/// Number of parts of a run, with a calibration after each. The result is the median of their
/// ratios.
const PARTS: usize = 20;
/// Number of units of work in one calibration.
const UNITS: usize = 5_000;

/// `K.example.com` and `*.K.example.com` for each K, and `*.example.com`.
fn selectors() -> Result<PolicyDocument> {
    let mut rules = dns_to("*", &[&format!("{DNS}/32")]);
    let mut rule = |selector: String| {
        rules += &format!(
            "- toFQDNs: [{{{selector}}}]\n  toPorts: [{{ports: [{{port: \"443\", protocol: TCP}}]}}]\n"
        );
    };
    for k in 1..=PAIRS {
        rule(format!("matchName: \"{k}.example.com\""));
        rule(format!("matchPattern: \"*.{k}.example.com\""));
    }
    rule("matchPattern: \"*.example.com\"".to_owned());
    document(&egress("names", "web", &rules))
}

/// The names of one K, with a new address.
fn update(node: &mut Node, number: usize, ttl: u32) -> Result<[MappingEvent; 2]> {
    let k = number % PAIRS + 1;
    let address = Ipv4Addr::from_bits(0x0a00_0000 + u32::try_from(number)?);
    let endpoint = number / PAIRS;
    Ok([
        node.answer(
            endpoint,
            &format!("{k}.example.com"),
            vec![address.into()],
            ttl,
        )?,
        node.answer(
            endpoint,
            &format!("example.{k}.example.com"),
            vec![address.into()],
            ttl,
        )?,
    ])
}

/// Updates of this many names, in plans of `batch` mappings. All must be realised.
fn updates(
    node: &mut Node,
    numbers: std::ops::Range<usize>,
    batch: usize,
    step: Duration,
    ttl: u32,
) -> Result<Cost> {
    let mut total = Cost::default();
    let mut sent = 0;
    let mut events = Vec::with_capacity(batch);
    let last = numbers.end - 1;
    for number in numbers {
        node.now = node.now.plus(step);
        events.extend(update(node, number, ttl)?);
        sent += 2;
        if events.len() >= batch || number == last {
            let cost = node.event(Event::Mappings(std::mem::take(&mut events)));
            total.time += cost.time;
            total.realised += cost.realised;
        }
    }
    ensure!(total.realised == sent, "{} of {sent}", total.realised);
    Ok(total)
}

/// The update workload of Cilium's benchmark of its name manager.
pub(crate) fn update_rounds(rounds: usize) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (first, name, batch) in [
        (Some("names first answer"), "names update", 2),
        (None, "names update, batches of 64", 64),
    ] {
        let endpoints = vec![web(None); 10];
        let mut node = Node::start(config(), &[selectors()?], &endpoints)?;
        let step = Duration::from_micros(50);
        let before = node.counters();
        let new = updates(&mut node, 0..PAIRS, batch, step, 3600)?;
        let after = node.counters();
        figures.extend(first.map(|name| {
            Figure::new(name, "us/update", per(new.time, 2 * PAIRS)).counted(
                node.identities(),
                after.ipcache_writes - before.ipcache_writes,
                after.policy_writes - before.policy_writes,
            )
        }));
        let before = after;
        let mut calibration = Calibration::new();
        let (mut time, mut ratios) = (Duration::ZERO, Vec::new());
        for part in 0..PARTS {
            let bound = |part: usize| PAIRS + PAIRS * rounds * part / PARTS;
            let numbers = bound(part)..bound(part + 1);
            let count = numbers.len();
            let cost = updates(&mut node, numbers, batch, step, 3600)?;
            time += cost.time;
            let unit = per(calibration.run(UNITS), UNITS);
            ratios.push(per(cost.time, 2 * count) / unit);
        }
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios.get(PARTS / 2).copied().unwrap_or(f64::NAN);
        let after = node.counters();
        let ipcache = after.ipcache_writes - before.ipcache_writes;
        let policy = after.policy_writes - before.policy_writes;
        let micros = per(time, 2 * PAIRS * rounds);
        let addresses = (PAIRS * rounds) as u64;
        // With both names of an address in one plan there is one write. With one name per plan,
        // each name changes the address's labels.
        let holds = ratio <= PROMISE && ipcache == addresses && policy == 0;
        let promise = format!(
            "P3, at most {PROMISE} calibration units, one ipcache write for each of {addresses} addresses, no policy map write"
        );
        let figure = Figure::new(name, "us/update", micros)
            .counted(node.identities(), ipcache, policy)
            .promised(promise, holds);
        figures.push(Figure {
            peer: Some(PEER),
            calibrated: Some(ratio),
            ..figure
        });
    }
    Ok(figures)
}

/// Like [`update_rounds`], until addresses expire as fast as new ones arrive.
pub(crate) fn update_and_expire(rounds: usize) -> Result<Vec<Figure>> {
    let config = CoreConfig {
        lease_slack: Duration::from_secs(5),
        ..config()
    };
    let mut node = Node::start(config, &[selectors()?], &vec![web(None); 10])?;
    let step = Duration::from_micros(200);
    // After these rounds, 15 s or more of simulated time, the first addresses have expired.
    let warm = 100;
    updates(&mut node, 0..PAIRS * warm, 64, step, 5)?;
    let before = node.counters();
    let end = PAIRS * (warm + rounds);
    let cost = updates(&mut node, PAIRS * warm..end, 64, step, 5)?;
    let after = node.counters();
    let figure = Figure::new(
        "names update and expire",
        "us/update",
        per(cost.time, 2 * PAIRS * rounds),
    );
    Ok(vec![figure.counted(
        node.identities(),
        after.ipcache_writes - before.ipcache_writes,
        after.policy_writes - before.policy_writes,
    )])
}

/// One name like the name of a storage bucket: 10,000 addresses, eight in each answer, TTL 5 s.
pub(crate) fn churn(answers: usize) -> Result<Vec<Figure>> {
    let rules = dns_to("*", &[&format!("{DNS}/32")])
        + "- toFQDNs: [{matchName: \"bucket.s3.example.com\"}]\n  toPorts: [{ports: [{port: \"443\", protocol: TCP}]}]\n";
    let policy = document(&egress("bucket", "web", &rules))?;
    let mut node = Node::start(config(), &[policy], &[web(None)])?;
    let before = (node.counters(), node.identities());
    let mut total = Duration::ZERO;
    for number in 0..answers {
        node.now = node.now.plus(Duration::from_millis(33));
        let addresses = (0..8).map(|n| {
            let host = u32::try_from((number * 8 + n) % 10_000).unwrap_or_default();
            IpAddr::V4(Ipv4Addr::from_bits(0x3400_0000 + host))
        });
        let addresses = addresses.collect();
        let event = node.answer(0, "bucket.s3.example.com", addresses, 5)?;
        let cost = node.event(Event::Mappings(vec![event]));
        ensure!(cost.realised == 1, "answer {number} was not realised");
        total += cost.time;
    }
    let after = node.counters();
    let identities = node.identities() - before.1;
    let policy = after.policy_writes - before.0.policy_writes;
    let figure = Figure::new(
        "bucket, 30 answers/s of 8",
        "us/answer",
        per(total, answers),
    )
    .counted(
        identities,
        after.ipcache_writes - before.0.ipcache_writes,
        policy,
    )
    .promised(
        "no identity and no policy map write".to_owned(),
        identities == 0 && policy == 0,
    );
    Ok(vec![figure])
}

/// Microseconds for each of `count` items.
pub(crate) fn per(time: Duration, count: usize) -> f64 {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    time.as_secs_f64() * 1e6 / f64::from(count.max(1))
}
