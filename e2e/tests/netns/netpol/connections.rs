//! Open connections: a policy ends them, answers of allowed ones pass, and those of a pod that ended are
//! forgotten.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use agent_datapath::tracked;
use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::{Lab, eventually, with_lab};
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
        // b may send: its datagrams must not open the way for those of a.
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
fn connections_of_a_pod_that_ends_are_forgotten() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let _netpol = lab.start_netpol(&[])?;
        let to = SocketAddr::new(lab.b.v4.into(), PORT);
        let _open = lab.a.connect(to, Duration::from_secs(1))?;
        let entries = || counted(lab, lab.b.v4.into());
        ensure!(entries()? > 0, "the connection is not tracked");
        lab.remove_policy("pod-b.json")?;
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
        // The pods are the same from then on.
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
