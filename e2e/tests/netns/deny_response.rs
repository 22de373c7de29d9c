//! With `--policy-deny-response=icmp` denied connections fail at once. With this flag, or with
//! `--dns-deny-response=refused`, a resolver continues with its second server at once if policy
//! denies the first. Without these flags denied packets are dropped in silence.
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{DNS4, DNS6, OTHER_DNS4, UDP_PORT, at, web4, web6};
use holdfast_e2e::policy::{CLIENT, WEB, cidr, dns, egress, good_names};
use holdfast_e2e::{
    AgentOptions, Lab, Netns, Pod, Program, Query, SdpOptions, eventually, shell, with_lab,
};
use shared_maps::event::Reason;

/// Longest wait for an error. Without a reply, a connection fails after minutes.
const SOON: Duration = Duration::from_secs(10);
/// How long a test waits to see that nothing arrives.
const SILENCE: Duration = Duration::from_secs(1);

fn with(flags: &[&str]) -> AgentOptions {
    let options = AgentOptions::default();
    flags
        .iter()
        .fold(options, |options, flag| options.flag(flag))
}

fn start(lab: &Lab, flags: &[&str]) -> Result<[Program; 2]> {
    lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
    lab.zone.set("www.bad.test", &[web4(11), web6(11)], 60);
    lab.write_policy("web.yaml", &good_names())?;
    let agent = lab.start_agent(&with(flags))?;
    let sdp = lab.start_sdp(&SdpOptions::default())?;
    lab.add_endpoint(&lab.a, WEB)?;
    Ok([agent, sdp])
}

/// The error with which a connection fails.
fn connect_error(pod: &Pod, to: SocketAddr, limit: Duration) -> Result<ErrorKind> {
    match pod.netns.enter(|| TcpStream::connect_timeout(&to, limit))? {
        Ok(_) => bail!("connected to {to}, which policy does not allow"),
        Err(error) => Ok(error.kind()),
    }
}

/// The error number that a connected UDP socket reports after it sent `size` bytes; `None` if none
/// arrives.
fn datagram_error(pod: &Pod, to: SocketAddr, size: usize, limit: Duration) -> Result<Option<i32>> {
    pod.netns.enter(|| -> Result<Option<i32>> {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(limit))?;
        socket.send(&vec![b'h'; size])?;
        match socket.recv(&mut [0; 16]) {
            Ok(_) => bail!("an answer from {to}"),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Ok(error.raw_os_error()),
        }
    })?
}

/// Fails unless TCP, UDP and ping of both families fail at once.
fn expect_errors(pod: &Pod) -> Result<()> {
    for host in [web4(12), web6(12)] {
        let kind = connect_error(pod, at(host, 80), SOON)?;
        ensure!(kind == ErrorKind::ConnectionRefused, "{host}: {kind}");
        // ICMP type 3 code 13, and ICMPv6 type 1 code 1.
        let expected = if host.is_ipv4() {
            libc::EHOSTUNREACH
        } else {
            libc::EACCES
        };
        for size in [0, 5, 1400, 4000] {
            // In IPv6 the datagram of several packets has an extension header.
            if host.is_ipv6() && size > 1400 {
                continue;
            }
            let error = datagram_error(pod, at(host, UDP_PORT), size, SOON)?;
            ensure!(error == Some(expected), "{host}, {size} bytes: {error:?}");
        }
        let error = pod.ping(host, SOON).expect_err("no reply to a ping");
        let number = error.downcast_ref::<std::io::Error>();
        let number = number.and_then(std::io::Error::raw_os_error);
        ensure!(number == Some(expected), "{host}: {error:#}");
    }
    Ok(())
}

