//! A Cilium agent that restarts, is killed during its start, or stays down. Allowed names are
//! answered throughout.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::cilium::restart::Start;
use holdfast_e2e::cilium::setup::{
    SOON, WEB, ask, expect_no_offence, first_answer, hurried, options, world,
};
use holdfast_e2e::cilium::world::World;
use holdfast_e2e::cilium::{CiliumAgent, place};
use holdfast_e2e::lab::{DNS4, DNS6, web4};
use holdfast_e2e::load::Load;
use holdfast_e2e::{Lab, Query, eventually, with_lab};
use serde_json::Value;
use shared_maps::lxc::{LxcKey, LxcValue};
use shared_maps::user::{Map, lxc_key};

/// Number of threads that send queries at the same time.
const ASKERS: u32 = 3;
/// Numbers of starts of the agent with maps, and without.
const STARTS: [(bool, usize); 2] = [(true, 8), (false, 4)];

fn status(lab: &Lab, name: &str, pointer: &str) -> Result<Value> {
    let status = lab.sdp_json(name, &["status"])?;
    let found = status.pointer(pointer);
    Ok(found
        .with_context(|| format!("{pointer} in {status}"))?
        .clone())
}

fn start<'a>(lab: &'a Lab, world: &'a World, maps: bool) -> Start<'a> {
    Start {
        lab,
        world,
        manner: hurried(),
        maps,
        phase: Duration::from_millis(250),
    }
}

#[test]
fn no_start_of_the_agent_costs_a_query_that_policy_allows() {
    for (maps, starts) in STARTS {
        with_lab(|lab| {
            lab.zone.set("www.good.test", &[web4(10)], 600);
            place::redirect(lab)?;
            let world = world(lab);
            let mut options = options(lab, "one")?;
            if maps {
                place::pin_lxc(lab, &world, &[&lab.a, &lab.b])?;
                place::pin_ipcache(lab, &world)?;
            } else {
                options.bpf_root = Some(lab.directory().join("no-bpf"));
            }
            let mut agent = CiliumAgent::start(&lab.node, world.clone(), hurried())?;
            let good = Query::a("www.good.test", DNS4);
            let (_sdp, _) = first_answer(lab, &options, &good)?;
            let load = Load::start(&lab.a, &good, web4(10), ASKERS)?;
            load.flows(50)?;
            for number in 0..starts {
                drop(agent);
                let start = start(lab, &world, maps);
                if maps && number % 3 == 1 {
                    // Twice, so that another map follows a map that was never filled.
                    start.killed_after_the_map()?;
                    start.killed_after_the_map()?;
                }
                agent = start.whole()?;
            }
            let right = load.finish()?;
            println!("{starts} starts of the agent, maps {maps}: {right} answered, 0 not");
            eventually("the agent's own word is enough", SOON, || {
                let left = status(lab, "one", "/maps/former_entries")?;
                ensure!(left == 0, "{left} entries of the previous map");
                Ok(())
            })?;
            ask(&lab.a, "www.bad.test", DNS4)?.expect_code(ResponseCode::Refused)?;
            ask(&lab.b, "www.good.test", DNS4)?.expect_code(ResponseCode::Refused)?;
            expect_no_offence(&agent)
        });
    }
}

/// Sets up redirection, both pods in the maps, and an agent that serves them.
fn under_cilium(lab: &Lab) -> Result<(World, Map<LxcKey, LxcValue>, CiliumAgent)> {
    place::redirect(lab)?;
    let world = world(lab);
    let lxc = place::pin_lxc(lab, &world, &[&lab.a, &lab.b])?;
    place::pin_ipcache(lab, &world)?;
    let agent = CiliumAgent::start(&lab.node, world.clone(), hurried())?;
    Ok((world, lxc, agent))
}

#[test]
fn an_address_that_changes_owner_during_the_agents_start_is_not_answered_as_before() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let (world, lxc, agent) = under_cilium(lab)?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        drop(agent);
        let agent = start(lab, &world, true).without_rules()?;
        let kept = || status(lab, "one", "/agent/kept_endpoints");
        ensure!(kept()? == 1, "rules of {} endpoints are kept", kept()?);
        ask(&lab.a, "www.good.test", DNS4)?.expect(web4(10))?;

        // A new map with one server only, under another identity.
        drop(agent);
        place::repin_ipcache(lab)?;
        let other = World {
            prefixes: vec![(DNS4.into(), WEB)],
            ..World::default()
        };
        place::pin_ipcache(lab, &other)?;
        eventually("the new owner", SOON, || {
            ask(&lab.a, "www.good.test", DNS4)?.expect_code(ResponseCode::Refused)
        })?;
        ask(&lab.a, "www.good.test", DNS6)?.expect(web4(10))?;

        // The address gets another endpoint, which has no rules.
        let mut entry = lxc.get(&lxc_key(lab.a.v4.into()))?.context("an entry")?;
        entry.sec_id += 1;
        for address in [lab.a.v4.into(), lab.a.v6.into()] {
            lxc.set(&lxc_key(address), &entry)?;
        }
        eventually("no rules are of this instance", SOON, || {
            ask(&lab.a, "www.good.test", DNS6)?.expect_code(ResponseCode::Refused)
        })?;
        ensure!(status(lab, "one", "/endpoints_with_rules")? == 0);
        Ok(())
    });
}

