//! Pods that the node routes: each direction and port as the policies say, in both families.

use std::net::UdpSocket;

use anyhow::ensure;
use holdfast_e2e::netpol_run::NETPOL_METRICS;
use holdfast_e2e::{eventually, with_lab};
use serde_json::json;

use super::{PORT, Pods, SOON, both, of, reaches, status_has};

#[test]
fn a_policy_opens_what_it_allows_and_nothing_else() {
    with_lab(|lab| {
        let pods = Pods::new(lab)?;
        pods.lab.write_network_policy(
            "b",
            &json!({
                "podSelector": of("b"),
                "ingress": [{"from": [{"podSelector": of("a")}], "ports": [{"port": PORT}]}],
            }),
        )?;
        let _netpol = lab.start_netpol(&[])?;
        reaches(&lab.a, &both(&lab.b, PORT), true)?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        reaches(&lab.b, &both(&lab.a, 8080), true)?;

        // The policy allows nothing again. Then a pod gets the label of another pod.
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        lab.write_network_policy(
            "b",
            &json!({"podSelector": of("b"), "ingress": [{"from": [{"podSelector": of("c")}]}]}),
        )?;
        lab.write_pod("a", &json!({"app": "c"}), &lab.a)?;
        reaches(&lab.a, &both(&lab.b, 8080), true)?;
        lab.write_pod("a", &json!({"app": "a"}), &lab.a)?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;

        // Egress of a: to b only.
        lab.write_network_policy(
            "a",
            &json!({
                "podSelector": of("a"),
                "policyTypes": ["Egress"],
                "egress": [{"to": [{"podSelector": of("b")}]}],
            }),
        )?;
        lab.remove_policy("policy-b.json")?;
        reaches(&lab.a, &both(&lab.b, PORT), true)?;
        reaches(&lab.b, &both(&lab.a, PORT), true)?;
        lab.write_network_policy(
            "a",
            &json!({"podSelector": of("a"), "policyTypes": ["Egress"]}),
        )?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        // Answers pass.
        reaches(&lab.b, &both(&lab.a, PORT), true)
    });
}

#[test]
fn status_pods_and_why_say_what_is_in_force() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy(
            "b",
            &json!({"podSelector": of("b"), "ingress": [{"ports": [{"port": PORT}]}]}),
        )?;
        lab.write_policy(
            "cilium.yaml",
            "{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, \
             metadata: {name: names, namespace: default}, spec: {endpointSelector: {}, ingress: [{}]}}",
        )?;
        let _netpol = lab.start_netpol(&[])?;
        status_has(
            lab,
            &[
                "1 in force, 0 documents refused; 1 of 2 pods restricted",
                "1 CiliumNetworkPolicy",
                "CiliumNetworkPolicy default/names: not enforced on this node",
            ],
        )?;
        let listed = lab.netpol(&["pods"])?;
        for text in ["default/a", "NetworkPolicy/default/b", &lab.b.host_side] {
            ensure!(listed.contains(text), "no {text:?} in:\n{listed}");
        }
        let to = lab.b.v4.to_string();
        let why = lab.netpol(&["why", "default/a", &to, "--port", "80"])?;
        ensure!(
            why.contains("allowed by NetworkPolicy/default/b spec.ingress[0]"),
            "{why}"
        );
        let denied = lab.netpol(&["why", "default/a", "default/b", "--port", "81/UDP"]);
        let denied = format!("{:?}", denied.err());
        ensure!(denied.contains("may not connect"), "{denied}");
        let open = lab.netpol(&["why", "default/a", "default/b"])?;
        ensure!(open.contains("only 80/TCP"), "{open}");
        lab.netpol(&["why", "default/a", &format!("{to}:80")])?;
        let unknown = lab.netpol(&["why", "default/c", "default/b"]);
        let unknown = format!("{:?}", unknown.err());
        ensure!(unknown.contains("pods: default/a, default/b"), "{unknown}");
        let metric = lab.metric(
            NETPOL_METRICS,
            "holdfast_netpol_not_enforced_policies",
            "kind=\"CiliumNetworkPolicy\"",
        )?;
        ensure!(metric > 0.5, "{metric}");
        Ok(())
    });
}

#[test]
fn a_pod_cannot_send_under_another_address() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy(
            "b",
            &json!({
                "podSelector": of("b"),
                "ingress": [{"from": [{"ipBlock": {"cidr": "10.77.9.9/32"}}]}],
            }),
        )?;
        let netpol = lab.start_netpol(&["--log-drops"])?;
        // No pod has the allowed address, until pod a takes it.
        lab.a.netns.batch("address add 10.77.9.9/32 dev eth0")?;
        lab.node
            .batch(&format!("route add 10.77.9.9/32 dev {}", lab.a.host_side))?;
        let taken = ("10.77.9.9", 0);
        let socket = lab.a.netns.enter(|| UdpSocket::bind(taken))??;
        let spoofed = || {
            lab.metric(
                NETPOL_METRICS,
                "holdfast_netpol_dropped_packets_total",
                "reason=\"spoofed\"",
            )
        };
        eventually("the guard against false sources", SOON, || {
            socket.send_to(b"hello", (lab.b.v4, PORT))?;
            let count = spoofed()?;
            ensure!(count > 0.5, "{count} packets");
            let log = netpol.log();
            let mut lines = log.lines().filter(|line| line.contains("false source"));
            let interface = format!("interface=\"{}\"", lab.a.host_side);
            let parts = ["pod=\"default/a\"", "protocol=\"UDP\"", &interface];
            let found = lines.any(|line| parts.iter().all(|part| line.contains(part)));
            ensure!(found, "{log}");
            Ok(())
        })
    });
}

#[test]
fn dropped_packets_are_logged_with_pod_and_policy() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        let netpol = lab.start_netpol(&["--log-drops"])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        eventually("a line about the packet", SOON, || {
            let log = netpol.log();
            let mut lines = log.lines().filter(|line| line.contains("packet dropped"));
            let to = format!("to={}", lab.b.v6);
            let found = lines.any(|line| {
                let parts = [
                    "ingress",
                    "default/b",
                    "NetworkPolicy/default/b",
                    &to,
                    "=80 protocol=\"TCP\"",
                ];
                parts.iter().all(|part| line.contains(part))
            });
            ensure!(found, "{log}");
            Ok(())
        })
    });
}