#[test]
fn denied_connections_fail_at_once() {
    with_lab(|lab| {
        let _running = start(lab, &["--policy-deny-response=icmp"])?;
        let id = lab.endpoint_id(&lab.a)?;
        let dropped = lab.counted(Reason::PolicyDenied)?;
        expect_errors(&lab.a)?;
        ensure!(
            lab.counted(Reason::PolicyDenied)? > dropped,
            "nothing counted"
        );
        let drop = format!("endpoint {id} egress policy_denied: TCP");
        eventually("the drop is recorded", SOON, || {
            let seen = lab.agent(&["observe"])?;
            ensure!(seen.contains(&drop), "no {drop} in {seen}");
            Ok(())
        })?;

        // Allowed traffic is not affected.
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a
            .ask(&Query::aaaa("www.good.test", DNS6))?
            .expect(web6(10))?;
        for host in [web4(10), web6(10)] {
            lab.a.expect_open(at(host, 80))?;
            lab.a.datagram(at(host, UDP_PORT), SOON)?;
        }
        Ok(())
    });
}

#[test]
fn a_connection_that_policy_no_longer_allows_is_reset() {
    with_lab(|lab| {
        let rules = cidr("203.0.113.0/24") + &cidr("2001:db8:113::/64");
        lab.write_policy("web.yaml", &egress("open", "web", &rules))?;
        let _agent = lab.start_agent(&with(&["--policy-deny-response=icmp"]))?;
        lab.add_endpoint(&lab.a, WEB)?;
        let hosts = [web4(10), web6(10)];
        let streams: Result<Vec<TcpStream>> = hosts
            .into_iter()
            .map(|host| lab.a.connect(at(host, 80), SOON))
            .collect();
        let mut streams = streams?;
        lab.write_policy("web.yaml", &egress("open", "web", &dns("*.good.test")))?;
        eventually("the connections are denied", SOON, || {
            let kind = connect_error(&lab.a, at(web4(10), 80), SOON)?;
            ensure!(kind == ErrorKind::ConnectionRefused, "{kind}");
            Ok(())
        })?;
        for stream in &mut streams {
            stream.set_read_timeout(Some(SOON))?;
            // More than one segment, so that the stack sends them as one packet.
            stream.write_all(&[7; 20_000])?;
            let mut rest = Vec::new();
            let error = stream.read_to_end(&mut rest).expect_err("the end");
            ensure!(error.kind() == ErrorKind::ConnectionReset, "{error}");
        }
        Ok(())
    });
}

#[test]
fn denied_connections_of_a_bridged_pod_fail_at_once() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "cni0")?;
        let pod = bridge.add_pod("p", 11)?;
        let neighbour = bridge.add_pod("q", 12)?;
        let _running = start(
            lab,
            &["--policy-deny-response=icmp", "--dns-deny-response=refused"],
        )?;
        for pod in [&pod, &neighbour] {
            lab.add_endpoint(pod, WEB)?;
        }
        expect_errors(&pod)?;
        let addresses: [IpAddr; 2] = [neighbour.v4.into(), neighbour.v6.into()];
        for address in addresses {
            // The frame is for the neighbour's MAC.
            let kind = connect_error(&pod, at(address, 80), SOON)?;
            ensure!(kind == ErrorKind::ConnectionRefused, "{address}: {kind}");
            let query = Query::a("www.bad.test", address);
            pod.ask(&query)?.expect_code(ResponseCode::Refused)?;
        }
        Ok(())
    });
}

/// A container in the pod sends through the pod, which translates the container's addresses. The
/// checksums of its packets and of the replies are completed by the stack or left to the device.
#[test]
fn a_container_behind_the_pods_address_gets_the_replies_too() {
    with_lab(|lab| {
        let _running = start(
            lab,
            &["--policy-deny-response=icmp", "--dns-deny-response=refused"],
        )?;
        let inner = container(lab)?;
        for complete in [[true, true], [true, false], [false, true], [false, false]] {
            let ends = [(&inner.netns, "eth0"), (&lab.a.netns, "inner0")];
            for ((netns, interface), complete) in ends.into_iter().zip(complete) {
                let value = if complete { "0" } else { "1" };
                let arguments = ["-c", SET_CHECKSUM_OFFLOAD, interface, value];
                netns.run("/usr/bin/python3", &arguments)?;
            }
            expect_errors(&inner).with_context(|| format!("complete: {complete:?}"))?;
            for server in [OTHER_DNS4, web6(12)] {
                for query in [
                    Query::a("www.bad.test", server),
                    Query::a("www.bad.test", server).edns(),
                ] {
                    inner.ask(&query)?.expect_code(ResponseCode::Refused)?;
                }
            }
        }
        Ok(())
    });
}

