//! The messages between the proxy and a Cilium agent, checked by a stand-in with the real agent's
//! requirements.
use std::cell::RefCell;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fqdn_proto::fqdndata::{FqdnMapping, MetricsData, ProxyErrorType};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::cilium::setup::{
    CLIENT, SERVER, SOON, WEB, expect_no_offence, first_answer, hurried, options, world,
};
use holdfast_e2e::cilium::world::Rule;
use holdfast_e2e::cilium::{CiliumAgent, Manner, PORT, place};
use holdfast_e2e::dns::zone;
use holdfast_e2e::lab::{DNS4, DNS6, web4};
use holdfast_e2e::{Query, eventually, until, with_lab};
use tonic::Code;
use tonic::transport::Endpoint;

/// For the agent's log and metrics: the query, then the answer, of any kind.
#[test]
fn the_agent_gets_a_report_of_every_query_and_answer() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("target.good.test", &[web4(11)], 60);
        lab.zone.alias("alias.good.test", "target.good.test", 30);
        lab.zone.set("silent.good.test", &[web4(12)], 600);
        lab.zone.manner("silent.good.test", zone::Manner::Lost);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        let expected = RefCell::new(Vec::new());
        let received = |name: &str, tcp: bool, many: usize| {
            let all = (name.to_owned(), tcp, many);
            expected.borrow_mut().push(all);
            let wanted = if tcp { "tcp" } else { "udp" };
            eventually("received", 2 * SOON, || {
                let seen = agent.seen().mappings.into_iter();
                let of_name: Vec<_> = seen
                    .filter(|m| m.fqdn == name && metrics(m).protocol == wanted)
                    .collect();
                ensure!(of_name.len() >= many, "only {of_name:?}");
                ensure!(of_name.len() == many, "too many: {of_name:?}");
                Ok(of_name)
            })
        };

        for (tcp, server) in [(false, DNS4), (true, DNS6)] {
            let over = |query: Query| if tcp { query.tcp() } else { query };
            lab.a
                .ask(&over(Query::a("alias.good.test", server)))?
                .expect(web4(11))?;
            let [query, answer] = &received("alias.good.test.", tcp, 2)?[..] else {
                unreachable!("two of them")
            };
            for (one, is_response) in [(query, false), (answer, true)] {
                let metrics = metrics(one);
                let details = metrics.dns_response_data.as_ref().context("details")?;
                ensure!(details.is_response == is_response, "{one:?}");
                ensure!(details.qtypes == [1], "{one:?}");
                let own: IpAddr = if tcp {
                    lab.a.v6.into()
                } else {
                    lab.a.v4.into()
                };
                ensure!(one.source_ip == own.to_string().into_bytes(), "{one:?}");
                ensure!((1..=65_535).contains(&metrics.source_port), "{one:?}");
                let at = std::net::SocketAddr::new(server, 53).to_string();
                ensure!(metrics.server_addr == at, "{one:?}");
                ensure!((one.source_identity, metrics.server_identity) == (WEB, SERVER));
                ensure!(
                    metrics.allowed && metrics.error_message.is_empty(),
                    "{one:?}"
                );
                let stats = metrics.processing_stats.as_ref().context("stats")?;
                ensure!(stats.processing > 0 && stats.policy_check > 0, "{one:?}");
                ensure!((stats.upstream > 0) == is_response, "{one:?}");
                ensure!(stats.total == stats.processing + stats.upstream, "{one:?}");
            }
            ensure!(query.record_ip.is_empty() && answer.record_ip == [b"203.0.113.11"]);
            ensure!(answer.ttl == 30, "{answer:?}");
            let details = metrics(answer).dns_response_data.context("details")?;
            ensure!(details.cnames == ["target.good.test."], "{details:?}");
            ensure!(details.answer_types == [5, 1], "{details:?}");

            // An answer without addresses is reported too.
            let none = over(Query::a("none.good.test", server));
            lab.a.ask(&none)?.expect_code(ResponseCode::NXDomain)?;
            let [_, answer] = &received("none.good.test.", tcp, 2)?[..] else {
                unreachable!("two of them")
            };
            ensure!(
                answer.response_code == 3 && answer.record_ip.is_empty(),
                "{answer:?}"
            );

            let bad = over(Query::a("www.bad.test", server));
            lab.a.ask(&bad)?.expect_code(ResponseCode::Refused)?;
            let denied = &received("www.bad.test.", tcp, 1)?[0];
            ensure!(!metrics(denied).allowed, "{denied:?}");
        }

        let unanswered = Query::a("silent.good.test", DNS4).within(Duration::from_millis(100));
        lab.a.ask(&unanswered).expect_err("a silent server");
        let [query, timeout] = &received("silent.good.test.", false, 2)?[..] else {
            unreachable!("two of them")
        };
        ensure!(
            metrics(query).error_type() == ProxyErrorType::None,
            "{query:?}"
        );
        ensure!(
            metrics(timeout).error_type() == ProxyErrorType::Timeout,
            "{timeout:?}"
        );
        ensure!(!metrics(timeout).error_message.is_empty(), "{timeout:?}");
        // No other message arrived after the expected ones.
        for (name, tcp, many) in expected.take() {
            received(&name, tcp, many)?;
        }
        expect_no_offence(&agent)
    });
}

fn metrics(mapping: &FqdnMapping) -> MetricsData {
    mapping.metrics_data.clone().unwrap_or_default()
}

