//! ICMP echo: answered if policy allows it, otherwise dropped and counted.
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_e2e::lab::{DNS4, NODE4, NODE6, web4, web6};
use holdfast_e2e::policy::{CLIENT, dns, egress, names};
use holdfast_e2e::{Query, eventually, with_lab};
use shared_maps::event::Reason;

const SOON: Duration = Duration::from_secs(5);
const REFUSED_AFTER: Duration = Duration::from_millis(350);

const RULES: &str = r#"- toCIDR: ["203.0.113.10/32", "2001:db8:113::a/128"]
- toEndpoints: [{matchLabels: {app: client}}]
  icmps: [{fields: [{type: 8, family: IPv4}, {type: 128, family: IPv6}]}]
- toEntities: [host]
egressDeny:
- toCIDR: ["203.0.113.13/32", "2001:db8:113::d/128"]
"#;

#[test]
fn echoes_follow_the_policy() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(12), web6(12)], 600);
        let rules = dns("*.good.test") + &names("*.good.test") + RULES;
        let _programs = lab.start(&egress("ping", "web", &rules))?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        for query in [Query::a, Query::aaaa] {
            lab.a.ask(&query("www.good.test", DNS4))?;
        }
        // Allowed: a prefix without ports, another pod by type, the node.
        for to in [
            web4(10),
            web6(10),
            lab.b.v4.into(),
            lab.b.v6.into(),
            NODE4,
            NODE6,
        ] {
            lab.a.ping(to, SOON)?;
        }
        // Denied: no rule; a name whose rule is for ports; a deny.
        for (to, reason) in [
            (web4(11), Reason::PolicyDenied),
            (web6(11), Reason::PolicyDenied),
            (web4(12), Reason::PolicyDenied),
            (web6(12), Reason::PolicyDenied),
            (web4(13), Reason::PolicyDeny),
            (web6(13), Reason::PolicyDeny),
        ] {
            let before = lab.counted(reason)?;
            assert!(lab.a.ping(to, REFUSED_AFTER).is_err(), "{to} answered");
            assert_eq!(lab.counted(reason)?, before + 1, "to {to}: {reason:?}");
        }
        // The record of each packet names the rule that judged it.
        for (to, kind, by) in [
            (
                web4(10),
                "ICMP type 8",
                "spec.egress[2] (cidr:203.0.113.10/32",
            ),
            (
                lab.b.v6.into(),
                "ICMPv6 type 128",
                "spec.egress[3] (any:app=client",
            ),
            (web4(11), "ICMP type 8", "no rule allows it"),
            (web6(13), "ICMPv6 type 128", "spec.egressDeny[0]"),
        ] {
            eventually("the echo is reported", SOON, || {
                let lines = lab.agent(&["observe"])?;
                let matching = |line: &&str| line.contains(kind) && line.contains(&to.to_string());
                let line = lines.lines().find(matching).context("not reported yet")?;
                ensure!(line.contains(by), "{line}");
                Ok(())
            })?;
        }
        // The other pod has no policy. Its packets pass at its own interface and are judged here.
        for own in [lab.a.v4.into(), lab.a.v6.into()] {
            lab.b.ping(own, SOON)?;
        }
        Ok(())
    });
}
