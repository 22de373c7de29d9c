//! CIDR, deny and endpoint rules together with FQDN rules that overlap them (CFP-28427, "Are
//! overlapping … handled correctly?").
use std::time::Duration;

use holdfast_e2e::lab::{DNS4, OTHER_DNS4, UDP_PORT, at, other4, web4, web6};
use holdfast_e2e::policy::{CLIENT, dns, dns_to, egress, names};
use holdfast_e2e::web::Web;
use holdfast_e2e::{Query, eventually, with_lab};

const SOON: Duration = Duration::from_secs(5);

const RULES: &str = r#"- toFQDNs: [{matchName: www.good.test}]
  toPorts: [{ports: [{port: "443", protocol: TCP}]}]
- toCIDR: ["203.0.113.0/24"]
  toPorts: [{ports: [{port: "8080", protocol: TCP}]}]
- toCIDRSet: [{cidr: "198.51.100.0/24", except: ["198.51.100.11/32"]}]
  toPorts: [{ports: [{port: "80", protocol: TCP}]}]
- toEndpoints: [{matchLabels: {app: client}}]
  toPorts: [{ports: [{port: "80", protocol: TCP}]}]
egressDeny:
- toCIDR: ["203.0.113.13/32"]
"#;

#[test]
fn overlapping_rules_add_up() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.zone.set("api.good.test", &[web4(12)], 60);
        lab.zone.set("denied.good.test", &[web4(13)], 60);
        lab.zone.set("outer.good.test", &[other4(12)], 60);
        lab.zone.set("hole.good.test", &[other4(11)], 60);
        lab.zone.set("www.other.test", &[other4(14)], 60);
        let other_dns = dns_to("*.other.test", &["192.0.2.54/32"]);
        let rules = dns("*.good.test") + &other_dns + &names("*.good.test") + RULES;
        let policy = egress("rules", "web", &rules);
        let _programs = lab.start(&policy)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let _pod_web = Web::start(&lab.b.netns, &[], &[80, 443], &[])?;

        // Each DNS server answers the names of its own rule.
        let other = Query::a("www.other.test", OTHER_DNS4);
        lab.a.ask(&other)?.expect(other4(14))?;
        for (name, server) in [("www.other.test", DNS4), ("www.good.test", OTHER_DNS4)] {
            let query = Query::a(name, server);
            lab.a.ask(&query)?.expect_refused()?;
            lab.a.ask(&query.tcp())?.expect_refused()?;
        }

        // Allowed by a prefix alone.
        lab.a.expect_open(at(web4(10), 8080))?;
        lab.a.expect_closed(at(web4(10), 80))?;
        lab.a.expect_open(at(other4(10), 80))?;
        lab.a.expect_closed(at(other4(11), 80))?;
        let stream = lab.a.stream(at(web4(10), 8080))?;

        // Two overlapping name selectors and a prefix: each opens its port.
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        for port in [80, 443, 8080] {
            lab.a.expect_open(at(web4(10), port))?;
        }
        // One name selector and the prefix.
        lab.a
            .ask(&Query::a("api.good.test", DNS4))?
            .expect(web4(12))?;
        lab.a.expect_open(at(web4(12), 80))?;
        lab.a.expect_open(at(web4(12), 8080))?;
        lab.a.expect_closed(at(web4(12), 443))?;
        // A name inside a prefix with a hole: the name opens the hole.
        lab.a
            .ask(&Query::a("outer.good.test", DNS4))?
            .expect(other4(12))?;
        lab.a.expect_open(at(other4(12), 80))?;
        lab.a
            .ask(&Query::a("hole.good.test", DNS4))?
            .expect(other4(11))?;
        lab.a.expect_open(at(other4(11), 80))?;
        // A deny overrides an allowed name.
        lab.a
            .ask(&Query::a("denied.good.test", DNS4))?
            .expect(web4(13))?;
        lab.a.expect_closed(at(web4(13), 80))?;
        lab.a.expect_closed(at(web4(13), 8080))?;
        // The identity of the stream's address has changed during the stream.
        stream.expect_alive()?;

        // Pods by label.
        lab.a.expect_open(at(lab.b.v4.into(), 80))?;
        lab.a.expect_open(at(lab.b.v6.into(), 80))?;
        lab.a.expect_closed(at(lab.b.v4.into(), 443))?;
        lab.a.expect_closed(at(lab.b.v6.into(), 443))?;
        Ok(())
    });
}

const PORTS: &str = r#"- toCIDR: ["2001:db8:113::a/128", "2001:db8:113::10/124"]
  toPorts: [{ports: [{port: "8080", protocol: TCP}, {port: "7777", protocol: UDP}]}]
- toCIDRSet: [{cidr: "203.0.113.0/24", except: ["203.0.113.12/31"]}]
  toPorts: [{ports: [{port: "81", endPort: 1000, protocol: TCP}, {port: "7000", endPort: 7776, protocol: UDP}]}]
