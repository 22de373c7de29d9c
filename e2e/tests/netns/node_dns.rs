//! A DNS server that listens on an address of the node itself.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::lab::{NODE4, NODE6, at, web4, web6};
use holdfast_e2e::policy::{egress, names};
use holdfast_e2e::{Query, SdpOptions, with_lab};

const TO_HOST: &str = r#"- toEntities: [host]
  toPorts:
  - ports: [{port: "53", protocol: ANY}]
    rules: {dns: [{matchPattern: "*.good.test"}]}
"#;

/// Usual address of a node's DNS cache: link-local, reached by no other machine, and no loopback
/// address.
const NODE_LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 20, 10));

#[test]
fn a_server_on_the_node_gets_queries_through_the_proxy_only() {
    with_lab(|lab| {
        lab.node
            .batch(&format!("address add {NODE_LOCAL}/32 dev lo"))?;
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
        lab.zone.set("www.bad.test", &[web4(11)], 60);
        let servers = [NODE4, NODE6, NODE_LOCAL];
        let _server = DnsServer::start(&lab.node, &servers, &lab.zone)?;
        let policy = egress(
            "node-dns",
            "web",
            &(TO_HOST.to_owned() + &names("*.good.test")),
        );
        let programs = lab.start(&policy)?;
        for server in servers {
            let good = Query::a("www.good.test", server);
            let bad = Query::a("www.bad.test", server);
            for query in [good.clone(), good.tcp()] {
                lab.a.ask(&query)?.expect(web4(10))?;
            }
            for query in [bad.clone(), bad.tcp()] {
                lab.a.ask(&query)?.expect_refused()?;
            }
        }
        assert_eq!(lab.zone.asked("www.bad.test"), 0);
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web6(10), 80))?;
        lab.a
            .ask(&Query::aaaa("www.good.test", NODE6))?
            .expect(web6(10))?;
        lab.a.expect_open(at(web6(10), 80))?;

        // Without a proxy, the node's own server must not answer instead of it.
        programs.sdp.kill_9()?;
        let asked = lab.zone.asked("www.good.test");
        for server in servers {
            let quick = Query::a("www.good.test", server).within(Duration::from_millis(500));
            assert!(
                lab.a.ask(&quick).is_err(),
                "{server} answered without a proxy"
            );
            assert!(
                lab.a.ask(&quick.tcp()).is_err(),
                "{server} answered without a proxy"
            );
        }
        assert_eq!(lab.zone.asked("www.good.test"), asked);

        let _sdp = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        for server in servers {
            lab.a
                .ask(&Query::a("www.good.test", server))?
                .expect(web4(10))?;
        }
        Ok(())
    });
}
