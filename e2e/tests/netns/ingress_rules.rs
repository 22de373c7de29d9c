//! Ingress rules by label and port. They do not affect outgoing traffic.
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{at, other4, web4, web6};
use holdfast_e2e::pod::REFUSED_AFTER;
use holdfast_e2e::policy::{CLIENT, WEB};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};
use socket2::{Domain, Socket, Type};

const POLICY: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client-in, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: client}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: APP}}]
    toPorts: [{ports: [{port: "80", protocol: TCP}]}]
"#;

#[test]
fn only_the_named_pods_and_ports_are_reached() {
    with_lab(|lab| {
        let _b = Web::start(&lab.b.netns, &[lab.b.v4.into()], &[80, 443], &[7777])?;
        lab.write_policy("in.yaml", &POLICY.replace("APP", "web"))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        for b in [lab.b.v4.into(), lab.b.v6.into()] {
            lab.a.expect_open(at(b, 80))?;
            lab.a.expect_closed(at(b, 443))?;
        }
        assert!(
            lab.a
                .datagram(at(lab.b.v4.into(), 7777), Duration::from_millis(300))
                .is_err()
        );
        // The pod's own connections and their answers are not ingress.
        lab.b.expect_open(at(web4(10), 8080))?;
        let stream = lab.a.stream(at(lab.b.v4.into(), 80))?;

        lab.write_policy("in.yaml", &POLICY.replace("APP", "nobody"))?;
        eventually("the pod's port closes", Duration::from_secs(10), || {
            lab.a.expect_closed(at(lab.b.v4.into(), 80))
        })?;
        stream.expect_cut(Duration::from_secs(10))?;
        lab.b.expect_open(at(web4(10), 8080))
    });
}

const PREFIXES: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: prefixes-in, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: client}}
  ingress:
  - fromCIDR: ["203.0.113.0/24", "2001:db8:113::/64"]
    toPorts: [{ports: [{port: "80", protocol: TCP}]}]
  - fromEndpoints: [{matchLabels: {app: web}}]
  ingressDeny:
  - fromCIDR: ["203.0.113.13/32", "2001:db8:113::d/128"]
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
"#;

/// Connects from an address of the world. Returns whether it succeeded.
fn from_world(lab: &Lab, from: IpAddr, to: SocketAddr) -> Result<bool> {
    lab.world.enter(|| -> Result<bool> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.bind(&at(from, 0).into())?;
        Ok(socket.connect_timeout(&to.into(), REFUSED_AFTER).is_ok())
    })?
}

#[test]
fn prefixes_are_allowed_in_and_deny_overrides_them() {
    with_lab(|lab| {
        let own = [lab.b.v4.into(), lab.b.v6.into()];
        let web = Web::start(&lab.b.netns, &own, &[80, 443], &[])?;
        lab.write_policy("in.yaml", PREFIXES)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        for (b, [allowed, denied, other]) in [
            (own[0], [web4(10), web4(13), other4(10)]),
            (own[1], [web6(10), web6(13), "2001:db8:53::53".parse()?]),
        ] {
            assert!(from_world(lab, allowed, at(b, 80))?, "{allowed} to {b}");
            assert!(!from_world(lab, allowed, at(b, 443))?, "{allowed}, 443");
            assert_eq!(web.visits(at(b, 80)), 1);
            for from in [denied, other] {
                assert!(!from_world(lab, from, at(b, 80))?, "{from} to {b}");
            }
            assert_eq!(web.visits(at(b, 80)), 1, "another connection arrived");
            lab.a.expect_open(at(b, 80))?;
            lab.a.expect_closed(at(b, 443))?;
            // Outgoing traffic is not ingress, not even to a denied prefix.
            lab.b.expect_open(at(denied, 80))?;
        }

        // Without the deny the connection succeeds.
        let (without, _) = PREFIXES.split_once("  ingressDeny").unwrap_or_default();
        lab.write_policy("in.yaml", without)?;
        eventually("the deny is gone", Duration::from_secs(10), || {
            ensure!(from_world(lab, web4(13), at(own[0], 80))?, "still denied");
            Ok(())
        })?;
        assert!(from_world(lab, web6(13), at(own[1], 80))?);
        lab.a.expect_open(at(own[0], 443))
    });
}
