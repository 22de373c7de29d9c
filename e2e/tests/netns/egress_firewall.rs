//! EgressFirewalls: an ordered list of blocks, names and nodes, on its own and beside other
//! policies.
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::lab::{DNS4, NODE4, at, other4, web4};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::pod::REFUSED_AFTER;
use holdfast_e2e::policy::{CLIENT, NOTHING_ELSE, TO_DNS, cidr, dns, egress, firewall};
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, with_lab};
use shared_maps::event::Reason;

const SOON: Duration = Duration::from_secs(10);
/// Longer than TTL, lease and two scans of connections.
const LATE: Duration = Duration::from_secs(40);
/// Number of connections that are each the first to their address.
const FIRST_CONNECTIONS: u16 = 500;

const EXAMPLE: &str = "{type: Allow, to: {dnsName: '*.example.test'}}";

fn only_example() -> String {
    firewall("default", &[TO_DNS, EXAMPLE, NOTHING_ELSE])
}

fn options() -> AgentOptions {
    AgentOptions::default()
        .flag("--dns-server=192.0.2.53")
        .flag("--pod-cidr=10.77.0.0/24")
        .flag("--mapping-lease-slack=0s")
}

/// Address `n` of the lab's web servers; nothing has connected to it yet.
fn fresh(n: u16) -> IpAddr {
    let [high, low] = n.to_be_bytes();
    Ipv4Addr::new(203, 0, 114 + high, low).into()
}

fn ask(lab: &Lab, name: &str, address: IpAddr) -> Result<()> {
    lab.a.ask(&Query::a(name, DNS4))?.expect(address)?;
    Ok(())
}

fn untrusted(lab: &Lab) -> Result<f64> {
    let labels = "outcome=\"untrusted\"";
    lab.metric(
        AGENT_METRICS,
        "holdfast_resolver_observations_total",
        labels,
    )
}

#[test]
fn names_open_with_the_answer_and_everything_else_stays_closed() {
    with_lab(|lab| {
        lab.world.batch("route add local 203.0.114.0/23 dev lo")?;
        let _programs = lab.start_with(&only_example(), &options())?;
        for (name, host) in [
            ("example.test", 10),
            ("sub2.sub1.example.test", 11),
            ("www.example.org", 12),
        ] {
            lab.zone.set(name, &[web4(host)], 60);
            ask(lab, name, web4(host))?;
            lab.a.expect_closed(at(web4(host), 80))?;
        }
        lab.a.expect_closed(at(web4(13), 80))?;
        ensure!(lab.a.ping(web4(13), REFUSED_AFTER).is_err());

        let dropped = lab.counted(Reason::PolicyDeny)?;
        for n in 0..FIRST_CONNECTIONS {
            let (name, address) = (format!("n{n}.example.test"), fresh(n));
            lab.zone.set(&name, &[address], 60);
            ask(lab, &name, address)?;
            lab.a.expect_open(at(address, 80))?;
        }
        ensure!(
            lab.counted(Reason::PolicyDeny)? == dropped,
            "a packet was dropped"
        );
        // A rule without ports means every protocol.
        lab.a.ping(fresh(1), SOON)?;
        lab.a.expect_open(at(fresh(1), 8080))?;

        let id = lab.endpoint_id(&lab.a)?.to_string();
        let why = format!("{:?}", lab.agent(&["why", &id, "203.0.113.13:80"]));
        ensure!(why.contains("EgressFirewall/default/default"), "{why}");
        ensure!(why.contains("spec.egress[2]"), "{why}");
        let status = lab.agent(&["status"])?;
        ensure!(
            status.contains("1 (3 rules), 1 names with 500 addresses"),
            "{status}"
        );
        ensure!(status.contains("trusted DNS 192.0.2.53:53"), "{status}");

        // The same rules in another order.
        lab.write_policy(
            "web.yaml",
            &firewall("default", &[TO_DNS, NOTHING_ELSE, EXAMPLE]),
        )?;
        eventually("the first rule that covers a packet counts", SOON, || {
            lab.a.expect_closed(at(fresh(1), 80))
        })?;
        lab.a.expect_closed(at(fresh(2), 80))?;
        ask(lab, "n3.example.test", fresh(3))?;
        lab.a.expect_closed(at(fresh(3), 80))
    });
}

