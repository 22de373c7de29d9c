//! The proxy under a Cilium agent: the chart's ConfigMap, TPROXY, with and without mounts.
use std::fs::Permissions;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::cilium::place::PROXY_PORT;
use holdfast_e2e::cilium::setup::{
    SERVER, SOON, WEB, ask, expect_no_offence, expect_prompt, first_answer, hurried, options, world,
};
use holdfast_e2e::cilium::world::Rule;
use holdfast_e2e::cilium::{CiliumAgent, place};
use holdfast_e2e::lab::{DNS4, DNS6, web4, web6};
use holdfast_e2e::{Query, config, eventually, until, with_lab};
use serde_json::Value;
use shared_maps::ipcache;
use shared_maps::steering::{LINK_NAME, SLOTS_NAME, SOCKS_NAME};

#[test]
fn works_with_the_agents_tables_alone() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        lab.zone.set("www.more.test", &[web4(11)], 600);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, took) = first_answer(lab, &options(lab, "one")?, &good)?;
        println!("agent up, nothing mounted: first right answer after {took:?}");
        expect_prompt(took)?;

        let learned = agent.seen().learned("www.good.test.");
        let first = learned.first().context("a mapping")?;
        ensure!(first.record_ip == [b"203.0.113.10"], "{first:?}");
        ensure!(
            first.source_ip == lab.a.v4.to_string().into_bytes(),
            "{first:?}"
        );
        ensure!(first.source_identity == WEB, "{first:?}");

        for server in [DNS4, DNS6] {
            for tcp in [false, true] {
                let over = |query: Query| if tcp { query.tcp() } else { query };
                let aaaa = over(Query::aaaa("www.good.test", server));
                lab.a.ask(&aaaa)?.expect(web6(10))?;
                let bad = over(Query::a("www.bad.test", server));
                lab.a.ask(&bad)?.expect_code(ResponseCode::Refused)?;
                let good = over(Query::a("www.good.test", server));
                lab.b.ask(&good)?.expect_code(ResponseCode::Refused)?;
            }
        }

        // More rules; then none: first in the explicit form, then by absence.
        let refused = |name: &str| {
            eventually("refused", SOON, || {
                ask(&lab.a, name, DNS4)?.expect_code(ResponseCode::Refused)
            })
        };
        let allowed = |name: &str, host: u8| {
            eventually("allowed", SOON, || {
                ask(&lab.a, name, DNS4)?.expect(web4(host))
            })
        };
        agent.change(|world| {
            let more = Rule::new(SERVER, &["www.more.test"]);
            world.rules.entry(WEB).or_default().push(more);
        });
        allowed("www.more.test", 11)?;
        agent.change(|world| {
            world.rules.insert(WEB, vec![Rule::new(0, &["."])]);
        });
        refused("www.good.test")?;
        agent.change(|world| {
            world
                .rules
                .insert(WEB, vec![Rule::new(SERVER, &["*.good.test"])]);
        });
        allowed("www.good.test", 10)?;
        agent.change(|world| {
            world.rules.clear();
        });
        refused("www.good.test")?;

        let pings = || Ok(agent.seen().answered_pings);
        until("three pings are answered", SOON, pings, |pings| *pings >= 3)?;
        let seen = agent.seen();
        ensure!(seen.connections == 1, "{} connections", seen.connections);
        expect_no_offence(&agent)
    });
}

