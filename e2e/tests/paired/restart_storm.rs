//! kill -9 of the agent at random times, within plans, just after a confirmation and during its
//! start, under load and edits of policy and endpoints. Pods are not affected.
use anyhow::{Result, ensure};
use holdfast_e2e::storm::Successor;
use holdfast_e2e::{config, storm, with_lab};

fn play(kills: u32, successor: Successor) {
    with_lab(|lab| -> Result<()> {
        let seed = config::seed();
        eprintln!("HOLDFAST_SEED={seed} plays the same");
        let outcome = storm::play(lab, seed, kills, successor)?;
        eprintln!("{outcome:?}");
        ensure!(outcome.kills >= kills, "{outcome:?}");
        ensure!(outcome.within_plan >= kills / 10, "{outcome:?}");
        ensure!(outcome.after_ack * 2 >= outcome.kills, "{outcome:?}");
        ensure!(outcome.allowed > 0 && outcome.denied > 0, "{outcome:?}");
        ensure!(outcome.asked > 0, "{outcome:?}");
        Ok(())
    });
}

#[test]
fn ten_kills_do_not_affect_pods() {
    play(10, Successor::Restart);
}

#[test]
#[ignore = "nightly: a quarter of an hour"]
fn two_hundred_kills_do_not_affect_pods() {
    play(200, Successor::Restart);
}

#[test]
fn ten_owners_are_killed_beside_a_standby() {
    play(10, Successor::Standby);
}

#[test]
#[ignore = "nightly: a quarter of an hour"]
fn two_hundred_owners_are_killed_beside_a_standby() {
    play(200, Successor::Standby);
}
