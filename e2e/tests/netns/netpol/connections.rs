//! A policy ends open connections, answers on allowed connections pass, and connections of a pod
//! that has ended are forgotten.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use agent_datapath::tracked;
use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::netpol_run::NETPOL_METRICS;
use holdfast_e2e::packet::{Packet, udp};
use holdfast_e2e::{Lab, eventually, with_lab};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
};
use serde_json::json;

use super::{PORT, Pods, SOON, both, of};

/// A policy must be in force within this time.
const CLOSES_WITHIN: Duration = Duration::from_secs(2);
/// An echo that has not come by then does not come.
const UNANSWERED: Duration = Duration::from_secs(3);

#[test]
fn an_open_connection_ends_with_its_policy() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let open = json!({"podSelector": of("b"), "ingress": [{}]});
        lab.write_network_policy("b", &open)?;
        let _netpol = lab.start_netpol(&[])?;
        for to in both(&lab.b, PORT) {
            let stream = lab.a.stream(to)?;
            stream.expect_alive()?;
            lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
            stream.expect_cut(CLOSES_WITHIN + UNANSWERED)?;
            drop(stream);
            lab.write_network_policy("b", &open)?;
            super::reaches(&lab.a, &[to], true)?;
        }
        Ok(())
    });
}

#[test]
fn datagrams_that_only_the_server_still_sends_end_as_well() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        // b may open no flow, and may be asked on UDP.
        let egress = json!({"podSelector": of("b"), "policyTypes": ["Egress"]});
        lab.write_network_policy("egress", &egress)?;
        let _netpol = lab.start_netpol(&[])?;
        let at = SocketAddr::new(lab.b.v4.into(), 7000);
        let server = lab.b.netns.enter(|| UdpSocket::bind(at))??;
        let client = lab.a.netns.enter(|| UdpSocket::bind((lab.a.v4, 0)))??;
        for socket in [&server, &client] {
            socket.set_read_timeout(Some(Duration::from_millis(200)))?;
        }
        client.send_to(b"begin", at)?;
        let mut buffer = [0; 16];
        let (_, from) = server.recv_from(&mut buffer)?;
        server.send_to(b"answer", from)?;
        client.recv_from(&mut buffer).context("the first answer")?;
        lab.write_network_policy("ingress", &json!({"podSelector": of("b"), "ingress": []}))?;
        let begin = Instant::now();
        eventually("answers end", SOON, || {
            server.send_to(b"answer", from)?;
            ensure!(client.recv_from(&mut buffer).is_err(), "an answer came");
            Ok(())
        })?;
        let took = begin.elapsed();
        ensure!(took < CLOSES_WITHIN + Duration::from_secs(1), "{took:?}");
        Ok(())
    });
}

#[test]
fn datagrams_to_a_closed_pod_end_although_it_goes_on_sending() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let _netpol = lab.start_netpol(&[])?;
        let at = SocketAddr::new(lab.b.v4.into(), 7000);
        let server = lab.b.netns.enter(|| UdpSocket::bind(at))??;
        let client = lab.a.netns.enter(|| UdpSocket::bind((lab.a.v4, 0)))??;
        server.set_read_timeout(Some(Duration::from_millis(100)))?;
        client.send_to(b"begin", at)?;
        let mut buffer = [0; 16];
        let (_, from) = server.recv_from(&mut buffer)?;
        lab.write_network_policy("ingress", &json!({"podSelector": of("b"), "ingress": []}))?;
        // b may send: its datagrams must not open the way for datagrams of a.
        let round = |buffer: &mut [u8]| {
            server.send_to(b"push", from)?;
            client.send_to(b"more", at)?;
            anyhow::Ok(server.recv_from(buffer).is_ok())
        };
        eventually("datagrams of the client end", SOON, || {
            ensure!(!round(&mut buffer)?, "one arrived");
            Ok(())
        })?;
        for _ in 0..20 {
            ensure!(!round(&mut buffer)?, "one arrived later");
        }
        Ok(())
    });
}

