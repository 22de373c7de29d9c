//! The proxy beneath a Cilium agent: a stand-in that insists on what the real one
//! insists on, the chart's ConfigMap, TPROXY, and whatever is mounted or not.
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fqdn_proto::fqdndata::{FqdnMapping, MetricsData, ProxyErrorType};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::cilium::world::{Rule, World};
use holdfast_e2e::cilium::{CiliumAgent, Manner, PORT, keepalive::Timing, place};
use holdfast_e2e::dns::zone;
use holdfast_e2e::lab::{DNS4, DNS6, Lab, web4, web6};
use holdfast_e2e::{Pod, Program, Query, SdpOptions, eventually, until, with_lab};
use shared_maps::ipcache;
use tonic::Code;
use tonic::transport::Endpoint;

const SOON: Duration = Duration::from_secs(15);
const WEB: u32 = 41_001;
const CLIENT: u32 = 41_002;
const SERVER: u32 = 41_053;

/// What Cilium's chart writes, and some keys of the agent that clusters add.
const CONFIG_MAP: &[(&str, &str)] = &[
    ("debug", "false"),
    ("enable-ipv4", "true"),
    ("enable-ipv6", "true"),
    ("enable-l7-proxy", "true"),
    ("enable-standalone-dns-proxy", "true"),
    ("standalone-dns-proxy-server-port", "10095"),
    ("tofqdns-proxy-port", "10094"),
    ("tofqdns-enable-dns-compression", "true"),
    ("tofqdns-min-ttl", "0"),
    ("dnsproxy-lock-count", "131"),
    ("cluster-name", "default"),
];

fn world(lab: &Lab) -> World {
    World {
        endpoints: vec![
            place::endpoint(&lab.a, WEB),
            place::endpoint(&lab.b, CLIENT),
        ],
        rules: [(WEB, vec![Rule::new(SERVER, &["*.good.test"])])].into(),
        prefixes: vec![
            (DNS4.into(), SERVER),
            (DNS6.into(), SERVER),
            ("0.0.0.0/0".parse().expect("a prefix"), 9),
            ("::/0".parse().expect("a prefix"), 10),
        ],
    }
}

fn hurried() -> Manner {
    Manner {
        timing: Timing::hurried(20),
        pause: Duration::from_millis(50),
        ..Manner::default()
    }
}

/// The proxy as the chart starts it: a ConfigMap, and no word of an agent's address.
fn options(lab: &Lab, name: &str) -> Result<SdpOptions> {
    let keys = lab.directory().join(format!("config-{name}"));
    place::mount_config_map(&keys, CONFIG_MAP)?;
    let sdp = SdpOptions {
        native: false,
        ..SdpOptions::new(name, 9971)
    };
    Ok(sdp.flag(&format!("--config-dir={}", keys.display())))
}

fn ask(pod: &Pod, name: &str, server: IpAddr) -> Result<holdfast_e2e::Reply> {
    pod.ask(&Query::a(name, server))
}

/// Starts a proxy and says how long its first right answer took.
fn first_answer(lab: &Lab, options: &SdpOptions, query: &Query) -> Result<(Program, Duration)> {
    let command = lab.sdp_command(options)?;
    let log: PathBuf = lab
        .directory()
        .join(format!("log/sdp-{}.log", options.name));
    let start = Instant::now();
    let mut sdp = Program::start("holdfast-sdp", command, &log)?;
    let hasty = query.clone().within(Duration::from_millis(20));
    eventually("a first right answer", SOON, || {
        sdp.check_alive()?;
        lab.a.ask(&hasty)?.expect(web4(10))
    })?;
    Ok((sdp, start.elapsed()))
}

fn expect_no_offence(agent: &CiliumAgent) -> Result<()> {
    let seen = agent.seen();
    ensure!(seen.violations.is_empty(), "{:?}", seen.violations);
    ensure!(
        (
            seen.client_pings,
            seen.too_many_pings,
            seen.unanswered_pings
        ) == (0, 0, 0),
        "pings of the client: {}, sent away: {}, pings unanswered: {}",
        seen.client_pings,
        seen.too_many_pings,
        seen.unanswered_pings
    );
    ensure!(seen.acks.len() as u64 <= seen.states, "too many acks");
    Ok(())
}

