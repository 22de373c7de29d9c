//! Pods on a Linux bridge (podman, docker, LXC, flannel, k3s) are under the same policy as routed
//! pods. Their queries are judged and answered, wherever the server is.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::{WEB, dns_to, egress, good_names, names};
use holdfast_e2e::{AgentOptions, Lab, Pod, Query, SdpOptions, eventually, with_lab};
use shared_maps::event::Reason;

/// Peer field for servers on the bridge that are not endpoints.
const ON_BRIDGE: &str = "toCIDR: [10.88.0.53/32, \"fd88::35/128\"]";
const DNS_PODS: &str = "toEndpoints: [{matchLabels: {app: dns}}]";
const SOON: Duration = Duration::from_secs(10);
const NODE: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(10, 88, 0, 1)),
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, 1)),
];

/// `bridge-nf-call-iptables`: whether netfilter handles the packets of bridges, as kubelet sets it.
fn call_netfilter(lab: &Lab, on: &str) -> Result<()> {
    lab.node.sysctl(&[
        ("net.bridge.bridge-nf-call-iptables", on),
        ("net.bridge.bridge-nf-call-ip6tables", on),
    ])
}

fn over_both(query: &Query) -> [Query; 2] {
    [query.clone(), query.clone().tcp()]
}

/// Allowed names are answered and open. Refused names are refused and reach no server.
fn is_judged(lab: &Lab, pod: &Pod, servers: [IpAddr; 2]) -> Result<()> {
    queries_are_judged(lab, pod, servers)?;
    for open in [web4(10), web6(10)] {
        pod.expect_open(at(open, 80))?;
    }
    pod.expect_closed(at(web4(11), 80))
}

fn queries_are_judged(lab: &Lab, pod: &Pod, servers: [IpAddr; 2]) -> Result<()> {
    let bad = lab.zone.asked("www.bad.test");
    for server in servers {
        for query in over_both(&Query::a("www.good.test", server)) {
            pod.ask(&query)
                .with_context(|| format!("{query:?}"))?
                .expect(web4(10))?;
        }
        for query in over_both(&Query::aaaa("www.good.test", server)) {
            pod.ask(&query)
                .with_context(|| format!("{query:?}"))?
                .expect(web6(10))?;
        }
        for query in over_both(&Query::a("www.bad.test", server)) {
            let reply = pod.ask(&query).with_context(|| format!("{query:?}"))?;
            ensure!(reply.addresses().is_empty(), "{query:?}: answered");
        }
    }
    ensure!(
        lab.zone.asked("www.bad.test") == bad,
        "a refused name reached its server"
    );
    Ok(())
}

fn zone(lab: &Lab) {
    lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
    lab.zone.set("www.bad.test", &[web4(11), web6(11)], 60);
}

/// DNS rules for the servers that the peer field `servers` selects.
fn rules_for(servers: &str) -> String {
    let rules = dns_to("*.good.test", &[]).replace("toCIDR: []", servers);
    egress("good-names", "web", &(rules + &names("*.good.test")))
}

fn addresses(pod: &Pod) -> [IpAddr; 2] {
    [pod.v4.into(), pod.v6.into()]
}

#[test]
fn queries_of_a_bridged_pod_to_servers_beyond_the_node_are_judged_and_answered() {
    with_lab(|lab| {
        zone(lab);
        let bridge = Bridge::new(lab, "cni0")?;
        let pod = bridge.add_pod("p", 11)?;
        let neighbour = bridge.add_pod("q", 12)?;
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        for pod in [&pod, &neighbour, &lab.a] {
            lab.add_endpoint(pod, WEB)?;
        }
        for on in ["0", "1"] {
            call_netfilter(lab, on)?;
            for pod in [&pod, &neighbour, &lab.a] {
                is_judged(lab, pod, [DNS4, DNS6]).with_context(|| format!("netfilter {on}"))?;
            }
        }
        ensure!(lab.counted(Reason::ForgedAnswer)? == 0);
        Ok(())
    });
}