#[test]
fn ports_nodes_and_another_policy_are_judged_together() {
    with_lab(|lab| {
        let nodes = [("east", web4(10)), ("west", web4(11))].map(|(region, address)| {
            format!(
                r"
---
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {{name: node-{region}, labels: {{region: {region}}}}}
spec: {{addresses: [{{type: InternalIP, ip: {address}}}]}}
"
            )
        });
        lab.write_policy("nodes.yaml", &nodes.concat())?;
        let rules = [
            TO_DNS,
            EXAMPLE,
            "{type: Allow, to: {nodeSelector: {matchLabels: {region: east}}}}",
            "{type: Allow, to: {cidrSelector: 198.51.100.0/24}, ports: [{protocol: TCP, port: 80}]}",
            NOTHING_ELSE,
        ];
        let _programs = lab.start_with(&firewall("default", &rules), &options())?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.ping(web4(10), SOON)?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.a.expect_closed(at(NODE4, 80))?;
        lab.a.expect_open(at(other4(10), 80))?;
        lab.a.expect_closed(at(other4(10), 443))?;
        ensure!(
            lab.a.ping(other4(10), REFUSED_AFTER).is_err(),
            "ICMP has no port"
        );

        // A firewall only takes away: what another policy does not allow stays closed.
        lab.zone
            .set("www.example.test", &[web4(12), other4(12)], 60);
        let policy = egress("cnp", "web", &(dns("*") + &cidr("203.0.113.0/24")));
        lab.write_policy("cnp.yaml", &policy)?;
        eventually("both policies are in force", SOON, || {
            lab.a.expect_closed(at(other4(10), 80))
        })?;
        lab.proxies_in_step()?;
        let reply = lab.a.ask(&Query::a("www.example.test", DNS4))?;
        ensure!(reply.addresses().len() == 2, "{reply:?}");
        lab.a.expect_open(at(web4(12), 80))?;
        lab.a.expect_closed(at(web4(12), 443))?;
        lab.a.expect_closed(at(web4(13), 80))?;
        lab.a.expect_closed(at(other4(12), 80))
    });
}

#[test]
fn a_changed_record_opens_at_once_and_cuts_no_connection() {
    with_lab(|lab| {
        lab.zone.set("www.example.test", &[web4(10), web4(11)], 2);
        let programs = lab.start_with(&only_example(), &options())?;
        let both = lab.a.ask(&Query::a("www.example.test", DNS4))?;
        ensure!(both.addresses() == [web4(10), web4(11)], "{both:?}");
        let download = lab.a.stream(at(web4(10), 80))?;
        lab.zone.set("www.example.test", &[web4(12)], 600);
        ask(lab, "www.example.test", web4(12))?;
        lab.a.expect_open(at(web4(12), 80))?;
        lab.leaves_ipcache(web4(11), LATE)?;
        lab.a.expect_closed(at(web4(11), 80))?;
        download.expect_alive()?;

        // Nothing is cut while the agent is away, nor when it is back.
        programs.agent.kill_9()?;
        lab.zone.set("away.example.test", &[web4(13)], 600);
        ask(lab, "away.example.test", web4(13))?;
        let _agent = lab.start_agent(&options())?;
        lab.connected("one")?;
        eventually(
            "a name looked up while the agent was away opens",
            SOON,
            || lab.a.expect_open(at(web4(13), 80)),
        )?;
        lab.a.expect_open(at(web4(12), 80))?;
        download.expect_alive()
    });
}

#[test]
fn a_dns_server_in_a_pod_opens_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.example.test", &[web4(10)], 60);
        let _programs = lab.start_with(&only_example(), &options())?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let own: IpAddr = lab.b.v4.into();
        let _server = DnsServer::start(&lab.b.netns, &[own], &lab.zone)?;
        lab.a
            .ask(&Query::a("www.example.test", own))?
            .expect(web4(10))?;
        lab.a.expect_closed(at(web4(10), 80))?;
        ensure!(untrusted(lab)? == 1.0, "{}", untrusted(lab)?);
        let id = lab.endpoint_id(&lab.a)?.to_string();
        for target in ["203.0.113.10:80", "www.example.test:80"] {
            let why = format!("{:?}", lab.agent(&["why", &id, target]));
            let server = format!("came from {own}:53, which does not count");
            for part in [&*server, "trusted now: 192.0.2.53:53", "--dns-server"] {
                ensure!(why.contains(part), "{part}: {why}");
            }
        }
        let listed = lab.agent(&["endpoint", "list"])?;
        let mut lines = listed.lines();
        let line = lines.find(|line| line.starts_with(&format!("{id} ")));
        let line = line.unwrap_or_default();
        ensure!(line.contains("EgressFirewall/default/default"), "{listed}");
        ensure!(!line.contains("unrestricted"), "{listed}");
        ask(lab, "www.example.test", web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        ensure!(untrusted(lab)? == 1.0, "{}", untrusted(lab)?);
        Ok(())
    });
}

#[test]
fn without_a_trusted_dns_server_names_stay_closed_and_status_says_so() {
    with_lab(|lab| {
        lab.zone.set("www.example.test", &[web4(10)], 60);
        let _programs = lab.start_with(&only_example(), &AgentOptions::default())?;
        ask(lab, "www.example.test", web4(10))?;
        lab.a.expect_closed(at(web4(10), 80))?;
        let status = lab.agent(&["status"])?;
        ensure!(
            status
                .contains("names of EgressFirewalls stay closed, because no DNS server is trusted"),
            "{status}"
        );
        ensure!(status.contains("give --pod-cidr"), "{status}");
        Ok(())
    });
}