#[test]
fn a_returned_agent_gets_what_it_missed() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("away.good.test", &[web4(12)], 600);
        lab.zone.set("short.good.test", &[web4(13)], 1);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        drop(agent);

        // The proxy goes on, with the tables and rules that the agent left.
        ask(&lab.a, "away.good.test", DNS4)?.expect(web4(12))?;
        ask(&lab.a, "short.good.test", DNS4)?.expect(web4(13))?;
        ask(&lab.a, "www.bad.test", DNS4)?.expect_code(ResponseCode::Refused)?;

        // The new agent has no endpoint yet, as during its restoration.
        let mut young = world(lab);
        let known = std::mem::take(&mut young.endpoints);
        let agent = CiliumAgent::start(&lab.node, young, hurried())?;
        let tried = |name: &str| agent.seen().learned(name).len();
        let reports = || Ok(tried("away.good.test."));
        until("the name is reported again", SOON, reports, |n| *n > 0)?;
        agent.change(|world| world.endpoints = known);
        let before = tried("away.good.test.");
        until("and once more", SOON, reports, |n| *n > before)?;
        for (name, address) in [
            ("www.good.test.", &b"203.0.113.10"[..]),
            ("away.good.test.", b"203.0.113.12"),
            ("short.good.test.", b"203.0.113.13"),
        ] {
            let learned = agent.seen().learned(name);
            let last = learned
                .last()
                .with_context(|| format!("{name} is missing"))?;
            ensure!(last.record_ip == [address], "{last:?}");
            ensure!((1..=600).contains(&last.ttl), "{last:?}");
        }
        ask(&lab.a, "www.good.test", DNS4)?.expect(web4(10))?;
        expect_no_offence(&agent)
    });
}

/// Answers that the agent has acknowledged are released while it answers nothing, and are still
/// sent to it.
#[test]
fn an_answer_that_the_agent_has_acknowledged_does_not_wait_for_it() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("new.good.test", &[web4(11)], 600);
        place::redirect(lab)?;
        let world = world(lab);
        let _lxc = place::pin_lxc(lab, &world, &[&lab.a, &lab.b])?;
        let _ipcache = place::pin_ipcache(lab, &world)?;
        let agent = CiliumAgent::start(&lab.node, world, hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        let released = || lab.metric(9971, "holdfast_mapping_leased_total", "");
        // The first answers may arrive before the agent is connected, or be acknowledged late.
        eventually("an acknowledged answer", SOON, || {
            let before = released()?;
            lab.a.ask(&good)?.expect(web4(10))?;
            ensure!(released()? > before, "waited");
            Ok(())
        })?;
        agent.hang(true);
        let sent = || agent.seen().learned("www.good.test.").len();
        let (before, was_sent) = (released()?, sent());
        for _ in 0..3 {
            lab.a.ask(&good)?.expect(web4(10))?;
        }
        ensure!((released()? - before - 3.0).abs() < 0.5, "some waited");
        until(
            "each is sent",
            SOON,
            || Ok(sent()),
            |sent| *sent >= was_sent + 3,
        )?;
        ask(&lab.a, "new.good.test", DNS4)?.expect(web4(11))?;
        ensure!(
            (released()? - before - 3.0).abs() < 0.5,
            "a new one did not"
        );
        agent.hang(false);
        expect_no_offence(&agent)
    });
}

/// The agent accepts mappings and answers nothing. The queue has one entry per name, however long
/// this lasts, and is sent afterwards.
#[test]
fn an_agent_that_never_answers_causes_no_growth_and_loses_no_mapping() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let names: Vec<String> = (0..40).map(|n| format!("n{n}.good.test")).collect();
        for name in &names {
            lab.zone.set(name, &[web4(11)], 600);
        }
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        agent.hang(true);
        // Longer than the time limit of a call, and many times the interval of refreshes.
        let until = Instant::now() + Duration::from_secs(7);
        while Instant::now() < until {
            for name in &names {
                ask(&lab.a, name, DNS4)?.expect(web4(11))?;
            }
        }
        let waiting = || -> Result<(bool, u64)> {
            let status = lab.sdp_json("one", &["status"])?;
            let of = |field| status.pointer(&format!("/mappings/{field}"));
            let many = ["queued", "in_flight"].map(|field| of(field).and_then(Value::as_u64));
            let [Some(queued), Some(in_flight)] = many else {
                bail!("{status}");
            };
            let hung = of("agent_hung").and_then(Value::as_bool);
            Ok((hung.context("agent_hung")?, queued + in_flight))
        };
        let (hung, many) = waiting()?;
        ensure!(hung, "does not count as hung");
        // Each name may wait for its first report, its repeated report, and a result, twice.
        ensure!(many <= 4 * 40, "{many} mappings wait");
        let errors = lab.metric(9971, "holdfast_fqdn_mapping_sync_errors_total", "")?;
        ensure!(errors > 0.0, "calls without a result are not counted");

        agent.hang(false);
        eventually("all is sent", SOON, || {
            let (hung, many) = waiting()?;
            ensure!(!hung && many == 0, "hung: {hung}, {many} mappings wait");
            Ok(())
        })?;
        for name in &names {
            ensure!(
                !agent.seen().learned(&format!("{name}.")).is_empty(),
                "{name}"
            );
        }
        expect_no_offence(&agent)
    });
}

