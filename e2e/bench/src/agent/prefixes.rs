//! A million prefixes: insert, a label for a /8 and for a /16, memory.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use agent_core::{
    core::Event,
    ipcache::{metadata::Claim, owners::Owner, table::Ipcache},
    labels::LabelSet,
};
use anyhow::{Result, ensure};
use holdfast_e2e::bench::usage;
use holdfast_e2e::policy::{cidr, dns_to, egress};
use ipnet::IpNet;

use super::names::per;
use super::report::Figure;
use holdfast_e2e::in_memory::{DNS, Node, config, document, web};

/// Maximum number of addresses in one answer.
const ANSWER: usize = 1000;
/// Number of endpoints among which the addresses are divided.
const ENDPOINTS: usize = 100;

/// Address number `number`, in eight /8 blocks with sixteen /16 blocks each.
fn address(number: usize) -> Result<IpAddr> {
    let number = u32::try_from(number)?;
    let bits = (10 + number % 8) << 24 | (number / 8 % 16) << 16 | (number / 128);
    Ok(IpAddr::V4(Ipv4Addr::from_bits(bits)))
}

/// Number of the first `count` addresses that are in `block`.
fn below(block: IpNet, count: usize) -> Result<u64> {
    let mut found = 0;
    for number in 0..count {
        found += u64::from(block.contains(&address(number)?));
    }
    Ok(found)
}

/// Measures prefixes through the core: learned, labelled, and written to the datapath.
pub(crate) fn learned(count: usize) -> Result<Vec<Figure>> {
    let rules = dns_to("*", &[&format!("{DNS}/32")])
        + "- toFQDNs: [{matchPattern: \"*.example.com\"}]\n  toPorts: [{ports: [{port: \"443\", protocol: TCP}]}]\n";
    let names = document(&egress("names", "web", &rules))?;
    let mut node = Node::start(config(), &[names], &vec![web(None); ENDPOINTS])?;
    let memory = usage::resident(std::process::id())?;
    let mut time = Duration::ZERO;
    let before = node.counters();
    for (answer, first) in (0..count).step_by(ANSWER).enumerate() {
        node.now = node.now.plus(Duration::from_millis(1));
        let addresses = (first..(first + ANSWER).min(count)).map(address);
        let addresses = addresses.collect::<Result<_>>()?;
        let name = format!("n{answer}.example.com");
        let event = node.answer(answer, &name, addresses, 3600)?;
        let cost = node.event(Event::Mappings(vec![event]));
        ensure!(cost.realised == 1, "answer {answer} was not realised");
        time += cost.time;
    }
    let after = node.counters();
    let memory = usage::resident(std::process::id())?.saturating_sub(memory);
    let mut figures = vec![
        Figure::new("prefixes learned", "us/prefix", per(time, count)).counted(
            node.identities(),
            after.ipcache_writes - before.ipcache_writes,
            after.policy_writes - before.policy_writes,
        ),
        Figure::new(
            "memory of a learned prefix",
            "bytes/prefix",
            bytes(memory, count),
        ),
    ];
    for (name, block) in [
        ("label of a /8", "10.0.0.0/8"),
        ("label of a /16", "11.1.0.0/16"),
    ] {
        let descendants = below(block.parse()?, count)?;
        let document = document(&egress(name, "web", &cidr(block)))?;
        let before = node.counters();
        let cost = node.apply(&document);
        let after = node.counters();
        let touched = after.prefixes_resolved - before.prefixes_resolved;
        let ipcache = after.ipcache_writes - before.ipcache_writes;
        // The block itself is a prefix too.
        let holds = touched == descendants + 1 && ipcache == descendants + 1;
        let promise = format!("P4, touches {touched}: its {descendants} descendants and itself");
        figures.push(
            Figure::new(name, "ms", cost.time.as_secs_f64() * 1e3)
                .counted(
                    node.identities(),
                    ipcache,
                    after.policy_writes - before.policy_writes,
                )
                .promised(promise, holds),
        );
    }
    let start = Instant::now();
    node.now = node.now.plus_secs(60);
    node.event(Event::Tick);
    figures.push(Figure::new(
        "files of all endpoints",
        "ms",
        start.elapsed().as_secs_f64() * 1e3,
    ));
    Ok(figures)
}

/// Measures the table of prefixes alone, without a core.
pub(crate) fn table(count: usize) -> Result<Vec<Figure>> {
    let memory = usage::resident(std::process::id())?;
    let labels = LabelSet::parse(&["fqdn:*.example.com"])?;
    let mut ipcache = Ipcache::new(false);
    let start = Instant::now();
    for number in 0..count {
        let prefix = IpNet::from(address(number)?);
        ipcache.claim(prefix, Owner::Policy, Claim::Labels(labels.clone()));
    }
    ipcache.take_dirty();
    let time = start.elapsed();
    let memory = usage::resident(std::process::id())?.saturating_sub(memory);
    let block: IpNet = "10.0.0.0/8".parse()?;
    let cidr = LabelSet::parse(&["cidr:10.0.0.0/8"])?;
    let start = Instant::now();
    ipcache.claim(block, Owner::Policy, Claim::Labels(cidr));
    let marked = start.elapsed();
    ensure!(ipcache.take_dirty().len() as u64 == below(block, count)? + 1);
    Ok(vec![
        Figure::new("table: insert", "us/prefix", per(time, count)),
        Figure::new("table: memory", "bytes/prefix", bytes(memory, count)),
        Figure::new("table: /8 marked", "ms", marked.as_secs_f64() * 1e3),
    ])
}

pub(crate) fn bytes(memory: u64, count: usize) -> f64 {
    let kib = u32::try_from(memory / 1024).unwrap_or(u32::MAX);
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    f64::from(kib) * 1024.0 / f64::from(count)
}
