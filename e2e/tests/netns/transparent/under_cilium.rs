//! Under a Cilium agent, answers reach the address and port from which the pod queried.

use std::net::{SocketAddr, UdpSocket};
use std::time::Instant;

use holdfast_e2e::Program;
use holdfast_e2e::cilium::conntrack::{Routing, has_entry, return_answers};
use holdfast_e2e::cilium::world::{Rule, World};
use holdfast_e2e::cilium::{CiliumAgent, Manner, place};
use holdfast_e2e::dns::zone::Manner as Answers;

use super::*;

const POD: u32 = 41_001;
const SERVER: u32 = 41_053;

/// Starts an agent with rules by which pods may query the lab's servers and pod b for
/// `*.good.test`.
fn start_agent(lab: &Lab, pods: &[&Pod]) -> Result<CiliumAgent> {
    lab.zone.set("www.good.test", &[web4(10)], 60);
    let servers = [DNS4, DNS6, lab.b.v4.into(), lab.b.v6.into()];
    let world = World {
        endpoints: pods.iter().map(|pod| place::endpoint(pod, POD)).collect(),
        rules: [(POD, vec![Rule::new(SERVER, &["*.good.test"])])].into(),
        prefixes: servers.map(|server| (server.into(), SERVER)).to_vec(),
    };
    let agent = CiliumAgent::start(&lab.node, world, Manner::default())?;
    place::redirect(lab)?;
    Ok(agent)
}

fn start_proxy(lab: &Lab, name: &str, metrics: u16) -> Result<Program> {
    let keys = lab.directory().join(format!("config-{name}"));
    let flags = [
        ("dnsproxy-enable-transparent-mode", "true"),
        ("standalone-dns-proxy-server-port", "10095"),
    ];
    place::mount_config_map(&keys, &flags)?;
    let options = SdpOptions {
        native: false,
        ..SdpOptions::new(name, metrics)
    };
    lab.start_sdp(&options.flag(&format!("--config-dir={}", keys.display())))
}

/// A server that is a pod of the same node.
fn server_on_this_node(lab: &Lab) -> Result<DnsServer> {
    let own: [IpAddr; 2] = [lab.b.v4.into(), lab.b.v6.into()];
    DnsServer::start(&lab.b.netns, &own, &lab.zone)
}

