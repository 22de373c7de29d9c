//! Allowed names are answered and refused names do not exist (NXDOMAIN), over UDP and TCP, IPv4 and
//! IPv6. Servers that no rule names cannot be reached.
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use holdfast_e2e::lab::{DNS4, DNS6, OTHER_DNS4, at, web4, web6};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Query, with_lab};

#[test]
fn names_are_judged_over_every_transport() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
        lab.zone.alias("alias.good.test", "elsewhere.test", 60);
        lab.zone.set("elsewhere.test", &[web4(12)], 60);
        lab.zone.set("www.bad.test", &[web4(11), web6(11)], 60);
        let _programs = lab.start(&good_names())?;

        for server in [DNS4, DNS6] {
            for tcp in [false, true] {
                let over = |query: Query| if tcp { query.tcp() } else { query };
                let ask = |query| lab.a.ask(&over(query));
                ask(Query::a("www.good.test", server))?.expect(web4(10))?;
                ask(Query::aaaa("WWW.Good.Test", server))?.expect(web6(10))?;
                ask(Query::a("alias.good.test", server))?.expect(web4(12))?;
                ask(Query::a("none.good.test", server))?.expect_code(ResponseCode::NXDomain)?;
                ask(Query::a("www.bad.test", server))?.expect_refused()?;
                ask(Query::aaaa("good.test", server))?.expect_refused()?;
                ask(Query::a("elsewhere.test", server).edns())?.expect_refused()?;
            }
        }
        for name in ["www.bad.test", "good.test"] {
            assert_eq!(
                lab.zone.asked(name),
                0,
                "a refused query for {name} left the node"
            );
        }
        for open in [web4(10), web6(10), web4(12)] {
            lab.a.expect_open(at(open, 80))?;
        }
        assert_eq!(lab.audit("good.test", &[9961])?, 0);
        for closed in [web4(11), web6(11)] {
            lab.a.expect_closed(at(closed, 80))?;
        }

        let asked = lab.zone.asked("www.good.test");
        let other = Query::a("www.good.test", OTHER_DNS4).within(Duration::from_millis(400));
        assert!(
            lab.a.ask(&other).is_err(),
            "a server that no rule names answered"
        );
        assert!(
            lab.a.ask(&other.tcp()).is_err(),
            "a server that no rule names answered"
        );
        assert_eq!(lab.zone.asked("www.good.test"), asked);
        Ok(())
    });
}