#[test]
fn error_codes_release_or_reject() {
    with_lab(|lab| {
        for name in ["www", "unknown", "internal", "denied"] {
            lab.zone.set(&format!("{name}.good.test"), &[web4(10)], 600);
        }
        place::redirect(lab)?;
        let manner = Manner {
            errors: vec![
                ("unknown", Code::Unknown),
                ("internal", Code::Internal),
                ("denied", Code::PermissionDenied),
            ],
            ..hurried()
        };
        let agent = CiliumAgent::start(&lab.node, world(lab), manner)?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        for tcp in [false, true] {
            let over = |name: &str| {
                let query = Query::a(name, DNS4).edns();
                if tcp { query.tcp() } else { query }
            };
            for name in ["unknown.good.test", "internal.good.test"] {
                lab.a.ask(&over(name))?.expect(web4(10))?;
            }
            let reply = lab.a.ask(&over("denied.good.test"))?;
            reply.expect_code(ResponseCode::ServFail)?;
        }
        expect_no_offence(&agent)
    });
}

/// Each snapshot repeats all rules, including a rule that cannot be parsed.
#[test]
fn a_malformed_rule_is_reported_once() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        place::redirect(lab)?;
        let mut world = world(lab);
        let odd = Rule::new(SERVER, &["*.good.test", "no name at all"]);
        world.rules.insert(WEB, vec![odd]);
        let agent = CiliumAgent::start(&lab.node, world, hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        for number in 1..4 {
            let before = agent.seen().acks.len();
            agent.change(|world| {
                let rule = Rule::new(SERVER, &[&format!("n{number}.good.test")]);
                world.rules.insert(CLIENT, vec![rule]);
            });
            let acks = || Ok(agent.seen().acks.len());
            until("it is acknowledged", SOON, acks, |acks| *acks > before)?;
        }
        let said = sdp
            .log()
            .matches("a rule of the agent allows nothing")
            .count();
        ensure!(said == 1, "logged {said} times");
        let counted = lab.metric(9971, "holdfast_retrieve_dns_rules_errors_total", "")?;
        ensure!(counted == 1.0, "counted as {counted}");
        let status = lab.sdp_json("one", &["status"])?;
        let refused = status.pointer("/agent/refused_rules");
        let refused = refused
            .and_then(|text| text.as_str())
            .context("nothing is refused")?;
        ensure!(refused.contains("no name at all"), "{refused}");
        expect_no_offence(&agent)
    });
}

#[test]
fn a_snapshot_of_a_large_cluster_is_accepted() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        place::redirect(lab)?;
        let mut world = world(lab);
        for number in 0..1_200_000_u32 {
            let [_, b, c, d] = number.to_be_bytes();
            let prefix = IpAddr::from([100 + b, c, d, 0]);
            let identity = 256 + number % 50_000;
            world
                .prefixes
                .push((ipnet::IpNet::new(prefix, 24)?, identity));
            let v6 = IpAddr::from([
                0xfd00,
                1,
                0,
                0,
                0,
                0,
                u16::from(b),
                u16::from_be_bytes([c, d]),
            ]);
            world.prefixes.push((v6.into(), identity));
        }
        let agent = CiliumAgent::start(&lab.node, world, hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, took) = first_answer(lab, &options(lab, "one")?, &good)?;
        let size = agent.seen().largest_state;
        println!("first right answer after {took:?}, snapshot of {size} bytes");
        ensure!(size > 20 << 20, "only {size} bytes");
        expect_no_offence(&agent)
    });
}

#[test]
fn the_agent_may_listen_on_ipv6_alone() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        place::redirect(lab)?;
        let at = std::net::SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], PORT));
        let agent = CiliumAgent::start_at(&lab.node, at, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        expect_no_offence(&agent)
    });
}

/// The other tests depend on the stand-in: it must detect a client that pings.
#[test]
fn the_stand_in_disconnects_a_client_that_pings() {
    with_lab(|lab| {
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        lab.node.enter(|| -> Result<()> {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let pinging = Endpoint::from_static("http://127.0.0.1:10095")
                    .http2_keep_alive_interval(Duration::from_millis(50))
                    .keep_alive_while_idle(true);
                let _channel = pinging.connect().await?;
                tokio::task::spawn_blocking(move || {
                    let refused = || Ok(agent.seen().too_many_pings);
                    until("too many pings", SOON, refused, |refused| *refused > 0)?;
                    Ok(())
                })
                .await?
            })
        })?
    });
}

/// The agent's own timing, for ten minutes: silence, single queries, bursts, changes.
#[test]
#[ignore = "nightly: takes ten minutes"]
fn no_client_is_disconnected_in_ten_minutes() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 1);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), Manner::default())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, _) = first_answer(lab, &options(lab, "one")?, &good)?;
        let start = Instant::now();
        let mut round = 0_u32;
        while start.elapsed() < Duration::from_secs(600) {
            round += 1;
            for _ in 0..[1, 0, 200][usize::try_from(round % 3)?] {
                lab.a.ask(&good)?.expect(web4(10))?;
            }
            if round.is_multiple_of(4) {
                agent.change(|world| {
                    let rule = Rule::new(SERVER, &[&format!("n{round}.good.test")]);
                    world.rules.insert(CLIENT, vec![rule]);
                });
            }
            // Silences shorter and longer than the silence after which the agent pings.
            let pings = agent.seen().answered_pings;
            let silent = Duration::from_secs(u64::from(round * 7 % 17));
            let until = Instant::now() + silent;
            while Instant::now() < until {
                std::thread::sleep(Duration::from_millis(100));
            }
            if silent > Duration::from_secs(7) {
                ensure!(agent.seen().answered_pings > pings, "no ping in {silent:?}");
            }
            expect_no_offence(&agent)?;
        }
        let seen = agent.seen();
        println!(
            "{} pings answered, {} snapshots, {} calls",
            seen.answered_pings,
            seen.states,
            seen.mappings.len()
        );
        ensure!(seen.connections == 1, "{} connections", seen.connections);
        Ok(())
    });
}
