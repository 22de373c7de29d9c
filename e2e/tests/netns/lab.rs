//! The lab itself: without an agent everything is open. In the other tests, only the product closes
//! addresses.
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use holdfast_e2e::dns::zone::Manner;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::{Query, with_lab};

#[test]
fn without_an_agent_everything_is_open() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
        lab.zone.alias("alias.good.test", "www.good.test", 30);
        for server in [DNS4, DNS6] {
            for query in [
                Query::a("www.good.test", server),
                Query::a("alias.good.test", server),
            ] {
                lab.a.ask(&query)?.expect(web4(10))?;
                lab.a.ask(&query.tcp())?.expect(web4(10))?;
            }
            lab.a
                .ask(&Query::aaaa("www.good.test", server).sized(4000))?
                .expect(web6(10))?;
            lab.a
                .ask(&Query::a("no.test", server))?
                .expect_code(ResponseCode::NXDomain)?;
        }
        for web in [web4(10), web6(10)] {
            lab.a.expect_open(at(web, 80))?;
            lab.b.expect_open(at(web, 443))?;
            lab.a.datagram(at(web, 7777), Duration::from_secs(1))?;
            assert_eq!(lab.web.visits(at(web, 80)), 1);
        }
        lab.a.expect_closed(at(web4(10), 81))?;
        let stream = lab.a.stream(at(web6(10), 8080))?;
        stream.expect_alive()?;
        lab.zone.manner("www.good.test", Manner::Lost);
        let lost = Query::a("www.good.test", DNS4).within(Duration::from_millis(200));
        assert!(lab.a.ask(&lost).is_err());
        Ok(())
    });
}
