//! A packet from outside with the address of the node or of a pod does not count as a packet of the
//! node or of the pod.
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{NODE4, NODE6, UDP_PORT, at, web4, web6};
use holdfast_e2e::policy::{CLIENT, WEB};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Netns, Pod, eventually, with_lab};
use shared_maps::IdentityId;
use shared_maps::event::Reason;
use socket2::{Domain, Socket, Type};

const SOON: Duration = Duration::from_secs(10);
const MANY: u64 = 10;

const POLICY: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client-in, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: client}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
  - fromCIDR: ["203.0.113.10/32", "2001:db8:113::a/128"]
"#;

/// Sends from an address that the namespace may not have.
fn send(netns: &Netns, from: IpAddr, to: SocketAddr, count: u64) -> Result<()> {
    netns.enter(|| -> Result<()> {
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None)?;
        if from.is_ipv4() {
            socket.set_ip_transparent_v4(true)?;
        } else {
            socket.set_ip_transparent_v6(true)?;
        }
        socket.bind(&at(from, 0).into())?;
        let socket: UdpSocket = socket.into();
        for _ in 0..count {
            socket.send_to(b"hello", to)?;
        }
        Ok(())
    })?
}

fn both(pod: &Pod) -> [IpAddr; 2] {
    [pod.v4.into(), pod.v6.into()]
}

#[test]
fn an_address_of_the_node_proves_nothing_outside() {
    with_lab(|lab| {
        // Without this setting, the kernel itself refuses the node's IPv4 addresses from outside.
        lab.node.sysctl(&[
            ("net.ipv4.conf.all.accept_local", "1"),
            ("net.ipv4.conf.up0.accept_local", "1"),
        ])?;
        let bridge = Bridge::new(lab, "cni0")?;
        let (near, bridged) = (bridge.add_pod("p", 11)?, bridge.add_pod("q", 12)?);
        let targets = [&lab.b, &bridged];
        let webs: Vec<Web> = targets
            .iter()
            .map(|pod| Web::start(&pod.netns, &both(pod), &[], &[UDP_PORT]))
            .collect::<Result<_>>()?;
        lab.write_policy("in.yaml", POLICY)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        for pod in [&lab.a, &near] {
            lab.add_endpoint(pod, WEB)?;
        }
        for pod in targets {
            lab.add_endpoint(pod, CLIENT)?;
        }
        for (pod, web) in targets.into_iter().zip(&webs) {
            for (own, known, claimed) in [
                (
                    IpAddr::V4(pod.v4),
                    web4(10),
                    [
                        NODE4,
                        "10.77.0.1".parse()?,
                        "10.88.0.1".parse()?,
                        lab.a.v4.into(),
                        near.v4.into(),
                    ],
                ),
                (
                    pod.v6.into(),
                    web6(10),
                    [
                        NODE6,
                        "fd77::1".parse()?,
                        "fd88::1".parse()?,
                        lab.a.v6.into(),
                        near.v6.into(),
                    ],
                ),
            ] {
                let to = at(own, UDP_PORT);
                // These senders use their own addresses.
                let mut expected = 0;
                for netns in [&lab.a.netns, &near.netns, &lab.node] {
                    expected += 1;
                    netns.enter(|| -> Result<()> {
                        let any = at(
                            if own.is_ipv4() {
                                "0.0.0.0".parse()?
                            } else {
                                "::".parse()?
                            },
                            0,
                        );
                        UdpSocket::bind(any)?.send_to(b"hello", to)?;
                        Ok(())
                    })??;
                }
                eventually("senders that policy admits arrive", SOON, || {
                    ensure!(
                        web.visits(to) == expected,
                        "{} of {expected}",
                        web.visits(to)
                    );
                    Ok(())
                })?;
                for from in claimed {
                    let before = lab.counted(Reason::PolicyDenied)?;
                    send(&lab.world, from, to, MANY)?;
                    // The path works, and this packet comes last.
                    send(&lab.world, known, to, 1)?;
                    expected += 1;
                    eventually("the packet that policy admits arrives", SOON, || {
                        ensure!(web.visits(to) >= expected, "{} visits", web.visits(to));
                        Ok(())
                    })?;
                    let visits = web.visits(to);
                    ensure!(
                        visits == expected,
                        "{} packets arrived at {to} that came in from outside as {from}",
                        visits - expected
                    );
                    let dropped = lab.counted(Reason::PolicyDenied)? - before;
                    ensure!(
                        dropped >= MANY,
                        "as {from} to {to}: {dropped} of {MANY} dropped"
                    );
                }
            }
        }
        // The agent reads records several times a second.
        eventually("records name the world as the sender", SOON, || {
            let seen = lab.agent(&["observe"])?;
            for world in [IdentityId::WORLD_IPV4, IdentityId::WORLD_IPV6] {
                let remote = format!("remote {}, ", world.0);
                ensure!(seen.contains(&remote), "{remote}: {seen}");
            }
            Ok(())
        })?;
        Ok(())
    });
}
