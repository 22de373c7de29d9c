//! Starts that are refused, and surroundings in which policy is not in force, each with its remedy.

use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::netpol_run::NODE;
use holdfast_e2e::{AgentOptions, Lab, Pod, eventually, with_lab};
use serde_json::json;

use super::{PORT, Pods, SOON, both, of, reaches, status_has};

/// The output of `netpol run` with these flags, which ends by itself.
fn refused(lab: &Lab, flags: &[&str]) -> Result<String> {
    let output = lab.netpol_command(flags)?.output()?;
    ensure!(!output.status.success(), "it was not refused");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn only_one_enforces_in_a_network_namespace() {
    with_lab(|lab| {
        let netpol = lab.start_netpol(&[])?;
        let error = refused(lab, &[])?;
        let pid = format!("(pid {})", netpol.id());
        for text in ["another `holdfast-agent netpol run`", &pid, "stop it first"] {
            ensure!(error.contains(text), "no {text:?} in: {error}");
        }
        ensure!(netpol.terminate(SOON)?.success(), "exit code");
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let error = refused(lab, &[])?;
        for text in ["`holdfast-agent run`", "and then take its programs off"] {
            ensure!(error.contains(text), "no {text:?} in: {error}");
        }
        Ok(())
    });
}

#[test]
fn pods_on_a_bridge_need_a_setting_of_the_kernel() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        let (c, d) = (bridge.add_pod("c", 13)?, bridge.add_pod("d", 14)?);
        let _pods = Pods::of(lab, &[("c", &c), ("d", &d)])?;
        lab.write_network_policy(
            "d",
            &json!({"podSelector": of("d"), "ingress": [{"ports": [{"port": PORT}]}]}),
        )?;
        let set = |value: &str| {
            let names =
                ["iptables", "ip6tables"].map(|name| format!("net.bridge.bridge-nf-call-{name}"));
            lab.node.sysctl(&[(&names[0], value), (&names[1], value)])
        };
        set("0")?;
        let netpol = lab.begin_netpol(&[])?;
        status_has(
            lab,
            &[
                "no: see PROBLEM",
                "net.bridge.bridge-nf-call-iptables is not 1",
                "--set-bridge-sysctls",
            ],
        )?;
        reaches(&c, &both(&d, 8080), true)?;
        set("1")?;
        reaches(&c, &both(&d, 8080), false)?;
        reaches(&c, &both(&d, PORT), true)?;
        status_has(lab, &["bridge br0", "Ready            yes"])?;
        ensure!(netpol.terminate(SOON)?.success(), "exit code");
        set("0")?;
        let _netpol = lab.begin_netpol(&["--set-bridge-sysctls"])?;
        reaches(&c, &both(&d, 8080), false)?;
        reaches(&c, &both(&d, PORT), true)
    });
}

/// Whether a datagram to a pod's link-local address arrives. Every pod has such an address.
fn arrives_at_link_local(from: &Pod, to: &Pod) -> Result<bool> {
    let shown = [
        "-6", "-o", "address", "show", "dev", "eth0", "scope", "link",
    ];
    let shown = to.netns.run("ip", &shown)?;
    let address = shown.split_whitespace().find(|word| word.contains("/64"));
    let address = address.and_then(|word| word.split('/').next());
    let address: Ipv6Addr = address.context("a link-local address")?.parse()?;
    let link = from.netns.run("ip", &["-o", "link", "show", "eth0"])?;
    let index = link.split(':').next().unwrap_or_default().trim().parse()?;
    let any = (Ipv6Addr::UNSPECIFIED, 0);
    let receiver = to.netns.enter(|| UdpSocket::bind(any))??;
    receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
    let sender = from.netns.enter(|| UdpSocket::bind(any))??;
    let to = SocketAddrV6::new(address, receiver.local_addr()?.port(), 0, index);
    for _ in 0..3 {
        sender.send_to(b"hello", to)?;
    }
    Ok(receiver.recv(&mut [0; 16]).is_ok())
}

#[test]
fn link_local_addresses_bypass_no_policy_on_a_bridge() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        let (c, d) = (bridge.add_pod("c", 13)?, bridge.add_pod("d", 14)?);
        let _pods = Pods::of(lab, &[("c", &c), ("d", &d)])?;
        let _netpol = lab.start_netpol(&["--set-bridge-sysctls"])?;
        ensure!(arrives_at_link_local(&c, &d)?, "no pod is restricted");
        lab.write_network_policy("d", &json!({"podSelector": of("d"), "ingress": []}))?;
        reaches(&c, &both(&d, PORT), false)?;
        ensure!(!arrives_at_link_local(&c, &d)?, "policy was bypassed");
        ensure!(!arrives_at_link_local(&d, &c)?, "in both directions");
        Ok(())
    });
}