fn servers_answer(routing: Routing) {
    with_lab(|lab| {
        let own = server_on_this_node(lab)?;
        let _agent = start_agent(lab, &[&lab.a])?;
        return_answers(lab, routing)?;
        let _sdp = start_proxy(lab, "one", SDP_METRICS)?;
        for (dns, server, pod) in [
            (&own, IpAddr::from(lab.b.v4), IpAddr::from(lab.a.v4)),
            (&own, lab.b.v6.into(), lab.a.v6.into()),
            (&lab.dns, DNS4, lab.a.v4.into()),
            (&lab.dns, DNS6, lab.a.v6.into()),
        ] {
            for query in both("www.good.test", server) {
                for _ in 0..5 {
                    let reply = lab.a.ask(&query).with_context(|| format!("{query:?}"))?;
                    reply.expect(web4(10))?;
                }
                assert_eq!(dns.take_askers(), askers([pod]), "{query:?}");
            }
        }
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}

#[test]
fn servers_of_this_node_and_others_answer_with_native_routing() {
    servers_answer(Routing::Native);
}

#[test]
fn servers_of_this_node_and_others_answer_with_vxlan() {
    servers_answer(Routing::Vxlan);
}

/// A pod's socket of a fixed port.
struct Client {
    socket: UdpSocket,
    at: SocketAddr,
}

impl Client {
    fn new(pod: &Pod) -> Result<Self> {
        let socket = pod
            .netns
            .enter(|| UdpSocket::bind(at(pod.v4.into(), 0)))??;
        let at = socket.local_addr()?;
        Ok(Self { socket, at })
    }

    fn send(&self, id: u16, query: &Query, server: IpAddr) -> Result<()> {
        self.socket.send_to(&query.encode(id)?, at(server, 53))?;
        Ok(())
    }

    /// The next answer: its id and its sender. It must arrive within the limit.
    fn receive(&self, limit: Duration) -> Result<(u16, IpAddr)> {
        self.socket.set_read_timeout(Some(limit))?;
        let mut answer = [0; 512];
        let (length, from) = self.socket.recv_from(&mut answer).context("an answer")?;
        ensure!(length > 12 && answer[3] & 0x0f == 0, "{:?}", &answer[..12]);
        Ok((u16::from_be_bytes([answer[0], answer[1]]), from.ip()))
    }
}

#[test]
fn one_port_of_a_pod_may_have_many_queries_in_flight() {
    with_lab(|lab| {
        let _own = server_on_this_node(lab)?;
        let _agent = start_agent(lab, &[&lab.a])?;
        return_answers(lab, Routing::Vxlan)?;
        let _sdp = start_proxy(lab, "one", SDP_METRICS)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let slow = Answers::Delay(Duration::from_millis(200));
        lab.zone.set("slow.good.test", &[web4(10)], 60);
        lab.zone.manner("slow.good.test", slow);

        // Like musl: one socket for both families and all servers. Cilium translates each datagram
        // to a service separately, so the servers may differ.
        let client = Client::new(&lab.a)?;
        let (a, aaaa) = (
            Query::a("slow.good.test", DNS4),
            Query::aaaa("slow.good.test", DNS4),
        );
        let other: IpAddr = lab.b.v4.into();
        client.send(7, &a, DNS4)?;
        client.send(7, &a, other)?;
        client.send(7, &aaaa, DNS4)?;
        client.send(7, &aaaa, other)?;
        // Another id, and the same query again as if the first were lost.
        client.send(8, &a, DNS4)?;
        client.send(7, &a, DNS4)?;
        let mut answers = Vec::new();
        for _ in 0..6 {
            answers.push(client.receive(LIMIT)?);
        }
        answers.sort_unstable();
        let mut wanted = vec![
            (7, other),
            (7, other),
            (7, DNS4),
            (7, DNS4),
            (7, DNS4),
            (8, DNS4),
        ];
        wanted.sort_unstable();
        assert_eq!(answers, wanted);
        assert!(has_entry(lab, (client.at.ip(), client.at.port()), other)?);
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}

#[test]
fn a_replica_that_takes_over_a_port_in_use_loses_no_answer() {
    const TWO: u16 = 9971;
    with_lab(|lab| {
        let _agent = start_agent(lab, &[&lab.a])?;
        return_answers(lab, Routing::Vxlan)?;
        let one = start_proxy(lab, "one", SDP_METRICS)?;
        let client = Client::new(&lab.a)?;
        lab.zone.set("slow.good.test", &[web4(10)], 60);
        let slow = Answers::Delay(Duration::from_secs(3));
        lab.zone.manner("slow.good.test", slow);
        client.send(1, &Query::a("slow.good.test", DNS4), DNS4)?;
        eventually("the server has it", LIMIT, || {
            ensure!(lab.zone.asked("slow.good.test") == 1, "not yet");
            Ok(())
        })?;
        let _two = start_proxy(lab, "two", TWO)?;
        // The replica drains, but waits for the slow answer.
        one.signal(nix::sys::signal::Signal::SIGTERM)?;
        let begun = Instant::now();
        eventually("the other replica has the port's queries", LIMIT, || {
            client.send(2, &Query::a("www.good.test", DNS4), DNS4)?;
            ensure!(client.receive(LIMIT)?.0 == 2, "another answer");
            let met = lab.metric(TWO, FALLBACKS, "no_port")?;
            ensure!(met > 0.0, "{:?}", begun.elapsed());
            Ok(())
        })?;
        ensure!(lab.dns.take_askers() == askers([NODE4, lab.a.v4.into()]));
        ensure!(client.receive(LIMIT)?.0 == 1, "the slow answer");
        eventually("the other replica has the port", LIMIT, || {
            lab.dns.take_askers();
            client.send(3, &Query::a("www.good.test", DNS4), DNS4)?;
            client.receive(LIMIT)?;
            let seen = lab.dns.take_askers();
            ensure!(seen == askers([lab.a.v4.into()]), "{seen:?}");
            Ok(())
        })
    });
}

#[test]
fn a_pod_with_many_ports_takes_no_sockets_from_another() {
    with_lab(|lab| {
        let c = lab.add_pod("c", 13)?;
        let _agent = start_agent(lab, &[&lab.a, &c])?;
        return_answers(lab, Routing::Vxlan)?;
        let _sdp = start_proxy(lab, "one", SDP_METRICS)?;
        let ports: Vec<UdpSocket> = lab.a.netns.enter(|| {
            let bind = |_| UdpSocket::bind(at(lab.a.v4.into(), 0));
            (0..4000).map(bind).collect::<std::io::Result<_>>()
        })??;
        // Each port sends another question, because the proxy would send equal questions only once.
        for (id, port) in (0..).zip(&ports) {
            let name = format!("n{id}.good.test");
            lab.zone.manner(&name, Answers::Lost);
            port.send_to(&Query::a(&name, DNS4).encode(id)?, at(DNS4, 53))?;
        }
        eventually("the pod has used its share up", LIMIT, || {
            ensure!(fallbacks(lab, "too_many_sockets")? > 0.0, "not yet");
            Ok(())
        })?;
        // The pod's last queries may be in transit, some with the node's address.
        eventually("the pod's queries have arrived", LIMIT, || {
            lab.dns.take_askers();
            std::thread::sleep(Duration::from_millis(300));
            ensure!(lab.dns.take_askers().is_empty(), "not yet");
            Ok(())
        })?;
        for _ in 0..20 {
            c.ask(&Query::a("www.good.test", DNS4))?.expect(web4(10))?;
        }
        let seen = lab.dns.take_askers();
        assert!(seen.contains(&c.v4.into()), "{seen:?}");
        assert!(
            seen.is_subset(&askers([c.v4.into(), lab.a.v4.into()])),
            "{seen:?}"
        );
        // The pod's own queries continue, with the node's address.
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        Ok(())
    });
}

/// The rule of Cilium's iptables that delivers answers to transparent sockets.
const CILIUM_RULE: &str = "table inet answers { chain pre {
    type filter hook prerouting priority mangle - 1;
    iifname != lo meta mark & 0xf00 != { 0xe00, 0xf00, 0x800 } meta l4proto { tcp, udp } \
        socket transparent 1 meta mark set 0x200
}
}
";

#[test]
fn under_cilium_its_rule_returns_answers() {
    with_lab(|lab| {
        let many: Vec<IpAddr> = (1..=200)
            .map(|host| Ipv4Addr::new(203, 0, 113, host).into())
            .collect();
        lab.zone.set("many.good.test", &many, 60);
        let _agent = start_agent(lab, &[&lab.a])?;
        let _sdp = start_proxy(lab, "one", SDP_METRICS)?;

        // Another name, because a question that waits for its answer is not sent again at once.
        let unheard = lab
            .a
            .ask(&Query::a("lost.good.test", DNS4).within(NO_ANSWER));
        assert!(unheard.is_err(), "{unheard:?} without the rule");
        shell::feed(lab.node.command("nft").args(["-f", "-"]), CILIUM_RULE)?;
        lab.dns.take_askers();
        for (server, pod) in [(DNS4, lab.a.v4.into()), (DNS6, lab.a.v6.into())] {
            for query in both("www.good.test", server) {
                for _ in 0..5 {
                    lab.a.ask(&query)?.expect(web4(10))?;
                }
            }
            let reply = lab.a.ask(&Query::a("many.good.test", server).edns())?;
            ensure!(reply.addresses().len() == 200, "{server}: {reply:?}");
            assert_eq!(lab.dns.take_askers(), askers([pod]));
        }
        assert_eq!(fallbacks(lab, "")?, 0.0);
        Ok(())
    });
}
