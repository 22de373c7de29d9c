//! An attack by one pod costs another pod nothing. Every attack runs in a short form here, and in
//! full with `cargo xtask test --tier hostile`.
use anyhow::{Result, ensure};
use holdfast_e2e::hostile::{Attack, Setup, Size};

/// Highest resident memory of proxy and agent, MiB, as in the guide's "Limits of one pod"
/// (docs/src/security.md).
const MEMORY_MB: [u64; 2] = [512, 512];

fn plays(size: &Size) -> Result<()> {
    let mut setup = Setup::new(size)?;
    let mut losses = plays_all(&mut setup, &Attack::ALL)?;
    if let Err(error) = setup.learns_while_the_agent_is_away() {
        losses.push(format!("names while the agent is away: {error:#}"));
    }
    let killed = setup.the_only_proxy_is_killed(2)?;
    println!("{killed:?}");
    losses.extend(killed.losses());
    ensure!(losses.is_empty(), "pod B lost:\n{}", losses.join("\n"));
    Ok(())
}

fn plays_on_a_bridge(size: &Size) -> Result<()> {
    let mut setup = Setup::on_bridge(size)?;
    let losses = plays_all(&mut setup, &Attack::ON_BRIDGE)?;
    ensure!(losses.is_empty(), "pod B lost:\n{}", losses.join("\n"));
    Ok(())
}

fn plays_all(setup: &mut Setup, attacks: &[Attack]) -> Result<Vec<String>> {
    let quiet = setup.play(Attack::None)?;
    ensure!(quiet.losses().is_none(), "before any attack: {quiet:?}");
    let mut losses = Vec::new();
    for attack in attacks.iter().copied() {
        let row = match setup.play(attack) {
            Ok(row) => row,
            Err(error) => {
                losses.push(format!("{}: {error:#}", attack.name()));
                continue;
            }
        };
        println!(
            "{:<32} struck {:>7}  b sent {:>5} lost {} wrong {} fresh {} not open {} late {} p50 {:.1} p99 {:.1} ms, memory {:?} MiB",
            row.attack,
            row.strikes,
            row.b_sent,
            row.b_lost,
            row.b_wrong,
            row.b_fresh,
            row.b_not_open,
            row.b_late,
            row.b_p50_ms,
            row.b_p99_ms,
            row.rss_mb
        );
        losses.extend(row.losses());
        for (program, (used, limit)) in ["proxy", "agent"]
            .iter()
            .zip(row.rss_mb.iter().zip(MEMORY_MB))
        {
            if *used > limit {
                losses.push(format!(
                    "{}: the {program} used {used} MiB, more than {limit}",
                    row.attack
                ));
            }
        }
    }
    Ok(losses)
}

#[test]
fn a_hostile_pod_costs_another_nothing_in_short_form() {
    plays(&Size::short()).unwrap_or_else(|error| panic!("{error:?}"));
}

#[test]
fn a_hostile_pod_on_a_bridge_costs_another_nothing_in_short_form() {
    plays_on_a_bridge(&Size::short()).unwrap_or_else(|error| panic!("{error:?}"));
}

#[test]
#[ignore = "minutes: cargo xtask test --tier hostile"]
fn a_hostile_pod_on_a_bridge_costs_another_nothing() {
    plays_on_a_bridge(&Size::full()).unwrap_or_else(|error| panic!("{error:?}"));
}

#[test]
#[ignore = "minutes: cargo xtask test --tier hostile"]
fn a_hostile_pod_costs_another_nothing() {
    plays(&Size::full()).unwrap_or_else(|error| panic!("{error:?}"));
}