egressDeny:
- toCIDR: ["2001:db8:113::11/128", "203.0.113.14/32"]
  toPorts: [{ports: [{port: "400", endPort: 8080, protocol: TCP}]}]
"#;

/// Prefixes of IPv6, and ranges of ports with their edges.
#[test]
fn prefixes_of_ipv6_and_port_ranges() {
    with_lab(|lab| {
        let _programs = lab.start(&egress("ports", "web", PORTS))?;
        // The servers of the world listen at the edges of both ranges as well.
        let edges = [81, 1000, 1001];
        let world: Vec<_> = (10..=14).map(web4).collect();
        let _tcp = Web::start(&lab.world, &[], &edges, &[])?;
        let udp = Web::start(&lab.world, &world, &[], &[6999, 7000, 7776])?;

        // By host number: 10 is listed, 16 and 17 are in the /124, and 11 is neither.
        lab.a.expect_open(at(web6(10), 8080))?;
        lab.a.expect_open(at(web6(16), 8080))?;
        lab.a.datagram(at(web6(16), UDP_PORT), SOON)?;
        lab.a.expect_closed(at(web6(10), 80))?;
        lab.a.expect_closed(at(web6(11), 8080))?;
        lab.a.expect_closed(at(web6(15), 8080))?;
        // A range of ports is denied; the allowed datagrams still pass.
        lab.a.expect_closed(at(web6(17), 8080))?;
        lab.a.datagram(at(web6(17), UDP_PORT), SOON)?;

        for port in [81, 443, 1000] {
            lab.a.expect_open(at(web4(10), port))?;
        }
        for port in [80, 1001, 8080] {
            lab.a.expect_closed(at(web4(10), port))?;
        }
        for port in [7000, 7776] {
            lab.a.datagram(at(web4(11), port), SOON)?;
        }
        for port in [6999, UDP_PORT] {
            let short = Duration::from_millis(300);
            assert!(lab.a.datagram(at(web4(11), port), short).is_err(), "{port}");
            let visits = udp.visits(at(web4(11), port)) + lab.web.visits(at(web4(11), port));
            assert_eq!(visits, 0, "port {port}");
        }
        // In the hole of the prefix, and denied from port 400 on.
        lab.a.expect_closed(at(web4(12), 443))?;
        lab.a.expect_closed(at(web4(13), 443))?;
        lab.a.expect_open(at(web4(14), 81))?;
        lab.a.expect_closed(at(web4(14), 443))?;
        lab.a.expect_closed(at(web4(14), 1000))?;
        Ok(())
    });
}

/// A rule follows the CiliumCIDRGroup that it names, and needs no edit itself.
#[test]
fn a_group_of_blocks_may_change_under_its_rules() {
    const RULES: &str = r#"- toCIDRSet: [{cidrGroupRef: partners, except: ["203.0.113.11/32"]}]
  toPorts: [{ports: [{port: "80", protocol: TCP}]}]
- toCIDRSet: [{cidrGroupSelector: {matchLabels: {zone: far}}}]
  toPorts: [{ports: [{port: "443", protocol: TCP}]}]
"#;
    let group = |name: &str, zone: &str, blocks: &str| {
        format!(
            r"
apiVersion: cilium.io/v2alpha1
kind: CiliumCIDRGroup
metadata: {{name: {name}, labels: {{zone: {zone}}}}}
spec: {{externalCIDRs: [{blocks}]}}
"
        )
    };
    with_lab(|lab| {
        let _programs = lab.start(&egress("groups", "web", RULES))?;
        let status = lab.agent_json(&["status"])?;
        assert!(
            status["warnings"]
                .to_string()
                .contains("no CiliumCIDRGroup partners")
        );
        lab.a.expect_closed(at(web4(10), 80))?;
        lab.write_policy(
            "partners.yaml",
            &group("partners", "near", "203.0.113.0/24"),
        )?;
        eventually("the group opens", SOON, || {
            lab.a.expect_open(at(web4(10), 80))
        })?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.a.expect_closed(at(web4(10), 443))?;
        lab.a.expect_closed(at(other4(10), 80))?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        lab.write_policy(
            "far.yaml",
            &group("far", "far", "198.51.100.0/24, 203.0.113.12"),
        )?;
        eventually("its labels open, too", SOON, || {
            lab.a.expect_open(at(other4(10), 443))
        })?;
        lab.a.expect_open(at(web4(12), 443))?;
        lab.a.expect_open(at(web4(12), 80))?;
        stream.expect_alive()?;
        lab.write_policy("partners.yaml", &group("partners", "near", "198.51.100.10"))?;
        eventually("the group moves", SOON, || {
            lab.a.expect_open(at(other4(10), 80))
        })?;
        lab.a.expect_open(at(other4(10), 443))?;
        stream.expect_cut(SOON)?;
        lab.a.expect_closed(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        lab.remove_policy("partners.yaml")?;
        eventually("the group closes", SOON, || {
            lab.a.expect_closed(at(other4(10), 80))
        })?;
        lab.a.expect_open(at(other4(10), 443))
    });
}
