//! The promises R1 to R4 and R9 in a short form of `cargo xtask bench ha`.
use anyhow::{Result, ensure};
use holdfast_e2e::ha::{Act, Redirect, Size};
use holdfast_e2e::{SdpOptions, config, with_lab};

/// Each act keeps its promise with each redirect.
fn holds(acts: &[Act], redirects: &[Redirect]) {
    for act in acts {
        for redirect in redirects {
            holds_at(*act, *redirect, &Size::short());
        }
    }
}

fn holds_at(act: Act, redirect: Redirect, size: &Size) {
    let rows = act.play(redirect, size).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(!rows.is_empty());
    for row in rows {
        assert!(row.holds, "{row:#?}");
        println!(
            "{}: {} sent, {} lost; {}",
            row.name, row.sent, row.lost, row.note
        );
    }
}

#[test]
fn the_load_detects_lost_and_wrong_answers() {
    holds(&[Act::Broken], &[Redirect::Own]);
}

#[test]
fn r1_an_agent_killed_loses_no_query() {
    holds(&[Act::AgentKilled], &[Redirect::Own]);
}

#[test]
fn r1_an_agent_restarted_loses_no_query() {
    holds(&[Act::AgentRestarted], &[Redirect::Own]);
}

#[test]
fn r1_an_agent_in_a_crash_loop_loses_no_query() {
    holds(&[Act::AgentCrashes], &[Redirect::Own]);
}

#[test]
fn r1_a_standby_opens_what_is_asked_while_the_owner_is_gone() {
    holds(&[Act::OwnerKilled, Act::OwnerKilledAlone], &[Redirect::Own]);
}

#[test]
fn r1_the_builtin_proxy_starts_and_stops_without_loss() {
    holds(&[Act::BuiltinFlipped], &[Redirect::Own, Redirect::Tproxy]);
}

#[test]
fn r2_a_proxy_answers_at_once_without_an_agent() {
    holds(&[Act::ColdStart], &[Redirect::Own, Redirect::Tproxy]);
}

#[test]
fn r3_replicas_replace_one_another_without_loss() {
    holds(&[Act::Rolled], &[Redirect::Own, Redirect::Tproxy]);
}

#[test]
fn r3_replicas_replace_one_another_without_an_agent() {
    holds(&[Act::RolledWithoutAgent], &[Redirect::Own]);
}

#[test]
fn pods_on_a_bridge_lose_no_query_while_proxies_or_the_agent_are_replaced() {
    holds(
        &[Act::Rolled, Act::RolledWithoutAgent, Act::AgentKilled],
        &[Redirect::Bridged],
    );
}

#[test]
fn servers_behind_a_service_address_lose_no_query_while_proxies_or_the_agent_are_replaced() {
    holds(
        &[Act::Rolled, Act::RolledWithoutAgent, Act::AgentKilled],
        &[Redirect::Translated],
    );
}

#[test]
fn r3_the_previous_version_and_this_one_replace_one_another_without_loss() {
    let previous = config::previous_sdp().expect("the previous version");
    let size = Size {
        previous: Some(previous),
        ..Size::short()
    };
    holds_at(Act::RolledVersions, Redirect::Own, &size);
}

#[test]
fn r3_a_proxy_without_slots_takes_over_while_the_only_replica_restarts() {
    holds(&[Act::RolledBesideOther], &[Redirect::Tproxy]);
}

#[test]
fn r3_replicas_replace_one_another_without_steering_maps() {
    holds(&[Act::RolledWithoutMaps], &[Redirect::Tproxy]);
}

#[test]
fn r4_a_killed_replica_loses_only_its_own_queries() {
    holds(&[Act::Killed], &[Redirect::Own, Redirect::Tproxy]);
}

#[test]
fn r4_a_stopped_replica_is_bypassed_within_a_second() {
    holds(&[Act::Stopped], &[Redirect::Own, Redirect::Tproxy]);
}

#[test]
fn r4_the_only_proxy_killed_loses_only_its_own_queries_with_the_charts_values() {
    holds(&[Act::OnlyOneKilled], &[Redirect::Own]);
}

#[test]
fn r9_services_answer_while_their_pods_are_replaced_without_an_agent() {
    let size = Size {
        faults: 1,
        ..Size::short()
    };
    holds_at(Act::BackendsReplaced, Redirect::Services, &size);
}

#[test]
fn proxies_bring_steering_where_the_agent_has_none() {
    holds(&[Act::Rolled, Act::Stopped], &[Redirect::Alone]);
}

#[test]
fn transparent_mode_keeps_the_promises() {
    holds(
        &[
            Act::AgentKilled,
            Act::AgentCrashes,
            Act::BuiltinFlipped,
            Act::ColdStart,
            Act::Rolled,
            Act::Killed,
        ],
        &[Redirect::Transparent],
    );
}

/// More replicas than slots, each killed as soon as it is ready.
#[test]
fn replicas_that_die_quickly_do_not_occupy_all_slots() {
    with_lab(|lab| {
        let _agent = lab.start_agent(&Default::default())?;
        for round in 0..12 {
            let options = SdpOptions::new(&format!("brief{round}"), 9970).flag("--workers=4");
            // Only a replica with a slot is ready.
            let replica = lab.start_sdp(&options)?;
            let slots = joined(lab, &options.name)?;
            ensure!(slots == 4, "{slots} slots in round {round}");
            replica.kill_9()?;
        }
        Ok(())
    });
}

fn joined(lab: &holdfast_e2e::Lab, name: &str) -> Result<usize> {
    let status = lab.sdp_json(name, &["status"])?;
    let slots = status.pointer("/steering/slots").and_then(|s| s.as_array());
    Ok(slots.map_or(0, Vec::len))
}
