//! `cargo xtask bench hostile`: how much one pod's attack slows another pod down. Fails if a
//! promise of the guide's page on security is broken.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use holdfast_e2e::bench::median;
use holdfast_e2e::hostile::{Attack, Killed, Quiet, Row, Setup, Size};
use serde_json::json;

/// Highest permitted ratio of pod B's times under attack to its times on a quiet node.
const FACTOR: f64 = 3.0;
/// Highest ratio under a flood of UDP queries, and while a process of the node connects to the
/// agent as fast as it can. These attacks use one of two CPUs.
const CPU_FACTOR: f64 = 5.0;

/// Name of the row in which the node's only proxy is killed, and no pod attacks.
const KILLED: &str = "only proxy killed";

/// Measures the effect of one pod's attack on another pod of the same node.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only attacks whose name contains this
    filter: Option<String>,
    /// Rounds; medians are judged
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of each attack
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/hostile.json")]
    json: PathBuf,
}

/// All rounds of one attack.
#[derive(Debug, Default)]
struct Measured {
    quiet: Vec<Row>,
    attacked: Vec<Row>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let size = Size {
        lasts: Duration::from_secs(options.seconds),
        ..Size::full()
    };
    let wanted = |attack: &&Attack| {
        let filter = options.filter.as_deref().unwrap_or_default();
        attack.name().contains(filter)
    };
    let routed: Vec<Attack> = Attack::ALL.iter().filter(wanted).copied().collect();
    let bridged: Vec<Attack> = Attack::ON_BRIDGE.iter().filter(wanted).copied().collect();
    let attacks = [routed.as_slice(), &bridged].concat();
    let kills = KILLED.contains(options.filter.as_deref().unwrap_or_default());
    ensure!(
        kills || !attacks.is_empty(),
        "no attack's name contains the filter"
    );
    let mut measured = Vec::new();
    let mut killed = None;
    if kills || !routed.is_empty() {
        let mut setup = Setup::new(&size)?;
        measured.extend(measure(&mut setup, &routed, options.rounds)?);
        if kills {
            killed = Some(setup.the_only_proxy_is_killed(options.rounds)?);
        }
    }
    if !bridged.is_empty() {
        let mut setup = Setup::on_bridge(&size)?;
        measured.extend(measure(&mut setup, &bridged, options.rounds)?);
    }
    judge(options, &attacks, &measured, killed)
}

fn measure(setup: &mut Setup, attacks: &[Attack], rounds: usize) -> Result<Vec<Measured>> {
    let mut measured: Vec<Measured> = attacks.iter().map(|_| Measured::default()).collect();
    for round in 0..rounds {
        for (attack, measured) in attacks.iter().zip(&mut measured) {
            measured.quiet.push(setup.play(Attack::None)?);
            let row = setup.play(*attack)?;
            println!(
                "round {} {:<32} p50 {:>7.2} p99 {:>8.2} ms (UDP {:.2}, TCP {:.2}), lost {}",
                round + 1,
                row.attack,
                row.b_p50_ms,
                row.b_p99_ms,
                row.b_p99_ms_by_transport[0],
                row.b_p99_ms_by_transport[1],
                row.b_lost
            );
            measured.attacked.push(row);
        }
    }
    Ok(measured)
}

fn judge(
    options: &Options,
    attacks: &[Attack],
    measured: &[Measured],
    killed: Option<Killed>,
) -> Result<()> {
    println!(
        "\n{:<32} {:>7} {:>5} {:>8} {:>5} {:>8} {:>8} {:>9} {:>7}",
        "attack", "b sent", "lost", "not open", "late", "p50 ms", "p99 ms", "quiet p99", "factor"
    );
    let mut rows = Vec::new();
    let mut broken = Vec::new();
    for (attack, of) in attacks.iter().zip(measured) {
        let sum = |field: fn(&Row) -> u64| of.attacked.iter().map(field).sum::<u64>();
        let middle = |rows: &[Row], field: fn(&Row) -> f64| median(rows.iter().map(field));
        let quiet = Quiet {
            p99_ms: middle(&of.quiet, |row| row.b_p99_ms),
        };
        let p50 = middle(&of.attacked, |row| row.b_p50_ms);
        let p99 = middle(&of.attacked, |row| row.b_p99_ms);
        let factor = quiet.factor(p99);
        let limit = if attack.is_udp_flood() || *attack == Attack::AgentConnections {
            CPU_FACTOR
        } else {
            FACTOR
        };
        let memory: [u64; 2] = [0, 1].map(|program| {
            let used = of.attacked.iter().map(|row| row.rss_mb[program]);
            used.max().unwrap_or(0)
        });
        println!(
            "{:<32} {:>7} {:>5} {:>8} {:>5} {:>8.2} {:>8.2} {:>9.2} {:>7.1}",
            attack.name(),
            sum(|row| row.b_sent),
            sum(|row| row.b_lost),
            sum(|row| row.b_not_open),
            sum(|row| row.b_late),
            p50,
            p99,
            quiet.p99_ms,
            factor
        );
        broken.extend(of.attacked.iter().filter_map(Row::losses));
        if factor > limit {
            broken.push(format!(
                "{}: the 99th percentile is {factor:.1} times that of a quiet node, more than {limit}",
                attack.name()
            ));
        }
        rows.push(json!({
            "attack": attack.name(),
            "b_sent": sum(|row| row.b_sent),
            "b_lost": sum(|row| row.b_lost + row.b_wrong),
            "b_not_open": sum(|row| row.b_not_open),
            "b_late": sum(|row| row.b_late),
            "b_p50_ms": p50,
            "b_p99_ms": p99,
            "quiet_p99_ms": quiet.p99_ms,
            "factor": factor,
            "rss_mb": memory[0],
            "agent_rss_mb": memory[1],
            "strikes": sum(|row| row.strikes),
        }));
    }
    if let Some(killed) = killed {
        println!(
            "{KILLED}: {} times, b sent {}, lost {}, the last of them sent {} ms after; {} of them \
             were not in flight there; p99 {:.2} ms",
            killed.times,
            killed.b_sent,
            killed.b_lost,
            killed.last_lost_ms,
            killed.b_lost_later,
            killed.b_p99_ms
        );
        broken.extend(killed.losses());
        let mut row = serde_json::to_value(&killed)?;
        row["attack"] = KILLED.into();
        rows.push(row);
    }
    if let Some(directory) = options.json.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(
        &options.json,
        serde_json::to_string_pretty(&json!({ "rounds": options.rounds, "rows": rows }))?,
    )
    .with_context(|| format!("write {}", options.json.display()))?;
    println!("written to {}", options.json.display());
    ensure!(broken.is_empty(), "broken:\n{}", broken.join("\n"));
    Ok(())
}
