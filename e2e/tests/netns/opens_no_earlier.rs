//! Traffic to a learned address opens with the answer. It does not open earlier or on other ports,
//! and the first packet after the answer passes.
use std::time::Duration;

use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Query, with_lab};

#[test]
fn the_answer_opens_its_addresses() {
    with_lab(|lab| {
        let _programs = lab.start(&good_names())?;
        for host in 10..18 {
            let name = format!("n{host}.good.test");
            lab.zone.set(&name, &[web4(host), web6(host)], 60);
            let v4 = (Query::a(&name, DNS4), web4(host));
            let v6 = (Query::aaaa(&name, DNS6), web6(host));
            for (query, address) in [v4, v6] {
                lab.a.expect_closed(at(address, 80))?;
                let early = lab
                    .a
                    .datagram(at(address, 7777), Duration::from_millis(150));
                assert!(
                    early.is_err(),
                    "{address} was open before its name was looked up"
                );
                assert_eq!(lab.web.visits(at(address, 7777)), 0);

                lab.a.ask(&query)?.expect(address)?;
                // One datagram, never repeated: a late opening loses it.
                lab.a.datagram(at(address, 7777), Duration::from_secs(2))?;
                lab.a.expect_open(at(address, 80))?;
                lab.a.expect_closed(at(address, 443))?;
                assert_eq!(lab.web.visits(at(address, 443)), 0);
            }
        }
        assert_eq!(lab.audit("good.test", &[9961])?, 0);
        Ok(())
    });
}
