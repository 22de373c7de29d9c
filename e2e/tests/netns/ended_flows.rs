//! Flows end when policy no longer allows the direction that began them, and with the pod that had
//! them.
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{at, web4, web6};
use holdfast_e2e::policy::WEB;
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};
use shared_maps::conntrack::{CtKey4, CtKey6, CtValue, NAME_ANY4, NAME_ANY6};
use shared_maps::user::{Access, Map, MapKind};

const SOON: Duration = Duration::from_secs(15);
const POD_PORT: u16 = 7000;
const PEER_PORT: u16 = 9000;
/// Labels of the pod that replaces the first pod.
const SECOND: &str = "k8s:app=second,k8s:io.kubernetes.pod.namespace=default";

fn policy(app: &str, rules: &str) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: {app}, namespace: default}}
spec:
  endpointSelector: {{matchLabels: {{app: {app}}}}}
{rules}"
    )
}

/// A policy by which only this peer may reach the pod's port, and the pod may reach no address of
/// these tests.
fn reached_by(peer: &str, peer6: &str) -> String {
    policy(
        "web",
        &format!(
            r#"
  ingress:
  - fromCIDR: ["{peer}", "{peer6}"]
    toPorts: [{{ports: [{{port: "{POD_PORT}", protocol: UDP}}]}}]
  egress:
  - toCIDR: ["203.0.113.99/32"]
"#
        ),
    )
}

/// A socket of the pod, and a socket of a peer in the world.
fn sockets(lab: &Lab, pod: IpAddr, peer: IpAddr) -> Result<[UdpSocket; 2]> {
    let inside = lab.a.netns.enter(|| UdpSocket::bind(at(pod, POD_PORT)))??;
    let outside = lab.world.enter(|| UdpSocket::bind(at(peer, PEER_PORT)))??;
    for socket in [&inside, &outside] {
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    }
    Ok([inside, outside])
}

fn families(lab: &Lab) -> [(IpAddr, IpAddr); 2] {
    [(lab.a.v4.into(), web4(10)), (lab.a.v6.into(), web6(10))]
}

fn opened(outside: &UdpSocket, inside: &UdpSocket, pod: SocketAddr) -> Result<()> {
    eventually("the peer's datagram", SOON, || {
        outside.send_to(b"open", pod)?;
        inside.recv_from(&mut [0; 16])?;
        Ok(())
    })
}

#[test]
fn a_flow_that_the_pod_refreshes_ends_with_policy() {
    with_lab(|lab| {
        lab.write_policy(
            "web.yaml",
            &reached_by("203.0.113.10/32", "2001:db8:113::a/128"),
        )?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        let mut flows = Vec::new();
        for (pod, peer) in families(lab) {
            let [inside, outside] = sockets(lab, pod, peer)?;
            opened(&outside, &inside, at(pod, POD_PORT))?;
            flows.push((inside, outside, at(peer, PEER_PORT)));
        }
        let stop = AtomicBool::new(false);
        let sent = AtomicU64::new(0);
        std::thread::scope(|scope| -> Result<()> {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for (inside, _, peer) in &flows {
                        let count = u64::from(inside.send_to(b"reply", peer).is_ok());
                        sent.fetch_add(count, Ordering::Relaxed);
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            let ended = flow_ends(lab, &flows);
            stop.store(true, Ordering::Relaxed);
            ended
        })?;
        ensure!(sent.load(Ordering::Relaxed) > 100, "the pod sent no more");
        Ok(())
    });
}

/// The flows go on while policy allows them, and end when policy no longer allows them.
fn flow_ends(lab: &Lab, flows: &[(UdpSocket, UdpSocket, SocketAddr)]) -> Result<()> {
    let allowed = Instant::now() + Duration::from_secs(3);
    while Instant::now() < allowed {
        for (_, outside, peer) in flows {
            let came = outside.recv_from(&mut [0; 16]);
            came.with_context(|| format!("a reply to {peer}, while policy allows it"))?;
        }
    }
    lab.write_policy(
        "web.yaml",
        &reached_by("203.0.113.99/32", "2001:db8:113::63/128"),
    )?;
    let closed = Instant::now();
    eventually("the replies end", SOON, || {
        for (_, outside, peer) in flows {
            // Packets that are queued already may arrive, then nothing for a second.
            while outside.recv_from(&mut [0; 16]).is_ok() {
                ensure!(closed.elapsed() < SOON * 2, "a reply to {peer}");
            }
            let end = Instant::now() + Duration::from_secs(1);
            while Instant::now() < end {
                ensure!(
                    outside.recv_from(&mut [0; 16]).is_err(),
                    "a reply to {peer}"
                );
            }
        }
        Ok(())
    })
}

/// Connection entries that belong to another endpoint than `id`.
fn of_others(lab: &Lab, id: u64) -> Result<usize> {
    let four: Map<CtKey4, CtValue> =
        Map::open(&lab.pin(NAME_ANY4), MapKind::LruHash, Access::ReadOnly)?;
    let six: Map<CtKey6, CtValue> =
        Map::open(&lab.pin(NAME_ANY6), MapKind::LruHash, Access::ReadOnly)?;
    let four = four.entries()?.found.into_iter().map(|(_, value)| value);
    let six = six.entries()?.found.into_iter().map(|(_, value)| value);
    let other = |value: &CtValue| u64::from(value.last_rx_report) != id;
    Ok(four.chain(six).filter(other).count())
}

#[test]
fn a_pod_with_the_address_of_an_earlier_one_has_none_of_its_flows() {
    with_lab(|lab| {
        // The second pod may be reached by everyone, and may reach nothing that is used here.
        let rules = "\x20 egress:\n\x20 - toCIDR: [\"203.0.113.99/32\"]\n";
        lab.write_policy("second.yaml", &policy("second", rules))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        let first = lab.endpoint_id(&lab.a)?;
        let mut flows = Vec::new();
        for (pod, peer) in families(lab) {
            let [inside, outside] = sockets(lab, pod, peer)?;
            opened(&outside, &inside, at(pod, POD_PORT))?;
            inside.send_to(b"reply", at(peer, PEER_PORT))?;
            outside.recv_from(&mut [0; 16]).context("a reply")?;
            flows.push((inside, outside, at(peer, PEER_PORT)));
        }
        let key = format!("cli/{}/eth0", lab.a.netns.name());
        lab.agent(&["endpoint", "remove", &key])?;
        lab.add_endpoint(&lab.a, SECOND)?;
        let second = lab.endpoint_id(&lab.a)?;
        ensure!(first != second, "it is the same endpoint");
        for (inside, outside, peer) in &flows {
            let mut arrived = 0;
            for _ in 0..20 {
                inside.send_to(b"new", peer)?;
                arrived += u32::from(outside.recv_from(&mut [0; 16]).is_ok());
            }
            ensure!(arrived == 0, "{arrived} of 20 datagrams reached {peer}");
        }
        eventually("the earlier pod's entries are removed", SOON, || {
            let left = of_others(lab, second)?;
            ensure!(left == 0, "{left} are left");
            Ok(())
        })?;
        // The new pod can answer what it receives.
        for ((inside, outside, peer), (pod, _)) in flows.iter().zip(families(lab)) {
            opened(outside, inside, at(pod, POD_PORT))?;
            inside.send_to(b"reply", peer)?;
            outside
                .recv_from(&mut [0; 16])
                .context("a reply of the new pod")?;
        }
        Ok(())
    });
}