/// Python script that sends `ETHTOOL_STXCSUM` for an interface, to switch its checksum offload on
/// or off.
const SET_CHECKSUM_OFFLOAD: &str = "\
import array, fcntl, socket, struct, sys
value = array.array('B', struct.pack('II', 0x17, int(sys.argv[2])))
request = struct.pack('16sP', sys.argv[1].encode(), value.buffer_info()[0])
fcntl.ioctl(socket.socket(), 0x8946, request)
";

/// A network namespace that reaches the world through pod a, under the pod's addresses.
fn container(lab: &Lab) -> Result<Pod> {
    let netns = Netns::create(format!("{}-inner", lab.name()))?;
    let (v4, v6) = (
        Ipv4Addr::new(10, 99, 0, 2),
        Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 2),
    );
    let pod = &lab.a.netns;
    pod.sysctl(&[
        ("net.ipv4.ip_forward", "1"),
        ("net.ipv6.conf.all.forwarding", "1"),
    ])?;
    pod.batch(&format!(
        "link add inner0 type veth peer name eth0 netns {}\n\
         address add 10.99.0.1/24 dev inner0\n\
         address add fd99::1/64 dev inner0 nodad\n\
         link set inner0 up",
        netns.name()
    ))?;
    netns.batch(&format!(
        "address add {v4}/24 dev eth0\n\
         address add {v6}/64 dev eth0 nodad\n\
         link set eth0 up\n\
         route add default via 10.99.0.1\n\
         route add default via fd99::1"
    ))?;
    let rules = "table inet inner { chain out { type nat hook postrouting priority srcnat; \
                 oifname eth0 masquerade; }; }";
    shell::feed(pod.command("nft").args(["-f", "-"]), rules)?;
    netns.settled()?;
    Ok(Pod {
        netns,
        v4,
        v6,
        host_side: "inner0".to_owned(),
        answers: Default::default(),
    })
}

#[test]
fn by_default_denied_packets_are_dropped_in_silence() {
    with_lab(|lab| {
        let _running = start(lab, &[])?;
        for host in [web4(12), web6(12)] {
            let kind = connect_error(&lab.a, at(host, 80), SILENCE)?;
            ensure!(kind == ErrorKind::TimedOut, "{host}: {kind}");
            let error = datagram_error(&lab.a, at(host, UDP_PORT), 5, SILENCE)?;
            ensure!(error.is_none(), "{host}: {error:?}");
        }
        let query = Query::a("www.good.test", OTHER_DNS4).within(SILENCE);
        ensure!(lab.a.ask(&query).is_err(), "a denied server answered");
        Ok(())
    });
}

/// The sender of a packet that ingress policy denies learns nothing of the pod.
#[test]
fn ingress_policy_does_not_reply() {
    with_lab(|lab| {
        lab.write_policy("closed.yaml", CLOSED)?;
        let _running = start(lab, &["--policy-deny-response=icmp"])?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let denied = || -> Result<u64> {
            Ok(lab.counted(Reason::PolicyDenied)? + lab.counted(Reason::PolicyDeny)?)
        };
        let addresses: [IpAddr; 2] = [lab.a.v4.into(), lab.a.v6.into()];
        for address in addresses {
            eventually("ingress is denied", SOON, || {
                let before = denied()?;
                let kind = connect_error(&lab.b, at(address, 80), SILENCE)?;
                ensure!(kind == ErrorKind::TimedOut, "{address}: {kind}");
                ensure!(denied()? > before, "not denied");
                Ok(())
            })?;
        }
        Ok(())
    });
}

/// No pod may open a connection to pod a.
const CLOSED: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: closed, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: web}}
  ingress: [{fromEntities: [none]}]
";

