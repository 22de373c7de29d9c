//! What was measured: lines while it runs, a table and a file at the end.

use std::fmt;
use std::path::Path as FilePath;
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_e2e::bench::{Latency, Throughput, median};
use serde_json::{Map, Value, json};

use crate::paths::Path;

/// One path in one round.
pub(crate) struct Measured {
    pub(crate) path: &'static Path,
    pub(crate) full: Option<Throughput>,
    pub(crate) steady: Option<Latency>,
    /// CPU time per answer of the process in the way.
    pub(crate) cpu: Option<Duration>,
}

/// Ratios of queries per second: name, of which, over which.
const RATIOS: [(&str, &str, &str); 14] = [
    ("sdp_over_raw_forwarder", "sdp", "raw_forwarder"),
    ("sdp_over_direct", "sdp", "direct"),
    ("sdp_over_dnsdist", "sdp", "dnsdist"),
    ("sdp_10000_patterns_over_100", "sdp_10000_patterns", "sdp"),
    (
        "sdp_over_raw_forwarder_ipv6",
        "sdp_ipv6",
        "raw_forwarder_ipv6",
    ),
    ("transparent_over_sdp", "sdp_transparent", "sdp"),
    (
        "transparent_over_sdp_tcp_pipelined",
        "sdp_transparent_tcp_pipelined",
        "sdp_tcp_pipelined",
    ),
    ("sdp_over_direct_ipv6", "sdp_ipv6", "direct_ipv6"),
    (
        "sdp_over_raw_forwarder_many_ports",
        "sdp_many_ports",
        "raw_forwarder_many_ports",
    ),
    (
        "sdp_over_direct_many_ports",
        "sdp_many_ports",
        "direct_many_ports",
    ),
    (
        "sdp_over_raw_forwarder_tcp_pipelined",
        "sdp_tcp_pipelined",
        "raw_forwarder_tcp_pipelined",
    ),
    (
        "sdp_over_direct_tcp_pipelined",
        "sdp_tcp_pipelined",
        "direct_tcp_pipelined",
    ),
    (
        "sdp_over_raw_forwarder_tcp_single",
        "sdp_tcp_single",
        "raw_forwarder_tcp_single",
    ),
    (
        "sdp_over_direct_tcp_single",
        "sdp_tcp_single",
        "direct_tcp_single",
    ),
];

/// Ratios of what a path adds to the 99th percentile over asking directly, to
/// what the raw forwarder adds.
const ADDED: [(&str, &str, &str); 2] = [
    ("p99_added_leased_over_raw_forwarder", "sdp", "direct"),
    (
        "p99_added_new_over_raw_forwarder",
        "sdp_new_names",
        "direct_new_names",
    ),
];

/// All rounds of one path.
struct Row {
    name: &'static str,
    qps: Option<f64>,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    cpu_us: Option<f64>,
    lost: u64,
}

impl Row {
    fn of(name: &'static str, all: &[Measured]) -> Self {
        let of = || all.iter().filter(move |one| one.path.name == name);
        let middle = |values: Vec<f64>| (!values.is_empty()).then(|| median(values));
        let steady = || of().filter_map(|one| one.steady);
        let full = || of().filter_map(|one| one.full);
        Self {
            name,
            qps: middle(full().map(|full| full.qps).collect()),
            p50_ms: middle(steady().map(|steady| steady.p50_ms).collect()),
            p99_ms: middle(steady().map(|steady| steady.p99_ms).collect()),
            cpu_us: middle(
                of().filter_map(|one| Some(one.cpu?.as_secs_f64() * 1e6))
                    .collect(),
            ),
            lost: full().map(|full| full.lost + full.wrong).sum::<u64>()
                + steady().map(|steady| steady.lost).sum::<u64>(),
        }
    }
}

/// The medians, on the terminal and in `file`.
pub(crate) fn print_and_write(
    file: &FilePath,
    rounds: u32,
    all: &[Measured],
    resident: u64,
) -> Result<()> {
    let mut names: Vec<&'static str> = Vec::new();
    for one in all {
        if !names.contains(&one.path.name) {
            names.push(one.path.name);
        }
    }
    let rows: Vec<Row> = names.into_iter().map(|name| Row::of(name, all)).collect();
    println!("\nmedian of {rounds} rounds");
    println!(
        "{:<28} {:>10} {:>9} {:>9} {:>10} {:>6}",
        "path", "queries/s", "p50 ms", "p99 ms", "CPU us", "lost"
    );
    for row in &rows {
        println!(
            "{:<28} {:>10} {:>9} {:>9} {:>10} {:>6}",
            row.name,
            shown(row.qps, 0),
            shown(row.p50_ms, 3),
            shown(row.p99_ms, 3),
            shown(row.cpu_us, 2),
            row.lost
        );
    }
    let ratios = ratios(&rows);
    println!();
    for (name, ratio) in &ratios {
        println!("{name:<40} {:.2}", ratio.as_f64().unwrap_or_default());
    }
    let megabytes = f64::from(u32::try_from(resident / 1024)?) / 1024.0;
    println!(
        "{:<40} {megabytes:.1} MiB",
        "memory of the idle proxy (RSS)"
    );
    let rounds: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "name": row.name, "qps": row.qps, "p50_ms": row.p50_ms, "p99_ms": row.p99_ms,
                "cpu_us": row.cpu_us, "lost": row.lost,
            })
        })
        .collect();
    let figures = json!({ "rounds": rounds, "ratios": ratios, "sdp_idle_rss_bytes": resident });
    if let Some(directory) = file.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(file, serde_json::to_string_pretty(&figures)?)
        .with_context(|| format!("write {}", file.display()))?;
    println!("written to {}", file.display());
    Ok(())
}

fn ratios(rows: &[Row]) -> Map<String, Value> {
    let row = |name: &str| rows.iter().find(|row| row.name == name);
    let qps = |name| row(name)?.qps;
    let added = |name, direct| Some(row(name)?.p99_ms? - row(direct)?.p99_ms?);
    let of_speed = RATIOS
        .iter()
        .filter_map(|(name, of, over)| Some((*name, qps(of)? / qps(over)?)));
    let of_delay = ADDED.iter().filter_map(|(name, of, direct)| {
        Some((
            *name,
            added(of, direct)? / added("raw_forwarder", "direct")?,
        ))
    });
    of_speed
        .chain(of_delay)
        .map(|(name, ratio)| (name.to_owned(), json!(ratio)))
        .collect()
}

fn shown(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<28}", self.path.name)?;
        if let Some(full) = &self.full {
            write!(
                f,
                " {:>8.0} queries/s  lost {:<4} wrong {:<4}",
                full.qps, full.lost, full.wrong
            )?;
        }
        if let Some(cpu) = self.cpu {
            write!(f, " CPU {:>6.2} us", cpu.as_secs_f64() * 1e6)?;
        }
        if let Some(steady) = &self.steady {
            write!(
                f,
                "  p50 {:.3} ms  p99 {:.3} ms",
                steady.p50_ms, steady.p99_ms
            )?;
        }
        Ok(())
    }
}
