//! DNS servers behind an address that the node translates (kube-proxy's ClusterIP). Queries are
//! judged and answered, and the node's connection tracking contains only the proxy's own queries.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{DNS4, DNS6, NODE4, NODE6, OTHER_DNS4, at, web4, web6};
use holdfast_e2e::policy::{WEB, dns_to, egress, names};
use holdfast_e2e::service::{self, service4, service6};
use holdfast_e2e::shell;
use holdfast_e2e::{AgentOptions, Lab, Pod, Query, SdpOptions, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);
/// TCP port of the proxy's metrics.
const SDP: u16 = 9961;
const SERVICE4: IpAddr = service4(10);
const SERVICE6: IpAddr = service6(0x10);

fn translate(lab: &Lab) -> Result<()> {
    service::translate(lab, &[(SERVICE4, DNS4), (SERVICE6, DNS6)])
}

fn policy() -> String {
    let servers = ["10.96.0.10/32", "fd96::10/128"];
    let rules = dns_to("*.good.test", &servers) + &names("*.good.test");
    egress("good-names", "web", &rules)
}

fn is_judged(lab: &Lab, pod: &Pod) -> Result<()> {
    let bad = lab.zone.asked("www.bad.test");
    for server in [SERVICE4, SERVICE6] {
        for tcp in [false, true] {
            let over = |query: Query| if tcp { query.tcp() } else { query };
            let good = over(Query::a("www.good.test", server));
            let reply = pod.ask(&good).with_context(|| format!("{good:?}"))?;
            reply.expect(web4(10))?;
            let bad = over(Query::a("www.bad.test", server));
            let reply = pod.ask(&bad).with_context(|| format!("{bad:?}"))?;
            ensure!(reply.addresses().is_empty(), "{bad:?}: answered");
        }
    }
    ensure!(lab.zone.asked("www.bad.test") == bad);
    Ok(())
}

/// Flows that the node's connection tracking has to or from port 53.
fn tracked(lab: &Lab) -> Result<Vec<String>> {
    let flows = lab
        .node
        .enter(|| std::fs::read_to_string("/proc/thread-self/net/nf_conntrack"))??;
    let dns = flows.lines().filter(|line| line.contains("port=53 "));
    Ok(dns.map(str::to_owned).collect())
}

#[test]
fn queries_to_an_address_that_the_node_translates_are_judged_and_answered() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
        lab.zone.set("www.bad.test", &[web4(11)], 60);
        translate(lab)?;
        let bridge = Bridge::new(lab, "cni0")?;
        let bridged = bridge.add_pod("p", 11)?;
        lab.write_policy("web.yaml", &policy())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&bridged, WEB)?;
        for (pod, what) in [(&lab.a, "routed"), (&bridged, "bridged")] {
            is_judged(lab, pod).context(what)?;
        }
        lab.a.expect_open(at(web4(10), 80))?;
        bridged.expect_open(at(web4(10), 80))?;

        let flows = tracked(lab)?;
        let own = [NODE4, NODE6].map(|node| match node {
            IpAddr::V4(ip) => format!("src={ip} dst={SERVICE4} "),
            // The kernel's table writes all digits.
            IpAddr::V6(_) => "src=2001:0db8:0053:0000:0000:0000:0000:0001 dst=fd96:".to_owned(),
        });
        for own in &own {
            for protocol in ["udp", "tcp"] {
                ensure!(
                    flows
                        .iter()
                        .any(|flow| flow.contains(own) && flow.contains(protocol)),
                    "the proxy's own queries over {protocol} are not tracked: {flows:#?}"
                );
            }
        }
        let others: Vec<_> = flows
            .iter()
            .filter(|flow| !own.iter().any(|own| flow.contains(own)))
            .collect();
        ensure!(
            others.is_empty(),
            "entries of queries or answers: {others:#?}"
        );
        Ok(())
    });
}

