//! `cargo xtask bench ha`: checks the promises R1 to R4 and R9 under their load. Fails if a promise
//! is broken.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use holdfast_e2e::ha::{Act, Redirect, Row, Size};
use serde_json::json;

/// High availability: what happens to queries when agent and proxies start and stop.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only acts whose name contains this
    filter: Option<String>,
    /// Seconds instead of minutes, with little load
    #[arg(long)]
    short: bool,
    /// holdfast-sdp of the previous version
    #[arg(long)]
    previous: Option<PathBuf>,
    /// UDP queries per second
    #[arg(long)]
    udp_rate: Option<u32>,
    /// TCP connections per second
    #[arg(long)]
    tcp_rate: Option<u32>,
    /// Faults of an act on a full node, at most 20
    #[arg(long)]
    faults: Option<u32>,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/ha.json")]
    json: PathBuf,
}

/// Acts, each with its redirect.
const PLAYED: [(Act, Redirect); 41] = [
    (Act::Broken, Redirect::Own),
    (Act::Calm, Redirect::Own),
    (Act::AgentKilled, Redirect::Own),
    (Act::AgentRestarted, Redirect::Own),
    (Act::OwnerKilled, Redirect::Own),
    (Act::OwnerKilledAlone, Redirect::Own),
    (Act::OwnerHung, Redirect::Own),
    (Act::AgentCrashes, Redirect::Own),
    (Act::BuiltinFlipped, Redirect::Own),
    (Act::ColdStart, Redirect::Own),
    (Act::Rolled, Redirect::Own),
    (Act::RolledWithoutAgent, Redirect::Own),
    (Act::RolledVersions, Redirect::Own),
    (Act::Killed, Redirect::Own),
    (Act::Stopped, Redirect::Own),
    (Act::OnlyOneKilled, Redirect::Own),
    (Act::AgentKilled, Redirect::Filters),
    (Act::AgentRestarted, Redirect::Filters),
    (Act::Rolled, Redirect::Filters),
    (Act::AgentKilled, Redirect::Tproxy),
    (Act::BuiltinFlipped, Redirect::Tproxy),
    (Act::ColdStart, Redirect::Tproxy),
    (Act::Rolled, Redirect::Tproxy),
    (Act::RolledBesideOther, Redirect::Tproxy),
    (Act::RolledWithoutMaps, Redirect::Tproxy),
    (Act::Killed, Redirect::Tproxy),
    (Act::Stopped, Redirect::Tproxy),
    (Act::AgentKilled, Redirect::Transparent),
    (Act::BuiltinFlipped, Redirect::Transparent),
    (Act::Rolled, Redirect::Transparent),
    (Act::Killed, Redirect::Transparent),
    (Act::Rolled, Redirect::Alone),
    (Act::Stopped, Redirect::Alone),
    (Act::AgentKilled, Redirect::Bridged),
    (Act::Rolled, Redirect::Bridged),
    (Act::RolledWithoutAgent, Redirect::Bridged),
    (Act::AgentKilled, Redirect::Translated),
    (Act::BuiltinFlipped, Redirect::Translated),
    (Act::Rolled, Redirect::Translated),
    (Act::RolledWithoutAgent, Redirect::Translated),
    (Act::BackendsReplaced, Redirect::Services),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut size = if options.short {
        Size::short()
    } else {
        Size::full()
    };
    size.previous = options.previous.clone();
    size.udp_rate = options.udp_rate.unwrap_or(size.udp_rate);
    size.tcp_rate = options.tcp_rate.unwrap_or(size.tcp_rate);
    size.faults = options.faults.unwrap_or(size.faults);
    let wanted = |name: &str| {
        options
            .filter
            .as_ref()
            .is_none_or(|f| name.contains(f.as_str()))
    };
    let mut rows = Vec::new();
    let mut failed = Vec::new();
    for (act, redirect) in PLAYED {
        let name = format!("{}, {}", act.name(), redirect.name());
        if !wanted(&name) {
            continue;
        }
        match act.play(redirect, &size) {
            Ok(played) => {
                for row in &played {
                    print(row);
                    failed.extend((!row.holds).then(|| row.name.clone()));
                }
                rows.extend(played);
            }
            Err(error) => {
                eprintln!("{name}: {error:#}");
                failed.push(name);
            }
        }
    }
    report(options, &rows)?;
    ensure!(failed.is_empty(), "broken: {}", failed.join("; "));
    ensure!(
        !rows.is_empty(),
        "nothing played: no name contains the filter"
    );
    Ok(())
}

fn print(row: &Row) {
    println!(
        "{:<52} sent {:>7} right {:>7} wrong {:>3} lost {:>5}  {}  {}",
        row.name,
        row.sent,
        row.right,
        row.wrong,
        row.lost,
        if row.holds { "holds " } else { "BROKEN" },
        row.note
    );
    for sample in row.samples.iter().take(if row.holds { 0 } else { 6 }) {
        println!("    {sample}");
    }
}

fn report(options: &Options, rows: &[Row]) -> Result<()> {
    println!(
        "\n{:<52} {:>8} {:>8} {:>6} {:>6} {:>7}  promise",
        "scenario", "sent", "right", "wrong", "lost", ""
    );
    for row in rows {
        println!(
            "{:<52} {:>8} {:>8} {:>6} {:>6} {:>7}  {}",
            row.name,
            row.sent,
            row.right,
            row.wrong,
            row.lost,
            if row.holds { "holds" } else { "BROKEN" },
            row.promise
        );
    }
    if let Some(directory) = options.json.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let figures = json!({ "scenarios": rows });
    std::fs::write(&options.json, serde_json::to_string_pretty(&figures)?)
        .with_context(|| format!("write {}", options.json.display()))?;
    println!("written to {}", options.json.display());
    Ok(())
}
