//! Figures: lines during the run, a table and a file at the end.

use std::fmt;
use std::path::Path as FilePath;
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_e2e::bench::perf_event::Counts;
use holdfast_e2e::bench::wake_up::WakeUp;
use holdfast_e2e::bench::{Latency, Throughput, median};
use serde_json::{Map, Value, json};

use super::paths::Path;

/// One path in one round.
pub(crate) struct Measured {
    pub(crate) path: &'static Path,
    /// Number of the round, from 0.
    pub(crate) round: u32,
    pub(crate) full: Option<Throughput>,
    pub(crate) steady: Option<Latency>,
    /// CPU time per answer of the process on the path.
    pub(crate) cpu: Option<Duration>,
}

/// The kernel's work for the process on a path under full load.
pub(crate) struct Calls {
    pub(crate) path: &'static str,
    pub(crate) answered: u64,
    pub(crate) counts: Counts,
}

/// Everything that one run of the benchmark measured.
pub(crate) struct Kept {
    pub(crate) rounds: u32,
    pub(crate) measured: Vec<Measured>,
    pub(crate) calls: Vec<Calls>,
    /// Resident memory of the idle proxy, bytes.
    pub(crate) resident: u64,
    pub(crate) wake_up: WakeUp,
}

/// Ratios of queries per second: name, numerator, denominator.
const RATIOS: [(&str, &str, &str); 16] = [
    ("sdp_over_raw_forwarder", "sdp", "raw_forwarder"),
    ("sdp_over_direct", "sdp", "direct"),
    ("sdp_over_dnsdist", "sdp", "dnsdist"),
    ("sdp_10000_patterns_over_100", "sdp_10000_patterns", "sdp"),
    (
        "sdp_over_raw_forwarder_ipv6",
        "sdp_ipv6",
        "raw_forwarder_ipv6",
    ),
    ("under_cilium_over_sdp", "sdp_under_cilium", "sdp"),
    (
        "under_cilium_over_sdp_many_ports",
        "sdp_under_cilium_many_ports",
        "sdp_many_ports",
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

/// Latency that a path adds to the direct path at a percentile, divided by the latency that the raw
/// forwarder adds.
const ADDED: [(&str, &str, &str, Percentile); 4] = [
    (
        "p50_added_leased_over_raw_forwarder",
        "sdp",
        "direct",
        Percentile::P50,
    ),
    (
        "p99_added_leased_over_raw_forwarder",
        "sdp",
        "direct",
        Percentile::P99,
    ),
    (
        "p50_added_new_over_raw_forwarder",
        "sdp_new_names",
        "direct_new_names",
        Percentile::P50,
    ),
    (
        "p99_added_new_over_raw_forwarder",
        "sdp_new_names",
        "direct_new_names",
        Percentile::P99,
    ),
];

/// Ratios of CPU time per answer of the process on the path: name, numerator, denominator.
const CPU: [(&str, &str, &str); 7] = [
    ("cpu_sdp_over_raw_forwarder", "sdp", "raw_forwarder"),
    ("cpu_under_cilium_over_sdp", "sdp_under_cilium", "sdp"),
    (
        "cpu_sdp_10000_patterns_over_raw_forwarder",
        "sdp_10000_patterns",
        "raw_forwarder",
    ),
    (
        "cpu_sdp_over_raw_forwarder_ipv6",
        "sdp_ipv6",
        "raw_forwarder_ipv6",
    ),
    (
        "cpu_sdp_over_raw_forwarder_many_ports",
        "sdp_many_ports",
        "raw_forwarder_many_ports",
    ),
    (
        "cpu_sdp_over_raw_forwarder_tcp_pipelined",
        "sdp_tcp_pipelined",
        "raw_forwarder_tcp_pipelined",
    ),
    (
        "cpu_sdp_over_raw_forwarder_tcp_single",
        "sdp_tcp_single",
        "raw_forwarder_tcp_single",
    ),
];

/// A percentile of the time to an answer.
#[derive(Clone, Copy)]
enum Percentile {
    P50,
    P99,
}

impl Percentile {
    fn of(self, latency: &Latency) -> f64 {
        match self {
            Self::P50 => latency.p50_ms,
            Self::P99 => latency.p99_ms,
        }
    }
}

/// A ratio within each round. The machine's other load changes from round to round, so the ratio of
/// two medians would compare different times.
struct Ratio {
    name: &'static str,
    /// One value for each round in which both sides were measured, ascending.
    values: Vec<f64>,
}

impl Ratio {
    fn new(name: &'static str, rounds: u32, one: impl Fn(u32) -> Option<f64>) -> Self {
        let mut values: Vec<f64> = (0..rounds)
            .filter_map(one)
            .filter(|value| value.is_finite())
            .collect();
        values.sort_by(f64::total_cmp);
        Self { name, values }
    }

    /// The value below which `quarters` quarters of the values lie.
    fn quartile(&self, quarters: usize) -> f64 {
        let last = self.values.len().saturating_sub(1);
        let at = (last * quarters + 2) / 4;
        self.values.get(at).copied().unwrap_or_default()
    }
}

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

impl Kept {
    /// Prints the medians, and writes them to `file`.
    pub(crate) fn print_and_write(&self, file: &FilePath) -> Result<()> {
        let mut names: Vec<&'static str> = Vec::new();
        for one in &self.measured {
            if !names.contains(&one.path.name) {
                names.push(one.path.name);
            }
        }
        let rows = names.into_iter().map(|name| Row::of(name, &self.measured));
        let rows: Vec<Row> = rows.collect();
        let ratios = ratios(self.rounds, &self.measured);
        println!("\nmedian of {} rounds", self.rounds);
        print_rows(&rows);
        print_ratios(&ratios);
        print_calls(&self.calls);
        println!(
            "\n{:<40} {:.1} MiB",
            "memory of the idle proxy (RSS)",
            f64::from(u32::try_from(self.resident / 1024)?) / 1024.0
        );
        println!(
            "{:<40} {:.1} us, on one CPU {:.1} us",
            "a wake-up on another CPU costs",
            self.wake_up.other_cpu_us.unwrap_or(f64::NAN),
            self.wake_up.same_cpu_us
        );
        if let Some(directory) = file.parent() {
            std::fs::create_dir_all(directory)?;
        }
        std::fs::write(
            file,
            serde_json::to_string_pretty(&self.json(&rows, &ratios))?,
        )
        .with_context(|| format!("write {}", file.display()))?;
        println!("written to {}", file.display());
        Ok(())
    }

    fn json(&self, rows: &[Row], ratios: &[Ratio]) -> Value {
        let of_each = |of: &dyn Fn(&Ratio) -> Value| -> Map<String, Value> {
            let named = ratios
                .iter()
                .map(|ratio| (ratio.name.to_owned(), of(ratio)));
            named.collect()
        };
        let rounds: Vec<Value> = rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.name, "qps": row.qps, "p50_ms": row.p50_ms, "p99_ms": row.p99_ms,
                    "cpu_us": row.cpu_us, "lost": row.lost,
                })
            })
            .collect();
        let calls: Map<String, Value> = self
            .calls
            .iter()
            .map(|of| (of.path.to_owned(), of.json()))
            .collect();
        json!({
            "rounds": rounds,
            "ratios": of_each(&|ratio| json!(ratio.quartile(2))),
            "spread": of_each(&|ratio| json!({
                "median": ratio.quartile(2), "q1": ratio.quartile(1), "q3": ratio.quartile(3),
                "rounds": ratio.values.len(),
            })),
            "per_answer": calls,
            "sdp_idle_rss_bytes": self.resident,
            "wake_up_us": {
                "same_cpu": self.wake_up.same_cpu_us, "other_cpu": self.wake_up.other_cpu_us,
            },
        })
    }
}