#[test]
fn a_policy_of_any_protocol_loses_only_its_sctp_rows() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        lab.a.ask(&good.tcp())?.expect(web4(10))?;
        ensure!(status(lab, "one", "/agent/refused_rules")?.is_null());
        ensure!(
            status(lab, "one", "/agent/skipped_rows")? == 1,
            "one for each rule of an endpoint"
        );
        expect_no_offence(&agent)
    });
}

/// Like Cilium's built-in proxy, the other proxy has rules and no slots.
#[test]
fn a_proxy_without_rules_leaves_queries_to_the_one_that_has_them() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let (world, lxc, builtin) = under_cilium(lab)?;
        let good = Query::a("www.good.test", DNS4);
        let other = options(lab, "other")?.flag("--steering=off");
        let (_other, _) = first_answer(lab, &other, &good)?;
        let load = Load::start(&lab.a, &good, web4(10), ASKERS)?;
        load.flows(20)?;

        // The late proxy finds no agent, and no files.
        let at = ([127, 0, 0, 1], 10_995).into();
        let journal = lab.directory().join("another-journal");
        let mut late = options(lab, "late")?;
        late.metrics += 1;
        let late = late
            .flag(&format!("--agent-address=tcp://{at}"))
            .flag(&format!("--journal-dir={}", journal.display()));
        let log = lab.directory().join("log/sdp-late.log");
        let _late = holdfast_e2e::Program::start("holdfast-sdp", lab.sdp_command(&late)?, &log)?;
        let waits = |why: &str| {
            eventually("it waits", SOON, || {
                let text = status(lab, "late", "/steering/text")?;
                ensure!(
                    text.as_str().is_some_and(|text| text.contains(why)),
                    "{text}"
                );
                ensure!(status(lab, "late", "/steering/on")? == false);
                Ok(())
            })
        };
        waits("neither the agent nor a file has given rules yet")?;
        load.flows(200)?;
        let agent = CiliumAgent::start_at(&lab.node, at, world.without_rules(), hurried())?;
        waits("the agent has not sent rules of any endpoint yet")?;
        load.flows(200)?;
        agent.change(|to| *to = world.clone());
        eventually("it has slots", SOON, || {
            ensure!(status(lab, "late", "/steering/on")? == true);
            ensure!(status(lab, "late", "/ready")? == true);
            Ok(())
        })?;
        load.flows(200)?;
        let right = load.finish()?;
        println!("beside a proxy that waits for rules: {right} answered, 0 not");
        // The agent removes the endpoint with the only rules and ends. After that, the proxy could
        // only refuse queries.
        drop(agent);
        eventually("it has noticed", SOON, || {
            let connection = status(lab, "late", "/agent/connection")?;
            ensure!(connection.is_null(), "{connection}");
            Ok(())
        })?;
        let mut entry = lxc.get(&lxc_key(lab.a.v4.into()))?.context("an entry")?;
        entry.sec_id += 1;
        for address in [lab.a.v4.into(), lab.a.v6.into()] {
            lxc.set(&lxc_key(address), &entry)?;
        }
        waits("neither the agent nor a file has given rules yet")?;
        expect_no_offence(&builtin)
    });
}

#[test]
fn a_start_without_agent_uses_the_last_rules_of_the_stream() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("www.old.test", &[web4(11)], 600);
        place::redirect(lab)?;
        let world = world(lab);
        place::pin_lxc(lab, &world, &[&lab.a, &lab.b])?;
        place::pin_ipcache(lab, &world)?;
        // The file of an earlier policy, as the agent leaves it until the next answer.
        let web = &world.endpoints[0];
        let old = "^(?:www[.]old[.]test[.])$";
        place::write_file(lab, &lab.a, web, old, &[DNS4, DNS6])?;
        let agent = CiliumAgent::start(&lab.node, world.clone(), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        eventually("kept on disk", SOON, || {
            let kept = lab.directory().join("journal/cilium-rules");
            ensure!(kept.exists(), "not yet");
            Ok(())
        })?;
        drop(agent);
        sdp.kill_9()?;

        let (sdp, took) = first_answer(lab, &options(lab, "two")?, &good)?;
        println!("agent away, its file old: first right answer after {took:?}");
        ask(&lab.a, "www.old.test", DNS4)?.expect_code(ResponseCode::Refused)?;
        sdp.kill_9()?;

        // The agent was killed right after it had created an empty map.
        place::repin_ipcache(lab)?;
        let (sdp, _) = first_answer(lab, &options(lab, "three")?, &good)?;
        sdp.kill_9()?;

        // A file that the agent wrote after the end of the stream is newer.
        place::write_file(lab, &lab.a, web, old, &[DNS4, DNS6])?;
        let command = lab.sdp_command(&options(lab, "four")?)?;
        let log = lab.directory().join("log/sdp-four.log");
        let _sdp = holdfast_e2e::Program::start("holdfast-sdp", command, &log)?;
        eventually("the file's rules", SOON, || {
            ask(&lab.a, "www.old.test", DNS4)?.expect(web4(11))
        })?;
        ask(&lab.a, "www.good.test", DNS4)?.expect_code(ResponseCode::Refused)?;
        Ok(())
    });
}
