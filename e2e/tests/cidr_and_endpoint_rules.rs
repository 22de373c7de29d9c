//! CIDR, deny and endpoint rules beside FQDN rules that overlap them
//! (CFP-28427, "Are overlapping … handled correctly?").
use hickory_proto::op::ResponseCode;
use holdfast_e2e::lab::{DNS4, OTHER_DNS4, at, other4, web4};
use holdfast_e2e::policy::{CLIENT, dns, dns_to, egress, names};
use holdfast_e2e::web::Web;
use holdfast_e2e::{Query, with_lab};

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

        // Each DNS server for the names of its own rule.
        let other = Query::a("www.other.test", OTHER_DNS4);
        lab.a.ask(&other)?.expect(other4(14))?;
        for (name, server) in [("www.other.test", DNS4), ("www.good.test", OTHER_DNS4)] {
            let query = Query::a(name, server);
            lab.a.ask(&query)?.expect_code(ResponseCode::Refused)?;
            lab.a
                .ask(&query.tcp())?
                .expect_code(ResponseCode::Refused)?;
        }

        // By prefix alone.
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
        // Deny beats what a name allows.
        lab.a
            .ask(&Query::a("denied.good.test", DNS4))?
            .expect(web4(13))?;
        lab.a.expect_closed(at(web4(13), 80))?;
        lab.a.expect_closed(at(web4(13), 8080))?;
        // The identity of the stream's address has changed under it.
        stream.expect_alive()?;

        // Pods by label.
        lab.a.expect_open(at(lab.b.v4.into(), 80))?;
        lab.a.expect_open(at(lab.b.v6.into(), 80))?;
        lab.a.expect_closed(at(lab.b.v4.into(), 443))?;
        lab.a.expect_closed(at(lab.b.v6.into(), 443))?;
        Ok(())
    });
}
