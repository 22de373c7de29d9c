//! An address closes when its TTL and lease have ended, except while a connection is live.
use std::time::Duration;

use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{AgentOptions, Query, with_lab};

#[test]
fn expiry_closes_unless_a_connection_lives() {
    with_lab(|lab| {
        lab.zone.set("short.good.test", &[web4(10)], 1);
        lab.zone.set("busy.good.test", &[web4(11)], 1);
        lab.zone.set("long.good.test", &[web4(12)], 600);
        let options = AgentOptions::default()
            .flag("--mapping-lease-slack=1s")
            .flag("--tofqdns-min-ttl=0s")
            .flag("--tofqdns-idle-connection-grace-period=0s");
        let _programs = lab.start_with(&good_names(), &options)?;
        for (name, address) in [
            ("short.good.test", 10),
            ("busy.good.test", 11),
            ("long.good.test", 12),
        ] {
            lab.a.ask(&Query::a(name, DNS4))?.expect(web4(address))?;
        }
        assert_eq!(lab.audit("good.test", &[9961])?, 0);
        let stream = lab.a.stream(at(web4(11), 80))?;

        lab.leaves_ipcache(web4(10), Duration::from_secs(30))?;
        lab.a.expect_closed(at(web4(10), 80))?;
        lab.a.expect_open(at(web4(12), 80))?;
        stream.expect_alive()?;
        assert!(lab.is_plumbed(web4(11))?, "expired under a live connection");

        // Asked again, it opens again.
        lab.a
            .ask(&Query::a("short.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;

        stream.expect_alive()?;
        drop(stream);
        lab.leaves_ipcache(web4(11), Duration::from_secs(60))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        assert_eq!(lab.audit("long.good.test", &[9961])?, 0);
        Ok(())
    });
}
