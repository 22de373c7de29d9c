//! A policy change reaches live proxies and the datapath. Removed permissions are cut, new ones
//! open, and an unreadable document changes nothing.
use std::time::Duration;

use anyhow::{Result, ensure};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::{good_names, only_names};
use holdfast_e2e::{Lab, Query, SdpOptions, eventually, until, with_lab};

const SOON: Duration = Duration::from_secs(10);

#[test]
fn changes_take_effect_on_live_programs() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("www.new.test", &[web4(11)], 600);
        let _programs = lab.start(&good_names())?;
        let good = Query::a("www.good.test", DNS4);
        let new = Query::a("www.new.test", DNS4);
        lab.a.ask(&good)?.expect(web4(10))?;
        lab.a.ask(&new)?.expect_refused()?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        assert_eq!(lab.audit("good.test", &[9961])?, 0);

        let only_new = only_names("*.new.test");
        lab.write_policy("web.yaml", &only_new)?;
        eventually("the old name is refused", SOON, || {
            lab.a.ask(&good)?.expect_refused()
        })?;
        lab.a.ask(&new)?.expect(web4(11))?;
        lab.a.expect_open(at(web4(11), 80))?;
        stream.expect_cut(SOON)?;
        lab.a.expect_closed(at(web4(10), 80))?;
        assert_eq!(lab.audit("new.test", &[9961])?, 0);

        // Unreadable: the last good version stays in force, and the error is reported.
        lab.write_policy("web.yaml", &only_new.replace("egress:", "egres:"))?;
        let policies = || lab.agent(&["policy", "get"]);
        until("the refused document is reported", SOON, policies, |text| {
            text.contains("egres")
        })?;
        lab.a.ask(&good)?.expect_refused()?;
        lab.a.ask(&new)?.expect(web4(11))?;

        // A second document adds to the first.
        lab.write_policy("web.yaml", &only_new)?;
        lab.write_policy("more.yaml", &good_names().replace("good-names", "more"))?;
        eventually("the added name is answered", SOON, || {
            lab.a.ask(&good)?.expect(web4(10))
        })?;
        lab.a.expect_open(at(web4(10), 80))?;
        assert_eq!(lab.audit(".test", &[9961])?, 0);

        // No policy selects the pod any more, so everything is open.
        lab.remove_policy("more.yaml")?;
        lab.remove_policy("web.yaml")?;
        eventually("without policy everything is open", SOON, || {
            lab.a.expect_open(at(web4(15), 443))
        })?;
        lab.a
            .ask(&Query::a("any.other.test", DNS4))?
            .expect_code(ResponseCode::NXDomain)?;
        Ok(())
    });
}

/// Sends enough queries that each of two proxies gets some of them.
fn many(lab: &Lab, query: &Query, code: ResponseCode) -> Result<()> {
    for _ in 0..40 {
        let got = lab.a.ask(query)?.code();
        ensure!(got == code, "{got}, not {code}");
    }
    Ok(())
}

#[test]
fn two_proxies_change_together() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("www.new.test", &[web4(11)], 600);
        let _programs = lab.start(&good_names())?;
        let two = SdpOptions::new("two", 9971);
        let second = lab.start_sdp(&two)?;
        lab.connected("two")?;
        let good = Query::a("www.good.test", DNS4);
        let new = Query::a("www.new.test", DNS4);
        many(lab, &good, ResponseCode::NoError)?;
        many(lab, &new, ResponseCode::NXDomain)?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        lab.audit("good.test", &[9961, 9971])?;
        lab.audit_settled("good.test", SOON)?;

        lab.write_policy("web.yaml", &only_names("*.new.test"))?;
        eventually("the old name is refused by both", SOON, || {
            many(lab, &good, ResponseCode::NXDomain)
        })?;
        many(lab, &new, ResponseCode::NoError)?;
        lab.a.expect_open(at(web4(11), 80))?;
        stream.expect_cut(SOON)?;
        lab.audit("new.test", &[9961, 9971])?;
        lab.audit_settled("new.test", SOON)?;
        let asked = lab.zone.asked("www.good.test");

        // The proxy that missed the next change receives it when it is back.
        second.kill_9()?;
        lab.write_policy("web.yaml", &good_names())?;
        eventually("the name is back", SOON, || {
            many(lab, &good, ResponseCode::NoError)
        })?;
        assert!(lab.zone.asked("www.good.test") > asked);
        let _second = lab.start_sdp(&two)?;
        lab.connected("two")?;
        many(lab, &new, ResponseCode::NXDomain)?;
        for port in [9961, 9971] {
            let served = lab.metric(port, "holdfast_dns_queries_total", "")?;
            assert!(served > 0.0, "the proxy on {port} received no query");
        }
        Ok(())
    });
}
