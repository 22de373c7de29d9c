//! The whole product at once: a pod's query passes datapath, proxy and agent, opens a closed
//! address, and still works without the agent.
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Query, SdpOptions, with_lab};

#[test]
fn a_query_opens_its_answer_and_outlives_the_agent() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.zone.set("www.bad.test", &[web4(11)], 60);
        let programs = lab.start(&good_names())?;

        let good = Query::a("www.good.test", DNS4);
        let bad = Query::a("www.bad.test", DNS4);
        lab.a.expect_closed(at(web4(10), 80))?;
        lab.a.ask(&good)?.expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(10), 443))?;
        lab.a.ask(&bad)?.expect_refused()?;
        lab.a.expect_closed(at(web4(11), 80))?;
        assert_eq!(
            lab.zone.asked("www.bad.test"),
            0,
            "a refused query left the node"
        );

        programs.agent.kill_9()?;
        lab.a.ask(&good)?.expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.ask(&bad)?.expect_refused()?;

        programs.sdp.kill_9()?;
        let _sdp = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        lab.a.ask(&good)?.expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.ask(&bad)?.expect_refused()?;
        assert_eq!(lab.audit("good.test", &[9971])?, 0, "in the map all along");
        Ok(())
    });
}