/// Runs `getent` with these servers in this order.
fn getent(lab: &Lab, servers: [IpAddr; 2], options: &str) -> Result<Output> {
    let file = lab.directory().join("resolv.conf");
    let [first, second] = servers;
    // glibc's longest timeout: without a reply, glibc would wait this long for the first server.
    let conf = format!(
        "nameserver {first}\nnameserver {second}\noptions timeout:30 attempts:1 {options}\n"
    );
    std::fs::write(&file, conf)?;
    let mut command = lab.a.netns.command("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg("mount --bind \"$0\" /etc/resolv.conf && exec timeout 15 getent ahosts www.good.test")
        .arg(&file);
    command.output().context("start getent")
}

fn expect_resolved_at_once(lab: &Lab) -> Result<()> {
    for first in [OTHER_DNS4, web6(12)] {
        for options in ["", "use-vc", "single-request", "edns0", "trust-ad"] {
            let begun = Instant::now();
            let output = getent(lab, [first, DNS4], options)?;
            eprintln!("{first}, `{options}`: {:?}", begun.elapsed());
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            ensure!(
                output.status.success()
                    && [web4(10), web6(10)]
                        .iter()
                        .all(|host| text.contains(&host.to_string())),
                "{first}, options `{options}`: {output:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn glibc_continues_with_its_second_server_after_an_icmp_error() {
    with_lab(|lab| {
        let _running = start(lab, &["--policy-deny-response=icmp"])?;
        expect_resolved_at_once(lab)
    });
}

#[test]
fn glibc_continues_with_its_second_server_after_refused() {
    with_lab(|lab| {
        let _running = start(lab, &["--dns-deny-response=refused"])?;
        expect_resolved_at_once(lab)?;
        // Other packets are dropped in silence.
        let kind = connect_error(&lab.a, at(web4(12), 80), SILENCE)?;
        ensure!(kind == ErrorKind::TimedOut, "{kind}");
        Ok(())
    });
}

#[test]
fn without_a_reply_glibc_waits_for_the_first_server() {
    with_lab(|lab| {
        let _running = start(lab, &[])?;
        let output = getent(lab, [OTHER_DNS4, DNS4], "")?;
        // `timeout` exits with this code.
        ensure!(output.status.code() == Some(124), "{output:?}");
        Ok(())
    });
}

#[test]
fn a_denied_server_refuses_every_query_and_receives_none() {
    with_lab(|lab| {
        let running = start(lab, &["--dns-deny-response=refused"])?;
        let check = || -> Result<()> {
            for server in [OTHER_DNS4, web4(12), web6(12)] {
                for name in ["www.good.test", "www.bad.test"] {
                    for query in [Query::a(name, server), Query::a(name, server).edns()] {
                        let reply = lab.a.ask(&query)?;
                        reply.expect_code(ResponseCode::Refused)?;
                    }
                }
                let over_tcp = connect_error(&lab.a, at(server, 53), SOON)?;
                ensure!(over_tcp == ErrorKind::ConnectionRefused, "{over_tcp}");
            }
            ensure!(
                lab.zone.asked("www.good.test") == 0,
                "the server got a query"
            );
            ensure!(
                lab.zone.asked("www.bad.test") == 0,
                "the server got a query"
            );
            Ok(())
        };
        check()?;
        // A server that a policy denies by name.
        let denied = egress("denied", "web", "")
            .replace("  egress:\n", "  egressDeny: [{toCIDR: [192.0.2.53/32]}]\n");
        lab.write_policy("denied.yaml", &denied)?;
        let query = Query::a("www.good.test", DNS4);
        eventually("the denied server refuses", SOON, || {
            lab.a.ask(&query)?.expect_code(ResponseCode::Refused)
        })?;
        lab.remove_policy("denied.yaml")?;
        eventually("the server answers again", SOON, || {
            lab.a.ask(&query)?.expect(web4(10))
        })?;
        // The eBPF programs need neither agent nor proxy.
        let [agent, sdp] = running;
        agent.kill_9()?;
        sdp.kill_9()?;
        for server in [OTHER_DNS4, web6(12)] {
            let query = Query::a("www.bad.test", server);
            lab.a.ask(&query)?.expect_code(ResponseCode::Refused)?;
        }
        Ok(())
    });
}