/// No Holdfast agent exists: the proxy loads the program itself, and reports its state.
#[test]
fn the_status_of_steering_is_correct() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let link = lab.bpf_root().join(shared_maps::pin::LINKS).join(LINK_NAME);
        let steers = |name: &str, on: bool| {
            eventually("steering", SOON, || {
                let status = lab.sdp_json(name, &["status"])?;
                let said = status.pointer("/steering/on");
                ensure!(said == Some(&on.into()), "{status}");
                ensure!(status.get("ready") == Some(&true.into()), "{status}");
                Ok(())
            })
        };
        let maps = [lab.pin(SLOTS_NAME), lab.pin(SOCKS_NAME)];
        let lost: [&[_]; 2] = [std::slice::from_ref(&link), &maps];
        for (number, pins) in lost.iter().enumerate() {
            let name = format!("replica-{number}");
            let (sdp, _) = first_answer(lab, &options(lab, &name)?, &good)?;
            steers(&name, true)?;
            for pin in *pins {
                std::fs::remove_file(pin)?;
            }
            if number == 0 {
                steers(&name, false)?;
                lab.a.ask(&good)?.expect(web4(10))?;
            }
            sdp.terminate(SOON)?;
        }
        let (_sdp, _) = first_answer(lab, &options(lab, "last")?, &good)?;
        steers("last", true)?;
        ensure!(link.exists() && lab.pin(SLOTS_NAME).exists());
        expect_no_offence(&agent)
    });
}

/// Without the steering program, a filter at the proxy's sockets drops packets of the node's
/// processes.
#[test]
fn a_process_of_the_node_takes_no_place_in_the_queue_of_pods_without_steering_either() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let options = options(lab, "one")?.flag("--steering=off");
        let (_sdp, _) = first_answer(lab, &options, &good)?;
        lab.node.enter(|| -> Result<()> {
            for ip in [
                IpAddr::from(Ipv4Addr::LOCALHOST),
                Ipv6Addr::LOCALHOST.into(),
            ] {
                let proxy = SocketAddr::new(ip, PROXY_PORT);
                let local = UdpSocket::bind((ip, 0))?;
                for _ in 0..100 {
                    local.send_to(&good.encode(1)?, proxy)?;
                }
                let connected = TcpStream::connect_timeout(&proxy, Duration::from_millis(200));
                ensure!(connected.is_err(), "the proxy has a connection from {ip}");
            }
            Ok(())
        })??;
        for server in [DNS4, DNS6] {
            let query = Query::a("www.good.test", server);
            lab.a.ask(&query.clone().tcp())?.expect(web4(10))?;
            lab.a.ask(&query)?.expect(web4(10))?;
        }
        let received = lab.metric(9971, "holdfast_dns_queries_total", "result=\"loop\"")?;
        ensure!(received == 0.0, "the proxy received {received} of them");
        expect_no_offence(&agent)
    });
}

