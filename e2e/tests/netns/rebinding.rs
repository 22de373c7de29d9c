//! The owner of a name that a pod may look up cannot open the metadata service, or other addresses
//! of `--tofqdns-refuse-prefix`, by answering with them (DNS rebinding).
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{DNS4, at, other4, web4};
use holdfast_e2e::policy::{cidr, egress, good_names};
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);
const METADATA: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 169, 254));

fn asked(lab: &Lab, name: &str, address: IpAddr) -> Result<()> {
    lab.a.ask(&Query::a(name, DNS4))?.expect(address)?;
    Ok(())
}

#[test]
fn an_answer_opens_no_refused_prefix_and_a_cidr_rule_does() {
    with_lab(|lab| {
        lab.zone.set("meta.good.test", &[METADATA], 86_400);
        lab.zone.set("inside.good.test", &[other4(10)], 600);
        lab.zone.set("both.good.test", &[other4(10), web4(10)], 600);
        let options = AgentOptions::default()
            .flag("--tofqdns-refuse-prefix=169.254.0.0/16")
            .flag("--tofqdns-refuse-prefix=198.51.100.0/24");
        let programs = lab.start_with(&good_names(), &options)?;
        for _ in 0..2 {
            asked(lab, "meta.good.test", METADATA)?;
            asked(lab, "inside.good.test", other4(10))?;
            let both = lab.a.ask(&Query::a("both.good.test", DNS4))?;
            ensure!(both.addresses() == [other4(10), web4(10)], "{both:?}");
        }
        let counted = |port, name: &str, labels: &str| lab.metric(port, name, labels);
        for held in ["not_realised", "late"] {
            let labels = format!("result=\"{held}\"");
            let answers = counted(9961, "holdfast_dns_answers_total", &labels)?;
            ensure!(answers == 0.0, "{answers} answers {held}");
        }
        ensure!(counted(9962, "holdfast_fqdn_refused_addresses_total", "")? >= 3.0);
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(other4(10), 80))?;
        let plumbed = lab.ipcache()?;
        ensure!(!plumbed.contains_key(&METADATA) && !plumbed.contains_key(&other4(10)));
        // For promise R6, the prefixes that are refused by default are exceptions.
        ensure!(lab.audit("meta.good.test", &[9961])? == 0);
        lab.audit_settled("meta.good.test", SOON)?;
        let id = lab.endpoint_id(&lab.a)?.to_string();
        let why = lab.agent(&["why", &id, "inside.good.test:80"]);
        let said = format!("{why:?}");
        ensure!(said.contains("--tofqdns-refuse-prefix"), "{said}");

        let rule = egress("inside", "web", &cidr("198.51.100.0/24"));
        lab.write_policy("inside.yaml", &rule)?;
        eventually("the rule opens it", SOON, || {
            lab.a.expect_open(at(other4(10), 80))
        })?;
        lab.remove_policy("inside.yaml")?;
        eventually("it closes", SOON, || {
            lab.a.expect_closed(at(other4(10), 80))
        })?;

        programs.agent.terminate(SOON)?;
        let none = AgentOptions::default().flag("--tofqdns-refuse-prefix=none");
        let _agent = lab.start_agent(&none)?;
        lab.connected("one")?;
        eventually("it opens as with Cilium", SOON, || {
            asked(lab, "inside.good.test", other4(10))?;
            lab.a.expect_open(at(other4(10), 80))
        })
    });
}