#[test]
fn a_server_on_the_pods_own_bridge_sees_no_query_of_the_pod_itself() {
    with_lab(|lab| {
        zone(lab);
        let bridge = Bridge::new(lab, "cni0")?;
        let pod = bridge.add_pod("p", 11)?;
        let server = bridge.add_pod("dns", 53)?;
        let at_server = addresses(&server);
        let dns = DnsServer::start(&server.netns, &at_server, &lab.zone)?;
        lab.write_policy("web.yaml", &rules_for(ON_BRIDGE))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&pod, WEB)?;
        let judged = |pod: &Pod| -> Result<()> {
            is_judged(lab, pod, at_server)?;
            let askers = dns.take_askers();
            ensure!(
                askers == NODE.into(),
                "queried without the proxy, by {askers:?}"
            );
            Ok(())
        };
        judged(&pod).context("endpoint server")?;
        // A query of several packets, so that fragments follow the first.
        for server in at_server {
            pod.ask(&Query::a("www.good.test", server).sized(4000))?
                .expect(web4(10))?;
        }
        call_netfilter(lab, "0")?;
        judged(&pod).context("netfilter does not see the bridge")?;
        // The bridge uses the lowest MAC of its ports. A port with a lower MAC changes nothing for
        // the pod's queries.
        let _lower = bridge.add_port("low", 13, Some("02:00:00:00:00:01"))?;
        let link = lab.node.run("ip", &["link", "show", "cni0"])?;
        ensure!(link.contains("02:00:00:00:00:01"), "{link}");
        queries_are_judged(lab, &pod, at_server).context("the bridge has another address")?;
        // Other traffic through the bridge needs its new address, with or without Holdfast.
        pod.netns.batch("neighbour flush all")?;
        judged(&pod).context("the bridge has another address")?;
        // The server is under policy as well.
        lab.write_policy("web.yaml", &rules_for(DNS_PODS))?;
        lab.add_endpoint(
            &server,
            "k8s:app=dns,k8s:io.kubernetes.pod.namespace=default",
        )?;
        judged(&pod).context("the server is an endpoint")?;
        ensure!(lab.counted(Reason::ForgedAnswer)? == 0);
        Ok(())
    });
}

#[test]
fn a_resolver_on_the_bridges_own_address_gets_allowed_queries_only() {
    with_lab(|lab| {
        zone(lab);
        let bridge = Bridge::new(lab, "cni0")?;
        let pod = bridge.add_pod("p", 11)?;
        let free = bridge.add_pod("f", 12)?;
        let dns = DnsServer::start(&lab.node, &NODE, &lab.zone)?;
        lab.write_policy("web.yaml", &rules_for("toEntities: [host]"))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&pod, WEB)?;
        is_judged(lab, &pod, NODE)?;
        let pods = addresses(&pod);
        let askers = dns.take_askers();
        ensure!(
            !askers.iter().any(|asker| pods.contains(asker)),
            "{askers:?}"
        );
        // A pod without policy queries the same server, without the proxy.
        for server in NODE {
            for query in over_both(&Query::a("www.bad.test", server)) {
                free.ask(&query)?.expect(web4(11))?;
            }
        }
        ensure!(dns.take_askers() == addresses(&free).into());
        // The same holds for a pod whose endpoint was removed.
        let key = format!("cli/{}/eth0", pod.netns.name());
        lab.agent(&["endpoint", "remove", &key])?;
        eventually("the server itself answers", SOON, || {
            for server in NODE {
                for query in over_both(&Query::a("www.bad.test", server)) {
                    pod.ask(&query.within(Duration::from_secs(1)))?
                        .expect(web4(11))?;
                }
            }
            Ok(())
        })
    });
}

#[test]
fn a_bridge_that_the_node_does_not_use_is_refused_by_name() {
    with_lab(|lab| {
        zone(lab);
        let bridge = Bridge::without_address(lab, "lan0")?;
        let pod = bridge.add_pod("p", 11)?;
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        let refused = lab.add_endpoint(&pod, WEB).err().context("taken")?;
        let text = format!("{refused:#}");
        for part in ["bridge lan0", pod.netns.name(), "ip address add"] {
            ensure!(text.contains(part), "{part} is not in: {text}");
        }
        lab.node
            .batch("address add 10.88.0.1/24 dev lan0\naddress add fd88::1/64 dev lan0 nodad")?;
        lab.node.settled()?;
        lab.add_endpoint(&pod, WEB)?;
        is_judged(lab, &pod, [DNS4, DNS6])
    });
}

#[test]
fn a_restarted_agent_continues_with_bridged_pods() {
    with_lab(|lab| {
        zone(lab);
        let bridge = Bridge::new(lab, "cni0")?;
        let pod = bridge.add_pod("p", 11)?;
        let server = bridge.add_pod("dns", 53)?;
        let at_server = addresses(&server);
        let dns = DnsServer::start(&server.netns, &at_server, &lab.zone)?;
        lab.write_policy("web.yaml", &rules_for(ON_BRIDGE))?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&pod, WEB)?;
        is_judged(lab, &pod, at_server)?;
        agent.kill_9()?;
        is_judged(lab, &pod, at_server).context("without an agent")?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.connected("one")?;
        is_judged(lab, &pod, at_server).context("after the restart")?;
        let askers = dns.take_askers();
        ensure!(
            askers == NODE.into(),
            "queried without the proxy, by {askers:?}"
        );
        Ok(())
    });
}
