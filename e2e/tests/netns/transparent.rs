//! Transparent mode: servers see the client pod's address, and answers reach the proxy.
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::dns::zone::Zone;
use holdfast_e2e::lab::{DNS4, DNS6, NODE4, NODE6, at, web4};
use holdfast_e2e::policy::{WEB, dns_to, egress, good_names, names};
use holdfast_e2e::{
    AgentOptions, Lab, Netns, Pod, Programs, Query, SdpOptions, eventually, shell, with_lab,
};
use shared_maps::event::Reason;
use socket2::{Domain, Protocol, Socket, Type};

mod return_path;
mod under_cilium;

const FLAG: &str = "--dnsproxy-enable-transparent-mode";
/// The lab's servers in the world are outside of the cluster.
const OUTSIDE: &str = "--transparent-mode-outside-cluster";
const FALLBACKS: &str = "holdfast_dns_transparent_fallbacks_total";
const SDP_METRICS: u16 = 9961;
const LIMIT: Duration = Duration::from_secs(10);
/// Longer than any answer of the lab takes.
const NO_ANSWER: Duration = Duration::from_millis(500);

/// Starts agent and proxy in transparent mode, also for servers outside of the cluster, with pod a
/// under `policy`.
fn start_with(lab: &Lab, policy: &str) -> Result<Programs> {
    let sdp = SdpOptions::default().flag(FLAG).flag(OUTSIDE);
    let agent = AgentOptions::default().flag(FLAG).flag(OUTSIDE);
    start_as(lab, policy, &agent, &sdp)
}

/// Like [`start_with`], but servers outside of the cluster do not see the pod's address.
fn start_inside(lab: &Lab, policy: &str) -> Result<Programs> {
    let sdp = SdpOptions::default().flag(FLAG);
    start_as(lab, policy, &AgentOptions::default().flag(FLAG), &sdp)
}

fn start_as(lab: &Lab, policy: &str, agent: &AgentOptions, sdp: &SdpOptions) -> Result<Programs> {
    lab.write_policy("web.yaml", policy)?;
    let agent = lab.start_agent(agent)?;
    let sdp = lab.start_sdp(sdp)?;
    lab.add_endpoint(&lab.a, WEB)?;
    Ok(Programs { agent, sdp })
}

fn start(lab: &Lab) -> Result<Programs> {
    lab.zone.set("www.good.test", &[web4(10)], 60);
    start_with(lab, &good_names())
}

/// A rule that allows DNS queries to pods with the label `app: dns`.
fn dns_to_pods() -> String {
    dns_to("*.good.test", &[]).replace("toCIDR: []", "toEndpoints: [{matchLabels: {app: dns}}]")
}

/// The same query over UDP and over TCP.
fn both(name: &str, server: IpAddr) -> [Query; 2] {
    let query = Query::a(name, server);
    [query.clone(), query.tcp()]
}

fn askers<const N: usize>(all: [IpAddr; N]) -> BTreeSet<IpAddr> {
    all.into()
}

fn fallbacks(lab: &Lab, reason: &str) -> Result<f64> {
    lab.metric(SDP_METRICS, FALLBACKS, reason)
}

#[test]
fn servers_outside_see_the_pods_address_where_configured() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        for (server, pod) in [(DNS4, lab.a.v4.into()), (DNS6, lab.a.v6.into())] {
            for query in both("www.good.test", server) {
                for _ in 0..20 {
                    lab.a.ask(&query)?.expect(web4(10))?;
                }
                assert_eq!(lab.dns.take_askers(), askers([pod]), "{query:?}");
            }
        }
        lab.a.expect_open(at(web4(10), 80))?;
        assert!(lab.counted(Reason::Returned)? >= 80);
        assert_eq!(lab.counted(Reason::ForgedAnswer)?, 0);
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}

/// Masquerading on a node whose network has no routes to pods' addresses.
const MASQUERADE: &str = "table inet pods { chain post {
    type nat hook postrouting priority srcnat;
    ip saddr 10.77.0.0/24 ip daddr != 10.77.0.0/24 masquerade
    ip6 saddr fd77::/64 ip6 daddr != fd77::/64 masquerade
}
}
";