#[test]
fn a_closed_tcp_connection_whose_entry_is_gone_stays_closed() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let _netpol = lab.start_netpol(&[])?;
        let at = SocketAddr::new(lab.b.v4.into(), 7000);
        let listener = lab.b.netns.enter(|| TcpListener::bind(at))??;
        let mut client = lab.a.connect(at, Duration::from_secs(1))?;
        let (mut server, _) = listener.accept()?;
        server.set_read_timeout(Some(Duration::from_millis(100)))?;
        client.write_all(b"begin")?;
        let mut buffer = [0; 64];
        ensure!(server.read(&mut buffer)? == 5, "the first data");
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        super::reaches(&lab.a, &both(&lab.b, PORT), false)?;
        // The state as after a forged reset and ten seconds.
        lab.node
            .enter(|| tracked::delete(|connection| connection.port == Some(7000)))??;
        // The server sends first: its segment is the first one that conntrack sees.
        for _ in 0..10 {
            server.write_all(b"beat")?;
            client.write_all(b"after the policy")?;
            let received = server.read(&mut buffer);
            ensure!(received.is_err(), "{received:?} after the policy");
        }
        let reason = "reason=\"tcp_middle\"";
        let dropped = lab.metric(
            NETPOL_METRICS,
            "holdfast_netpol_dropped_packets_total",
            reason,
        )?;
        ensure!(dropped > 1.5, "{dropped} segments are counted");
        // Once the pod is open, the connection goes on.
        lab.remove_policy("policy-b.json")?;
        eventually("it goes on", SOON, || {
            server
                .read(&mut buffer)
                .context("nothing arrives")
                .map(drop)
        })
    });
}

#[test]
fn a_tcp_connection_that_policy_closes_both_ways_is_forgotten() {
    let closed = json!({"podSelector": of("b"), "policyTypes": ["Ingress", "Egress"]});
    is_forgotten_after(|lab| lab.write_network_policy("b", &closed));
}

#[test]
fn connections_of_a_pod_that_ends_are_forgotten() {
    is_forgotten_after(|lab| lab.remove_policy("pod-b.json"));
}

/// Opens a TCP connection to pod B, and checks that `change` deletes the connection's entries.
fn is_forgotten_after(change: impl Fn(&Lab) -> Result<()>) {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let _netpol = lab.start_netpol(&[])?;
        let to = SocketAddr::new(lab.b.v4.into(), PORT);
        let _open = lab.a.connect(to, Duration::from_secs(1))?;
        let entries = || counted(lab, lab.b.v4.into());
        ensure!(entries()? > 0, "the connection is not tracked");
        change(lab)?;
        eventually("the entries are deleted", SOON, || {
            let left = entries()?;
            ensure!(left == 0, "{left} are left");
            Ok(())
        })
    });
}

#[test]
fn connections_of_a_pod_that_ends_while_no_process_runs_are_forgotten() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let netpol = lab.start_netpol(&[])?;
        let _to_b = lab
            .a
            .connect(SocketAddr::new(lab.b.v4.into(), PORT), SOON)?;
        let stored = lab.directory().join("netpol/addresses.json");
        eventually("the pods are stored", SOON, || {
            let text = std::fs::read_to_string(&stored)?;
            ensure!(text.contains(&lab.b.v4.to_string()), "{text}");
            Ok(())
        })?;
        netpol.kill_9()?;
        lab.remove_policy("pod-b.json")?;
        lab.write_pod("next", &json!({"app": "next"}), &lab.b)?;
        ensure!(counted(lab, lab.b.v4.into())? > 0, "nothing deleted them");
        let netpol = lab.start_netpol(&[])?;
        eventually("the entries are deleted", SOON, || {
            let left = counted(lab, lab.b.v4.into())?;
            ensure!(left == 0, "{left} are left");
            Ok(())
        })?;
        // From then on, the Pod documents stay the same.
        let _to_next = lab
            .a
            .connect(SocketAddr::new(lab.b.v4.into(), PORT), SOON)?;
        netpol.kill_9()?;
        let _netpol = lab.start_netpol(&[])?;
        std::thread::sleep(Duration::from_secs(3));
        ensure!(counted(lab, lab.b.v4.into())? > 0, "of the same pod");
        Ok(())
    });
}