#[test]
fn ipvs_is_named() {
    with_lab(|lab| {
        lab.node.batch("link add kube-ipvs0 type bridge")?;
        let _netpol = lab.begin_netpol(&[])?;
        status_has(lab, &["kube-proxy runs in IPVS mode", "no: see PROBLEM"])?;
        lab.node.batch("link del kube-ipvs0")?;
        eventually("it is ready", SOON, || {
            let status = lab.netpol_json(&["status"])?;
            ensure!(status["ready"] == true, "{status}");
            Ok(())
        })
    });
}

#[test]
fn a_dry_run_prints_the_difference_and_changes_nothing() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        let run = || -> Result<String> {
            let output = lab.netpol_command(&["--dry-run"])?.output()?;
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(output.status.success(), "{error}");
            Ok(String::from_utf8(output.stdout)?)
        };
        let printed = run()?;
        ensure!(printed.contains("the table is missing"), "{printed}");
        ensure!(printed.contains("holdfast_policies_v1"), "{printed}");
        ensure!(lab.netpol_table().is_err(), "a table was made");
        let netpol = lab.start_netpol(&[])?;
        eventually("nothing is left to do", SOON, || {
            let printed = run()?;
            ensure!(
                printed.contains("the table in force is the same"),
                "{printed}"
            );
            Ok(())
        })?;
        ensure!(netpol.terminate(SOON)?.success(), "exit code");
        lab.write_pod("a", &json!({"app": "b"}), &lab.a)?;
        let printed = run()?;
        let elements = printed
            .lines()
            .filter(|line| line.starts_with("add element"));
        // The pod is restricted in both families, and reaches itself.
        ensure!(elements.count() == 4, "{printed}");
        ensure!(!printed.contains("delete"), "{printed}");
        Ok(())
    });
}

#[test]
fn pods_that_claim_the_address_of_another_take_no_policy_from_it() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        let _netpol = lab.start_netpol(&[])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        let before = lab.netpol_table()?;
        let thief = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "thief",
                "namespace": "default",
                "creationTimestamp": "2040-01-01T00:00:00Z",
            },
            "spec": {"nodeName": "elsewhere"},
            "status": {"phase": "Running", "podIP": lab.b.v4},
        });
        lab.write_policy("pod-thief.json", &thief.to_string())?;
        status_has(lab, &["claimed by pods default/thief and default/b"])?;
        ensure!(lab.netpol_table()? == before, "the table changed");
        reaches(&lab.a, &both(&lab.b, PORT), false)?;

        // The other pod is of this node: the policies of both pods have to allow.
        lab.write_pod("twin", &json!({"app": "twin"}), &lab.b)?;
        status_has(lab, &["by those of default/twin"])?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        let at = |ports: &[u16]| {
            let ports: Vec<_> = ports.iter().map(|port| json!({"port": port})).collect();
            json!([{"ports": ports}])
        };
        let twin = json!({"podSelector": of("twin"), "ingress": at(&[8080])});
        lab.write_network_policy("twin", &twin)?;
        let b = json!({"podSelector": of("b"), "ingress": at(&[PORT, 8080])});
        lab.write_network_policy("b", &b)?;
        reaches(&lab.a, &both(&lab.b, 8080), true)?;
        reaches(&lab.a, &both(&lab.b, PORT), false)
    });
}

#[test]
fn a_route_that_leads_to_no_pod_is_named_and_its_device_is_not_guarded() {
    with_lab(|lab| {
        for (name, address) in [("far", "198.51.100.99"), ("near", "192.0.2.99")] {
            let pod = json!({
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"nodeName": NODE},
                "status": {"phase": "Running", "podIP": address},
            });
            lab.write_policy(&format!("pod-{name}.json"), &pod.to_string())?;
        }
        let _netpol = lab.start_netpol(&[])?;
        status_has(
            lab,
            &[
                "pod default/far: the route to 198.51.100.99 leads to up0 (veth), not to a pod",
                "pod default/near: the route to 192.0.2.99 leads to up0 (veth), not to a pod",
                "correct the route",
            ],
        )?;
        reaches(&lab.a, &[at(web4(10), 80)], true)
    });
}