/// Translates each Service to its two backends by turns: flows 1, 3, … go to the first backend.
fn translate_by_turns(lab: &Lab, backends: [[IpAddr; 2]; 2]) -> Result<()> {
    let rules = backends.map(|[first, second]| {
        let (family, service) = match first {
            IpAddr::V4(_) => ("ip", SERVICE4),
            IpAddr::V6(_) => ("ip6", SERVICE6),
        };
        format!(
            "{family} daddr {service} udp dport 53 \
             dnat to numgen inc mod 2 map {{ 0 : {first}, 1 : {second} }}\n"
        )
    });
    let table = format!(
        "table inet turns {{}}\ndelete table inet turns\ntable inet turns {{\n\
         chain out {{ type nat hook output priority -100; {} }}\n}}\n",
        rules.join("")
    );
    shell::feed(lab.node.command("nft").args(["-f", "-"]), &table)?;
    Ok(())
}

#[test]
fn a_query_whose_server_is_gone_goes_to_the_next_one_behind_the_same_address() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
        lab.write_policy("web.yaml", &policy())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        // Hosts without a DNS server answer with an ICMP error, each time.
        for limit in ["ipv4.icmp_ratelimit", "ipv6.icmp.ratelimit"] {
            lab.world.sysctl(&[(&format!("net.{limit}"), "0")])?;
        }
        let gone = [web4(12), web6(12)];
        translate_by_turns(lab, [[gone[0], DNS4], [gone[1], DNS6]])?;
        for attempt in 0..20 {
            for server in [SERVICE4, SERVICE6] {
                let query = Query::a("www.good.test", server);
                let reply = lab.a.ask(&query).with_context(|| format!("{attempt}"))?;
                reply
                    .expect(web4(10))
                    .with_context(|| format!("{attempt}: {query:?}"))?;
            }
        }
        translate_by_turns(lab, [[gone[0]; 2], [gone[1]; 2]])?;
        eventually("all servers are gone", SOON, || {
            for server in [SERVICE4, SERVICE6] {
                let reply = lab.a.ask(&Query::a("www.good.test", server))?;
                reply.expect_code(ResponseCode::ServFail)?;
            }
            Ok(())
        })
    });
}

/// The pod of a DNS server was deleted: the connection to it still has an entry in the node's connection
/// tracking, and no process answers.
#[test]
fn a_query_on_an_older_connection_whose_server_is_gone_without_a_word_is_answered() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.write_policy("web.yaml", &policy())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        service::translate(lab, &[(SERVICE4, DNS4)])?;
        let query = Query::a("www.good.test", SERVICE4).tcp();
        lab.a.ask(&query)?.expect(web4(10))?;
        lab.a.ask(&query)?.expect(web4(10))?;
        let made = || lab.metric(SDP, "holdfast_dns_tcp_server_connections_made_total", "");
        ensure!(made()? == 1.0, "{} connections for two queries", made()?);

        let silent = format!(
            "table inet gone {{ chain in {{ type filter hook input priority 0; ip daddr {DNS4} drop; }}\n}}\n"
        );
        shell::feed(lab.world.command("nft").args(["-f", "-"]), &silent)?;
        lab.node
            .run("nft", &["flush", "chain", "inet", "kube", "services"])?;
        service::translate(lab, &[(SERVICE4, OTHER_DNS4)])?;
        lab.a.ask(&query)?.expect(web4(10))?;
        ensure!(made()? == 2.0, "{} connections", made()?);
        Ok(())
    });
}

#[test]
fn flushed_rules_are_created_again() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.zone.set("www.bad.test", &[web4(11)], 60);
        translate(lab)?;
        lab.write_policy("web.yaml", &policy())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        is_judged(lab, &lab.a)?;
        lab.repairs.expect();
        lab.node.run("nft", &["flush", "ruleset"])?;
        translate(lab)?;
        eventually("the rules are there again", SOON, || {
            lab.node
                .run("nft", &["list", "table", "inet", "holdfast_v1"])
                .map(|_| ())
        })?;
        is_judged(lab, &lab.a)
    });
}