#[test]
fn starts_from_files_and_maps_while_the_agent_is_away() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        place::redirect(lab)?;
        let world = world(lab);
        let [web, client] = &world.endpoints[..] else {
            unreachable!("two endpoints")
        };
        place::pin_lxc(lab, &world, &[&lab.a, &lab.b])?;
        place::pin_ipcache(lab, &world)?;
        let regex = "^(?:[-a-zA-Z0-9_]*[.]good[.]test[.])$";
        place::write_file(lab, &lab.a, web, regex, &[DNS4, DNS6])?;
        // The file is for the previous endpoint with this number, which had another identity.
        let mut former = client.clone();
        former.identity = 41_999;
        place::write_file(lab, &lab.b, &former, "(?:)", &[])?;

        let good = Query::a("www.good.test", DNS4);
        for (number, mounted) in ["ipcache mounted", "ipcache not mounted"]
            .iter()
            .enumerate()
        {
            if number == 1 {
                std::fs::remove_file(lab.pin(ipcache::NAME))?;
            }
            let name = format!("replica-{number}");
            let (sdp, took) = first_answer(lab, &options(lab, &name)?, &good)?;
            println!("agent away, {mounted}: first right answer after {took:?}");
            expect_prompt(took)?;
            for server in [DNS4, DNS6] {
                ask(&lab.a, "www.good.test", server)?.expect(web4(10))?;
                for pod in [&lab.a, &lab.b] {
                    ask(pod, "www.bad.test", server)?.expect_code(ResponseCode::Refused)?;
                }
            }
            let status = lab.sdp_json(&name, &["status"])?;
            let rules = status.pointer("/agent/rules").context("agent.rules")?;
            ensure!(rules.get("endpoints") == Some(&1.into()), "{status}");
            sdp.terminate(SOON)?;
        }
        Ok(())
    });
}

/// A container of Cilium's chart: two capabilities, nothing mounted.
#[test]
fn the_charts_capabilities_suffice() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        place::redirect(lab)?;
        let wrapper = lab.directory().join("with-the-charts-capabilities");
        let program = config::program("holdfast-sdp")?;
        let script = format!(
            "#!/bin/sh\nexec setpriv --bounding-set=-all,+net_admin,+net_raw {} \"$@\"\n",
            program.display()
        );
        std::fs::write(&wrapper, script)?;
        std::fs::set_permissions(&wrapper, Permissions::from_mode(0o755))?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let mut options = options(lab, "one")?;
        options.program = Some(wrapper);
        options.bpf_root = Some(lab.directory().join("no-bpf"));
        let (sdp, _) = first_answer(lab, &options, &Query::a("www.good.test", DNS4))?;
        ensure!(
            sdp.log().contains("answers use a raw socket"),
            "too many capabilities"
        );
        for server in [DNS4, DNS6] {
            for tcp in [false, true] {
                let over = |query: Query| if tcp { query.tcp() } else { query };
                let aaaa = over(Query::aaaa("www.good.test", server));
                lab.a.ask(&aaaa)?.expect(web6(10))?;
            }
        }
        expect_no_offence(&agent)
    });
}

/// Mounted maps are used, and tables where no map is mounted. Rules of an agent replace files.
#[test]
fn mounted_maps_and_tables_are_combined() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("www.more.test", &[web4(11)], 600);
        place::redirect(lab)?;
        let mut world = world(lab);
        place::pin_lxc(lab, &world, &[&lab.a, &lab.b])?;
        // The agent's data about the pod is older than the map.
        for endpoint in &mut world.endpoints {
            endpoint.addresses.rotate_left(1);
            endpoint.addresses.truncate(1);
        }
        let agent = CiliumAgent::start(&lab.node, world, hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, took) = first_answer(lab, &options(lab, "one")?, &good)?;
        println!("agent up, cilium_lxc mounted: first right answer after {took:?}");
        expect_prompt(took)?;
        ask(&lab.a, "www.more.test", DNS4)?.expect_code(ResponseCode::Refused)?;
        let status = lab.sdp_json("one", &["status"])?;
        ensure!(
            status.pointer("/maps/agent_tables") == Some(&true.into()),
            "{status}"
        );
        // A map that appears later is used.
        let mut other = holdfast_e2e::cilium::setup::world(lab);
        other
            .prefixes
            .retain(|(prefix, _)| prefix.prefix_len() == 0);
        place::pin_ipcache(lab, &other)?;
        eventually("the map says: world", SOON, || {
            ask(&lab.a, "www.good.test", DNS4)?.expect_code(ResponseCode::Refused)
        })?;
        std::fs::remove_file(lab.pin(ipcache::NAME))?;
        eventually("the table again", SOON, || {
            ask(&lab.a, "www.good.test", DNS4)?.expect(web4(10))
        })?;
        expect_no_offence(&agent)
    });
}
