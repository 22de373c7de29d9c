//! Packets that datapath and kernel dropped. An overloaded machine loses datagrams there.

use anyhow::{Context as _, Result};

use super::setup::Setup;
use crate::netns::Netns;

/// Counts since the start of the lab, in words. The backlog's count is for the whole machine.
pub(super) fn by_the_kernel(setup: &Setup) -> Result<String> {
    let lab = &setup.lab;
    let (node, server) = (full_sockets(&lab.node)?, full_sockets(&lab.world)?);
    let conntrack = lab.node.enter(|| columns("stat/nf_conntrack"))??;
    let [mut failed, mut dropped] = [0, 0];
    for row in conntrack.get(1..).unwrap_or_default() {
        failed += hex(row.get(9));
        dropped += hex(row.get(10)) + hex(row.get(11));
    }
    let softnet = lab.node.enter(|| columns("softnet_stat"))??;
    let backlog: u64 = softnet.iter().map(|row| hex(row.get(1))).sum();
    let drops = setup.drops()?;
    Ok(format!(
        "{drops}; full sockets: {node} on the node, {server} at the server; nf_conntrack: {failed} not \
         inserted, {dropped} dropped; backlog: {backlog}"
    ))
}

/// Datagrams that were dropped because a socket of the namespace was full.
fn full_sockets(netns: &Netns) -> Result<u64> {
    let rows = netns.enter(|| columns("snmp"))??;
    let udp: Vec<_> = rows
        .iter()
        .filter(|row| row.first().is_some_and(|name| name == "Udp:"))
        .collect();
    let [names, values] = udp.as_slice() else {
        anyhow::bail!("no counters of UDP: {rows:?}");
    };
    let place = names.iter().position(|name| name == "RcvbufErrors");
    let v4 = place.and_then(|place| values.get(place));
    let rows = netns.enter(|| columns("snmp6"))??;
    let v6 = rows
        .iter()
        .find(|row| row.first().is_some_and(|name| name == "Udp6RcvbufErrors"));
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<u64>().ok());
    Ok(number(v4).unwrap_or(0) + number(v6.and_then(|row| row.get(1))).unwrap_or(0))
}

fn hex(text: Option<&String>) -> u64 {
    let number = text.and_then(|text| u64::from_str_radix(text, 16).ok());
    number.unwrap_or(0)
}

/// A table of the calling thread's network namespace.
fn columns(file: &str) -> Result<Vec<Vec<String>>> {
    let path = format!("/proc/thread-self/net/{file}");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    Ok(text.lines().map(words).collect())
}