#[test]
fn lives_on_the_agents_tables_alone() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        lab.zone.set("www.more.test", &[web4(11)], 600);
        place::redirect(lab)?;
        let agent = CiliumAgent::start(&lab.node, world(lab), hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, took) = first_answer(lab, &options(lab, "one")?, &good)?;
        println!("agent up, nothing mounted: first right answer after {took:?}");

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

        // More rules; then none: first by the explicit form, then by absence.
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

        until("its pings are answered", SOON, || {
            agent.seen().answered_pings >= 3
        })?;
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

        // Served on, by the tables and rules it left.
        ask(&lab.a, "away.good.test", DNS4)?.expect(web4(12))?;
        ask(&lab.a, "short.good.test", DNS4)?.expect(web4(13))?;
        ask(&lab.a, "www.bad.test", DNS4)?.expect_code(ResponseCode::Refused)?;

        // The new one knows no endpoint yet, as while it restores them.
        let mut young = world(lab);
        let known = std::mem::take(&mut young.endpoints);
        let agent = CiliumAgent::start(&lab.node, young, hurried())?;
        let tried = |name: &str| agent.seen().learned(name).len();
        until("told again", SOON, || tried("away.good.test.") > 0)?;
        agent.change(|world| world.endpoints = known);
        let before = tried("away.good.test.");
        until("told again once more", SOON, || {
            tried("away.good.test.") > before
        })?;
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
        // Of the endpoint that had this number before: another identity.
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

/// Maps where they are, tables where they are not; rules of an agent replace files.
#[test]
fn maps_and_tables_mix() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("www.more.test", &[web4(11)], 600);
        place::redirect(lab)?;
        let mut world = world(lab);
        place::pin_lxc(lab, &world, &[&lab.a, &lab.b])?;
        // What the agent says of the pod is older than the map.
        for endpoint in &mut world.endpoints {
            endpoint.addresses.rotate_left(1);
            endpoint.addresses.truncate(1);
        }
        place::write_file(lab, &lab.a, &world.endpoints[0], "(?:)", &[])
            .expect_err("an endpoint without its IPv4 address is no pod of the lab");
        let agent = CiliumAgent::start(&lab.node, world, hurried())?;
        let good = Query::a("www.good.test", DNS4);
        let (_sdp, took) = first_answer(lab, &options(lab, "one")?, &good)?;
        println!("agent up, cilium_lxc mounted: first right answer after {took:?}");
        ask(&lab.a, "www.more.test", DNS4)?.expect_code(ResponseCode::Refused)?;
        let status = lab.sdp_json("one", &["status"])?;
        ensure!(
            status.pointer("/maps/agent_tables") == Some(&true.into()),
            "{status}"
        );
        // A map that appears later is used.
        let mut other = self::world(lab);
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

/// For the agent's log and metrics: the query, then the answer, whatever it says.
#[test]
fn the_agent_hears_of_every_query_and_answer() {
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
        let told = |name: &str, tcp: bool, many: usize| {
            let wanted = if tcp { "tcp" } else { "udp" };
            eventually("told", 2 * SOON, || {
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
            let [query, answer] = &told("alias.good.test.", tcp, 2)?[..] else {
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

            // Nothing to learn: told all the same.
            let none = over(Query::a("none.good.test", server));
            lab.a.ask(&none)?.expect_code(ResponseCode::NXDomain)?;
            let [_, answer] = &told("none.good.test.", tcp, 2)?[..] else {
                unreachable!("two of them")
            };
            ensure!(
                answer.response_code == 3 && answer.record_ip.is_empty(),
                "{answer:?}"
            );

            let bad = over(Query::a("www.bad.test", server));
            lab.a.ask(&bad)?.expect_code(ResponseCode::Refused)?;
            let denied = &told("www.bad.test.", tcp, 1)?[0];
            ensure!(!metrics(denied).allowed, "{denied:?}");
        }

        let unanswered = Query::a("silent.good.test", DNS4).within(Duration::from_millis(100));
        lab.a.ask(&unanswered).expect_err("a silent server");
        let [query, timeout] = &told("silent.good.test.", false, 2)?[..] else {
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

#[test]
fn a_snapshot_of_a_large_cluster_is_taken() {
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

/// What the other tests rest on: such a client would have been noticed.
#[test]
fn the_stand_in_sends_a_client_away_that_pings() {
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
                    until("sent away", SOON, || agent.seen().too_many_pings > 0)
                })
                .await?
            })
        })?
    });
}