/// Tracked connections with this address.
fn counted(lab: &Lab, address: IpAddr) -> Result<usize> {
    let mut count = 0;
    lab.node.enter(|| {
        tracked::delete(|connection| {
            count += usize::from([connection.source, connection.destination].contains(&address));
            false
        })
    })??;
    Ok(count)
}

/// An ICMP message "port unreachable" about a datagram.
fn unreachable(datagram: &Packet) -> Vec<u8> {
    let mut message = [&[3, 3, 0, 0, 0, 0, 0, 0], datagram.ip().as_slice()].concat();
    let words = message.chunks(2);
    let words =
        words.map(|word| (u32::from(word[0]) << 8) | word.get(1).map_or(0, |low| u32::from(*low)));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    let sum = !u16::try_from(folded).expect("16 bits");
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

#[test]
fn a_pod_that_may_send_nothing_reports_errors_about_its_own_connections_only() {
    with_lab(|lab| {
        let third = lab.add_pod("c", 33)?;
        let _pods = Pods::of(lab, &[("a", &lab.a), ("b", &lab.b), ("c", &third)])?;
        let none = json!({"podSelector": of("a"), "policyTypes": ["Egress"]});
        let _netpol = lab.start_netpol(&[])?;
        // b sends to c, which is silent.
        let at = SocketAddr::new(third.v4.into(), 7000);
        let _silent = third.netns.enter(|| UdpSocket::bind(at))??;
        let client = lab.b.netns.enter(|| UdpSocket::bind((lab.b.v4, 0)))??;
        client.connect(at)?;
        client.set_read_timeout(Some(Duration::from_millis(300)))?;
        let own = client.local_addr()?;
        let datagram = Packet::new(own.ip(), at.ip(), udp(own.port(), at.port()));
        let raw = lab.a.netns.enter(|| {
            socket(
                AddressFamily::Inet,
                SockType::Raw,
                SockFlag::empty(),
                SockProtocol::Icmp,
            )
        })??;
        let to = SockaddrIn::new(10, 77, 0, lab.b.v4.octets()[3], 0);
        // Whether b accepts an ICMP error from a about b's flow to c.
        let is_taken = || -> Result<bool> {
            client.send(b"hello")?;
            sendto(
                raw.as_raw_fd(),
                &unreachable(&datagram),
                &to,
                MsgFlags::empty(),
            )?;
            let received = client.recv(&mut [0; 16]);
            Ok(received.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused))
        };
        ensure!(is_taken()?, "a is open");
        lab.write_network_policy("a", &none)?;
        eventually("the error is dropped", SOON, || {
            ensure!(!is_taken()?, "b gets it");
            Ok(())
        })?;
        // At a port of a, nothing listens.
        let closed = lab.b.netns.enter(|| UdpSocket::bind((lab.b.v4, 0)))??;
        closed.connect((lab.a.v4, 7001))?;
        closed.set_read_timeout(Some(Duration::from_secs(2)))?;
        closed.send(b"hello")?;
        let answer = closed.recv(&mut [0; 16]);
        let answer = answer.err().context("an answer")?;
        ensure!(answer.kind() == ErrorKind::ConnectionRefused, "{answer}");
        Ok(())
    });
}

#[test]
fn a_mebibyte_passes_out_of_a_pod_that_may_receive_nothing() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy("a", &json!({"podSelector": of("a"), "ingress": []}))?;
        let _netpol = lab.start_netpol(&[])?;
        for address in super::addresses(&lab.b) {
            let at = SocketAddr::new(address, 9000);
            let listener = lab.b.netns.enter(|| TcpListener::bind(at))??;
            let sent: Vec<u8> = (0..1_u32 << 20).map(|n| n.to_le_bytes()[0]).collect();
            let expected = sent.clone();
            let mut client = lab.a.connect(at, Duration::from_secs(1))?;
            let sender = std::thread::spawn(move || client.write_all(&sent).map(|()| client));
            let (mut server, _) = listener.accept()?;
            server.set_read_timeout(Some(Duration::from_secs(10)))?;
            let mut received = vec![0; expected.len()];
            server.read_exact(&mut received)?;
            ensure!(received == expected, "other bytes");
            drop(sender.join());
        }
        super::reaches(&lab.b, &both(&lab.a, PORT), false)
    });
}
