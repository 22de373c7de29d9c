//! Queries larger than the link: later fragments get the verdict of the first.
use holdfast_e2e::lab::{DNS4, DNS6, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Query, with_lab};

#[test]
fn fragmented_queries_are_judged_and_answered() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        let _programs = lab.start(&good_names())?;
        for server in [DNS4, DNS6] {
            for _ in 0..20 {
                lab.a
                    .ask(&Query::a("www.good.test", server).sized(4000))?
                    .expect(web4(10))?;
            }
            lab.a
                .ask(&Query::a("www.bad.test", server).sized(4000))?
                .expect_refused()?;
        }
        assert_eq!(lab.zone.asked("www.bad.test"), 0);
        lab.a.expect_open(at(web4(10), 80))?;
        Ok(())
    });
}