#[test]
fn servers_outside_answer_where_the_node_masquerades_pods() {
    with_lab(|lab| {
        shell::feed(lab.node.command("nft").args(["-f", "-"]), MASQUERADE)?;
        lab.zone.set("www.good.test", &[web4(10)], 60);
        let _programs = start_inside(lab, &good_names())?;
        for (server, node) in [(DNS4, NODE4), (DNS6, NODE6)] {
            for query in both("www.good.test", server) {
                for _ in 0..5 {
                    lab.a.ask(&query)?.expect(web4(10))?;
                }
                assert_eq!(lab.dns.take_askers(), askers([node]), "{query:?}");
            }
        }
        lab.a.expect_open(at(web4(10), 80))?;
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}

/// Answers one query on one connection, and closes it well after its client did.
fn close_late(listener: &TcpListener, zone: &Zone, node: &Netns) -> Result<()> {
    let (mut stream, client) = listener.accept()?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut query)?;
    let answer = zone.respond(&query, true).context("no answer")?.bytes;
    stream.write_all(&u16::try_from(answer.len())?.to_be_bytes())?;
    stream.write_all(&answer)?;
    ensure!(stream.read(&mut length)? == 0, "a further query");
    eventually(
        "the client's socket has gone to the memory of it",
        LIMIT,
        || {
            let port = format!(":{}", client.port());
            let left = node.run(
                "ss",
                &["-Htano", "state", "fin-wait-2", "sport", "=", &port],
            )?;
            ensure!(left.contains("timewait"), "{left:?}");
            Ok(())
        },
    )
}

#[test]
fn the_last_segments_of_a_connection_find_it_closed() {
    with_lab(|lab| {
        let servers: [IpAddr; 2] = ["192.0.2.2".parse()?, "2001:db8:53::2".parse()?];
        lab.zone.set("www.good.test", &[web4(10)], 60);
        let rules = dns_to("*.good.test", &["192.0.2.2/32", "2001:db8:53::2/128"]);
        let _programs = start_with(lab, &egress("web", "web", &rules))?;
        for server in servers {
            let listener = lab.world.enter(|| TcpListener::bind(at(server, 53)))??;
            std::thread::scope(|scope| {
                let served = scope.spawn(|| close_late(&listener, &lab.zone, &lab.node));
                lab.a
                    .ask(&Query::a("www.good.test", server).tcp())?
                    .expect(web4(10))?;
                served.join().expect("it does not panic")
            })?;
        }
        eventually("both ends are closed", LIMIT, || {
            let open = lab.world.run("ss", &["-Htan", "state", "last-ack"])?;
            ensure!(open.is_empty(), "{open}");
            Ok(())
        })
    });
}

const SERVER_IN: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: dns-in, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: dns}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [{port: "53", protocol: ANY}]}]
"#;

#[test]
fn a_server_on_the_same_node_sees_the_pod_and_its_policy_judges_it() {
    with_lab(|lab| {
        let c = lab.add_pod("c", 13)?;
        let servers: [IpAddr; 2] = [lab.b.v4.into(), lab.b.v6.into()];
        let dns = DnsServer::start(&lab.b.netns, &servers, &lab.zone)?;
        let label = |app: &str| WEB.replace("app=web", &format!("app={app}"));
        let rules = dns_to("*.good.test", &[])
            .replace("toCIDR: []", "toEndpoints: [{matchLabels: {app: dns}}]")
            + &names("*.good.test");
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.write_policy("in.yaml", SERVER_IN)?;
        lab.write_policy("other.yaml", &egress("other", "other", &rules))?;
        let _programs = start_inside(lab, &egress("web", "web", &rules))?;
        lab.add_endpoint(&lab.b, &label("dns"))?;
        lab.add_endpoint(&c, &label("other"))?;

        for (server, pod) in servers.into_iter().zip([lab.a.v4.into(), lab.a.v6.into()]) {
            for query in both("www.good.test", server) {
                for _ in 0..5 {
                    lab.a.ask(&query)?.expect(web4(10))?;
                }
                assert_eq!(dns.take_askers(), askers([pod]), "{query:?}");
                // Pod c's own rules allow the query, but the server's rules do not.
                let denied = lab.counted(Reason::PolicyDenied)?;
                let asked = lab.zone.asked("www.good.test");
                // For a datagram, the kernel reports the drop to the proxy.
                if let Ok(reply) = c.ask(&query.clone().within(NO_ANSWER)) {
                    reply.expect_code(ResponseCode::ServFail)?;
                }
                assert_eq!(lab.zone.asked("www.good.test"), asked);
                assert!(lab.counted(Reason::PolicyDenied)? > denied);
            }
            c.ask(&Query::a("www.bad.test", server))?.expect_refused()?;
        }
        lab.a.expect_open(at(web4(10), 80))?;
        assert_eq!(fallbacks(lab, "")?, 0.0);

        // The server's own connections continue, as do connections to it without the proxy.
        lab.b.expect_open(at(web4(11), 80))
    });
}

