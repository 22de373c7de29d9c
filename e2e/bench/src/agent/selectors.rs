//! Many selectors and identities; many endpoints and rules.

use std::net::Ipv4Addr;
use std::time::Duration;

use agent_core::{core::Event, policy::document::PolicyDocument};
use anyhow::{Result, ensure};
use holdfast_e2e::policy::{dns_to, egress};

use super::names::per;
use super::report::Figure;
use holdfast_e2e::in_memory::{Cost, DNS, Node, config, document, web};

/// Number of rules in each policy document.
const DOCUMENT: usize = 100;
/// First rule number of the document that changes.
const CHANGING: usize = 20_000;
/// Number of changes in the mean of a figure.
const CHANGES: usize = 20;

/// A rule whose kind depends on its number: half are names, two fifths blocks, one tenth pods.
fn rule(number: usize, version: usize) -> String {
    let peer = match number % 10 {
        0..4 => format!("toFQDNs: [{{matchName: \"n{number}v{version}.example.com\"}}]"),
        4 => format!("toFQDNs: [{{matchPattern: \"*.n{number}v{version}.example.com\"}}]"),
        5..9 => {
            let block =
                0x3000_0000 + u32::try_from(number + 65_536 * version).unwrap_or_default() * 256;
            format!("toCIDR: [\"{}/24\"]", Ipv4Addr::from_bits(block))
        }
        _ => format!("toEndpoints: [{{matchLabels: {{pod: p{}}}}}]", number / 10),
    };
    format!("- {peer}\n  toPorts: [{{ports: [{{port: \"443\", protocol: TCP}}]}}]\n")
}

/// Documents with these rules for pods `app: web`. The first allows queries for every name.
pub(crate) fn documents(rules: usize) -> Result<Vec<PolicyDocument>> {
    let mut found = Vec::new();
    for first in (0..rules).step_by(DOCUMENT) {
        found.push(part(first, rules, 0)?);
    }
    Ok(found)
}

/// The document of the rules from `first` on. Each version has other selectors.
fn part(first: usize, rules: usize, version: usize) -> Result<PolicyDocument> {
    let mut text = if first == 0 {
        dns_to("*", &[&format!("{DNS}/32")])
    } else {
        String::new()
    };
    for number in first..(first + DOCUMENT).min(rules) {
        text += &rule(number, if number == first { version } else { 0 });
    }
    document(&egress(&format!("rules-{first}"), "web", &text))
}

/// A document in which one rule differs between versions.
pub(crate) fn changing(number: usize, version: usize) -> Result<PolicyDocument> {
    let mut text = String::new();
    for other in 0..DOCUMENT {
        let version = if other == DOCUMENT / 2 { version } else { 0 };
        text += &rule(CHANGING + other / 10 * 10 + number, version);
    }
    document(&egress("changes", "web", &text))
}

/// Measures as many selectors as identities, all of one endpoint.
pub(crate) fn cache(selectors: usize) -> Result<Vec<Figure>> {
    let mut endpoints = vec![web(None)];
    endpoints.extend((0..selectors / 10).map(|pod| vec![format!("k8s:pod=p{pod}")]));
    let mut node = Node::start(config(), &[], &endpoints)?;
    let mut total = Cost::default();
    for document in documents(selectors)? {
        total.time += node.apply(&document).time;
    }
    let summary = node.core.summary();
    let counters = node.counters();
    let identities = node.identities() + summary.endpoint_identities as u64;
    ensure!(summary.selectors > selectors, "{}", summary.selectors);
    let applied = Figure::new(
        "selectors: policies applied",
        "us/selector",
        per(total.time, selectors),
    )
    .counted(identities, counters.ipcache_writes, counters.policy_writes);
    // A name in a block has labels that are not in use yet.
    let (time, ipcache, policy) = new_identities(&mut node, selectors)?;
    let added =
        Figure::new("selectors: one identity more", "us", per(time, 1)).counted(1, ipcache, policy);
    Ok(vec![applied, added])
}

/// Adds names in blocks. Each name has new labels, and one selector in addition to its block's
/// selects it. Returns time, ipcache writes and policy map writes for one name.
fn new_identities(node: &mut Node, rules: usize) -> Result<(Duration, u64, u64)> {
    let before = (node.counters(), node.identities());
    let mut time = Duration::ZERO;
    let changes = CHANGES.min(rules / 10);
    for change in 0..changes {
        let number = change * 10;
        let block = 0x3000_0000 + u32::try_from(number + 5)? * 256;
        let address = Ipv4Addr::from_bits(block + 1);
        let name = format!("n{number}v0.example.com");
        node.now = node.now.plus_secs(1);
        let answer = node.answer(0, &name, vec![address.into()], 3600)?;
        let cost = node.event(Event::Mappings(vec![answer]));
        ensure!(cost.realised == 1, "{name} was not realised");
        time += cost.time;
    }
    let after = node.counters();
    let added = node.identities() - before.1;
    ensure!(added == changes as u64, "{added} identities");
    let time = time / u32::try_from(changes)?;
    Ok((
        time,
        (after.ipcache_writes - before.0.ipcache_writes) / added,
        (after.policy_writes - before.0.policy_writes) / added,
    ))
}

/// Endpoints with different labels under the same rules.
pub(crate) fn regeneration(endpoints: usize, rules: usize) -> Result<Vec<Figure>> {
    let labels: Vec<_> = (0..endpoints).map(|n| web(Some(n))).collect();
    let mut node = Node::start(config(), &[], &labels)?;
    let mut total = Duration::ZERO;
    for document in documents(rules)? {
        total += node.apply(&document).time;
    }
    let counters = node.counters();
    let first = Figure::new("rules: all applied", "ms", total.as_secs_f64() * 1e3).counted(
        node.identities(),
        counters.ipcache_writes,
        counters.policy_writes,
    );
    let mut figures = vec![first];
    for (name, number) in [("rules: a name changes", 0), ("rules: a block changes", 5)] {
        node.apply(&changing(number, 0)?);
        let before = node.counters();
        let (mut time, mut longest) = (Duration::ZERO, Duration::ZERO);
        for version in 1..=CHANGES {
            let document = changing(number, version)?;
            node.now = node.now.plus_secs(1);
            let cost = node.apply(&document);
            time += cost.time;
            longest = longest.max(cost.longest);
        }
        let after = node.counters();
        let changes = CHANGES as u64;
        figures.push(Figure::new(name, "ms", per(time, CHANGES) / 1e3).counted(
            node.identities(),
            (after.ipcache_writes - before.ipcache_writes) / changes,
            (after.policy_writes - before.policy_writes) / changes,
        ));
        let longest = longest.as_secs_f64() * 1e3;
        figures.push(Figure::new(&format!("{name}: longest part"), "ms", longest));
    }
    let (time, ipcache, policy) = new_identities(&mut node, rules)?;
    figures.push(
        Figure::new("rules: one identity more", "ms", per(time, 1) / 1e3)
            .counted(1, ipcache, policy),
    );
    Ok(figures)
}