impl Calls {
    /// Names of the counts, with their values per answer.
    fn per_answer(&self) -> [(&'static str, f64); 7] {
        let counts = &self.counts;
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let per = |count: u64| count as f64 / self.answered.max(1) as f64;
        // A query and its answer are received, and both are sent.
        let datagrams = 2.0 / per(counts.receives).max(f64::EPSILON);
        [
            ("calls", per(counts.system_calls)),
            ("receives", per(counts.receives)),
            ("sends", per(counts.sends)),
            ("yields", per(counts.yields)),
            ("switches", per(counts.context_switches)),
            ("wakes", per(counts.wakes)),
            ("datagrams_a_receive", datagrams),
        ]
    }

    fn json(&self) -> Value {
        let counts = self.per_answer();
        let counts = counts
            .iter()
            .map(|(name, count)| ((*name).to_owned(), json!(count)));
        Value::Object(counts.collect())
    }
}

fn print_rows(rows: &[Row]) {
    println!(
        "{:<28} {:>10} {:>9} {:>9} {:>10} {:>6}",
        "path", "queries/s", "p50 ms", "p99 ms", "CPU us", "lost"
    );
    for row in rows {
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
}

fn print_ratios(ratios: &[Ratio]) {
    println!(
        "\n{:<44} {:>7} {:>7} {:>7} {:>7}",
        "ratio of one round", "median", "25 %", "75 %", "rounds"
    );
    for ratio in ratios {
        println!(
            "{:<44} {:>7.2} {:>7.2} {:>7.2} {:>7}",
            ratio.name,
            ratio.quartile(2),
            ratio.quartile(1),
            ratio.quartile(3),
            ratio.values.len()
        );
    }
}

fn print_calls(calls: &[Calls]) {
    let Some(first) = calls.first() else { return };
    print!("\n{:<28}", "per answer");
    for (name, _) in first.per_answer() {
        print!(" {name:>9}");
    }
    println!();
    for of in calls {
        print!("{:<28}", of.path);
        for (name, count) in of.per_answer() {
            print!(" {count:>width$.3}", width = name.len().max(9));
        }
        println!();
    }
}

fn ratios(rounds: u32, all: &[Measured]) -> Vec<Ratio> {
    let find = |name: &str, round: u32| {
        all.iter()
            .find(|one| one.path.name == name && one.round == round)
    };
    let qps = |name, round| Some(find(name, round)?.full?.qps);
    let cpu = |name, round| Some(find(name, round)?.cpu?.as_secs_f64());
    let time = |name, round, percentile: Percentile| {
        Some(percentile.of(find(name, round)?.steady.as_ref()?))
    };
    let of_speed = RATIOS.iter().map(|(name, of, over)| {
        Ratio::new(name, rounds, |round| {
            Some(qps(of, round)? / qps(over, round)?)
        })
    });
    let of_cpu = CPU.iter().map(|(name, of, over)| {
        Ratio::new(name, rounds, |round| {
            Some(cpu(of, round)? / cpu(over, round)?)
        })
    });
    let of_delay = ADDED.iter().map(|(name, of, direct, percentile)| {
        Ratio::new(name, rounds, |round| {
            let added = time(of, round, *percentile)? - time(direct, round, *percentile)?;
            let raw =
                time("raw_forwarder", round, *percentile)? - time("direct", round, *percentile)?;
            // A round in which the forwarder added nothing has no ratio.
            (raw > 0.0).then(|| added / raw)
        })
    });
    of_speed
        .chain(of_cpu)
        .chain(of_delay)
        .filter(|ratio| !ratio.values.is_empty())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str, round: u32, qps: f64) -> Measured {
        let path = crate::dns::paths::PATHS
            .iter()
            .find(|path| path.name == name);
        Measured {
            path: path.expect("a path of the benchmark"),
            round,
            full: Some(Throughput {
                qps,
                ..Throughput::default()
            }),
            steady: None,
            cpu: None,
        }
    }

    #[test]
    fn a_ratio_compares_what_was_measured_in_one_round() {
        // The machine becomes half as fast after the first round. No ratio changes.
        let mut all = Vec::new();
        for (round, speed) in [100.0, 50.0, 50.0, 50.0, 50.0].into_iter().enumerate() {
            let round = u32::try_from(round).unwrap();
            all.push(one("raw_forwarder", round, speed));
            all.push(one("sdp", round, speed * 0.9));
        }
        let ratios = ratios(5, &all);
        let ratio = ratios.first().unwrap();
        assert_eq!(ratio.name, "sdp_over_raw_forwarder");
        assert_eq!(ratio.values.len(), 5);
        for quarters in 0..=4 {
            assert!((ratio.quartile(quarters) - 0.9).abs() < 1e-9);
        }
    }

    #[test]
    fn quartiles_of_five() {
        let ratio = Ratio::new("r", 5, |round| Some(f64::from(round)));
        assert_eq!([1, 2, 3].map(|q| ratio.quartile(q)), [1.0, 2.0, 3.0]);
    }
}