#[test]
fn large_answers_come_in_fragments() {
    with_lab(|lab| {
        let many: Vec<IpAddr> = (1..=200)
            .map(|host| Ipv4Addr::new(203, 0, 113, host).into())
            .collect();
        lab.zone.set("many.good.test", &many, 60);
        let servers: [IpAddr; 2] = [lab.b.v4.into(), lab.b.v6.into()];
        let _dns = DnsServer::start(&lab.b.netns, &servers, &lab.zone)?;
        let rules = dns_to("*.good.test", &["192.0.2.53/32", "2001:db8:53::53/128"]);
        let _programs = start_with(lab, &egress("web", "web", &(rules + &dns_to_pods())))?;
        lab.add_endpoint(&lab.b, &WEB.replace("app=web", "app=dns"))?;
        for server in [DNS4, DNS6, servers[0], servers[1]] {
            for _ in 0..10 {
                let reply = lab.a.ask(&Query::a("many.good.test", server).edns())?;
                ensure!(reply.addresses().len() == 200, "{server}: {reply:?}");
            }
        }
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}

#[test]
fn many_pods_send_queries_at_once() {
    with_lab(|lab| {
        let rules = good_names();
        let more: Vec<Pod> = (0..16)
            .map(|n| lab.add_pod(&format!("m{n}"), 40 + n))
            .collect::<Result<_>>()?;
        let _programs = start_with(lab, &rules)?;
        for pod in &more {
            lab.add_endpoint(pod, WEB)?;
        }
        for n in 0..40 {
            lab.zone.set(&format!("n{n}.good.test"), &[web4(10)], 60);
        }
        lab.dns.take_askers();
        std::thread::scope(|scope| {
            let asking: Vec<_> = more
                .iter()
                .map(|pod| {
                    scope.spawn(move || -> Result<()> {
                        for n in 0..40 {
                            let server = if n % 2 == 0 { DNS4 } else { DNS6 };
                            let query = Query::a(&format!("n{n}.good.test"), server);
                            let query = if n % 5 == 0 { query.tcp() } else { query };
                            pod.ask(&query)?.expect(web4(10))?;
                        }
                        Ok(())
                    })
                })
                .collect();
            asking
                .into_iter()
                .try_for_each(|asking| asking.join().expect("it does not panic"))
        })?;
        let seen = more.iter().flat_map(|pod| [pod.v4.into(), pod.v6.into()]);
        assert_eq!(lab.dns.take_askers(), seen.collect());
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}

/// Occupies ports of pod a's address, as if proxies had used all of them.
fn take_ports(lab: &Lab, ports: std::ops::RangeInclusive<u16>) -> Result<Vec<Socket>> {
    lab.node.enter(|| {
        let mut taken = Vec::new();
        for ip in [IpAddr::from(lab.a.v4), lab.a.v6.into()] {
            let domain = Domain::for_address(at(ip, 0));
            for port in ports.clone() {
                for (kind, protocol) in
                    [(Type::DGRAM, Protocol::UDP), (Type::STREAM, Protocol::TCP)]
                {
                    let socket = Socket::new(domain, kind, Some(protocol))?;
                    if ip.is_ipv4() {
                        socket.set_ip_transparent_v4(true)?;
                    } else {
                        socket.set_ip_transparent_v6(true)?;
                    }
                    socket
                        .bind(&at(ip, port).into())
                        .with_context(|| format!("{ip} {port}"))?;
                    taken.push(socket);
                }
            }
        }
        Ok(taken)
    })?
}

#[test]
fn a_port_in_use_loses_no_query() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        let range = |ports| lab.node.sysctl(&[("net.ipv4.ip_local_port_range", ports)]);
        let _taken = take_ports(lab, 41000..=41003)?;
        for (server, pod) in [(DNS4, lab.a.v4.into()), (DNS6, lab.a.v6.into())] {
            for query in both("www.good.test", server) {
                let before = fallbacks(lab, "other_port")?;
                range("41000 41003")?;
                for _ in 0..3 {
                    lab.a.ask(&query)?.expect(web4(10))?;
                }
                // The range is restored, because other programs need ports, too.
                range("32768 60999")?;
                assert_eq!(lab.dns.take_askers(), askers([pod]), "{query:?}");
                assert!(fallbacks(lab, "other_port")? > before, "{query:?}");
            }
        }
        assert_eq!(fallbacks(lab, "")?, fallbacks(lab, "other_port")?);
        Ok(())
    });
}

#[test]
fn queries_have_the_nodes_address_if_the_pods_cannot_be_used_and_are_counted() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        for (family, pod) in [("-4", lab.a.v4.to_string()), ("-6", lab.a.v6.to_string())] {
            let rule = [family, "rule", "add", "from", &pod, "iif", "lo", "prohibit"];
            lab.node.run("ip", &rule)?;
        }
        for (server, node) in [(DNS4, NODE4), (DNS6, NODE6)] {
            for query in both("www.good.test", server) {
                let before = fallbacks(lab, "not_permitted")?;
                for _ in 0..3 {
                    lab.a.ask(&query)?.expect(web4(10))?;
                }
                assert_eq!(lab.dns.take_askers(), askers([node]), "{query:?}");
                assert!(fallbacks(lab, "not_permitted")? > before, "{query:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn with_an_agent_that_lacks_the_setting_queries_have_the_nodes_address() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.write_policy("web.yaml", &good_names())?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default().flag(FLAG).flag(OUTSIDE))?;
        lab.add_endpoint(&lab.a, WEB)?;
        let ask = |from: IpAddr| -> Result<()> {
            for query in both("www.good.test", DNS4) {
                lab.a.ask(&query)?.expect(web4(10))?;
                let seen = lab.dns.take_askers();
                ensure!(seen == askers([from]), "{query:?}: {seen:?}");
            }
            Ok(())
        };
        ask(NODE4)?;
        assert_eq!(lab.sdp_json("one", &["status"])?["transparent"], "blocked");
        assert!(fallbacks(lab, "no_return_path")? >= 2.0);
        // The agent gets the setting, and then loses it, while the proxy runs.
        agent.kill_9()?;
        let agent = lab.start_agent(&AgentOptions::default().flag(FLAG))?;
        eventually("the pod's address is used", LIMIT, || ask(lab.a.v4.into()))?;
        agent.kill_9()?;
        ask(lab.a.v4.into())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        eventually("the node's address is used", LIMIT, || ask(NODE4))
    });
}

#[test]
fn icmp_errors_of_the_network_reach_the_proxy() {
    with_lab(|lab| {
        // 192.0.2.2 and 2001:db8:53::2 are the world's own addresses, without a DNS server.
        let silent: [IpAddr; 2] = ["192.0.2.2".parse()?, "2001:db8:53::2".parse()?];
        let rules = dns_to("*.good.test", &["192.0.2.2/32", "2001:db8:53::2/128"]);
        let _programs = start_with(lab, &egress("web", "web", &(rules + &dns_to_pods())))?;
        lab.add_endpoint(&lab.b, &WEB.replace("app=web", "app=dns"))?;
        for server in [silent[0], silent[1], lab.b.v4.into(), lab.b.v6.into()] {
            for query in both("www.good.test", server) {
                lab.a
                    .ask(&query)?
                    .expect_code(ResponseCode::ServFail)
                    .with_context(|| format!("{query:?}"))?;
            }
        }
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}
