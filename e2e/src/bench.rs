//! One run of a load and its result. The load is dnsperf, or our own load from many source ports or
//! with one connection per query.

pub mod connections;
pub mod perf_event;
pub mod ports;
pub mod usage;
pub mod wake_up;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::shell;

/// Rate and counts of one run of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throughput {
    /// Answers per second, not queries.
    pub qps: f64,
    pub answered: u64,
    pub lost: u64,
    /// Answers that were not NOERROR.
    pub wrong: u64,
}

/// Percentiles of the time to an answer, milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub lost: u64,
}

/// Sends as many queries as the path can carry, from `sockets` source ports or connections.
pub fn throughput(
    mut dnsperf: Command,
    names: &Path,
    sockets: u32,
    seconds: u32,
) -> Result<Throughput> {
    dnsperf.args(["-T1", "-O", "suppress=timeout,unexpected", "-t1", "-q200"]);
    dnsperf
        .arg(format!("-c{sockets}"))
        .arg(format!("-l{seconds}"))
        .arg("-d")
        .arg(names);
    let report = shell::finish(&mut dnsperf)?;
    let completed = count(&report, "Queries completed:")?;
    let good = report
        .lines()
        .find_map(|line| line.trim().strip_prefix("Response codes:"))
        .and_then(|codes| {
            codes
                .split("NOERROR ")
                .nth(1)?
                .split(' ')
                .next()?
                .parse()
                .ok()
        })
        .unwrap_or(0);
    let qps = field(&report, "Queries per second:")?
        .parse()
        .context("queries per second")?;
    Ok(Throughput {
        qps,
        answered: completed,
        lost: count(&report, "Queries lost:")?,
        wrong: completed.saturating_sub(good),
    })
}

/// Times of single queries at a steady `rate` per second. Queries repeat for `seconds`. Without
/// `seconds`, each name is queried once.
pub fn latency(
    mut dnsperf: Command,
    names: &Path,
    rate: u32,
    seconds: Option<u32>,
) -> Result<Latency> {
    dnsperf.args([
        "-T1",
        "-c20",
        "-v",
        "-t1",
        "-O",
        "suppress=timeout,unexpected",
    ]);
    let end = seconds.map_or("-n1".to_owned(), |seconds| format!("-l{seconds}"));
    dnsperf
        .arg(format!("-Q{rate}"))
        .arg(end)
        .arg("-d")
        .arg(names);
    let report = shell::finish(&mut dnsperf)?;
    // "> NOERROR name type seconds"
    let mut times: Vec<f64> = report
        .lines()
        .filter(|line| line.starts_with("> NOERROR"))
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    ensure!(!times.is_empty(), "dnsperf saw no answer:\n{report}");
    times.sort_by(f64::total_cmp);
    Ok(Latency {
        p50_ms: percentile(&times, 50) * 1e3,
        p99_ms: percentile(&times, 99) * 1e3,
        lost: count(&report, "Queries lost:")?,
    })
}

/// A query for the IPv4 address of `name`, with id 0.
fn query(name: &str) -> Vec<u8> {
    let mut message = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        message.push(u8::try_from(label.len()).unwrap_or(63));
        message.extend_from_slice(label.as_bytes());
    }
    message.extend_from_slice(&[0, 0, 1, 0, 1]);
    message
}

/// Median of the values; 0 if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted
        .get(sorted.len() * percent / 100)
        .or(sorted.last())
        .copied()
        .unwrap_or(0.0)
}

fn field<'a>(report: &'a str, name: &str) -> Result<&'a str> {
    report
        .lines()
        .find_map(|line| line.trim().strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next())
        .with_context(|| format!("no \"{name}\" in dnsperf's report:\n{report}"))
}

fn count(report: &str, name: &str) -> Result<u64> {
    field(report, name)?
        .parse()
        .with_context(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_rounds() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([]), 0.0);
        let times: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!(percentile(&times, 99), 99.0);
        assert_eq!(percentile(&times, 50), 50.0);
    }
}
