//! The agent of the previous version and this one on one state. Each reads the maps and files of
//! the other, and nothing changes.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4, web6};
use holdfast_e2e::policy::{CLIENT, WEB, cidr, dns, egress, names};
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, config, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);

/// Everything that the datapath has, straight from the maps.
fn maps(lab: &Lab) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut add = |verb: &[&str]| -> Result<()> {
        let listing = lab.bpf_json(verb)?;
        let mut lines: Vec<String> = match listing.as_array() {
            Some(lines) => lines.iter().map(ToString::to_string).collect(),
            None => vec![listing.to_string()],
        };
        lines.sort();
        found.append(&mut lines);
        Ok(())
    };
    add(&["ipcache", "list"])?;
    add(&["lxc", "list"])?;
    for pod in [&lab.a, &lab.b] {
        add(&["policy", "list", &lab.endpoint_id(pod)?.to_string()])?;
    }
    Ok(found)
}

fn options(program: Option<PathBuf>) -> AgentOptions {
    AgentOptions {
        program,
        ..AgentOptions::default()
    }
}

#[test]
fn the_previous_agent_and_this_one_continue_with_each_others_state() {
    let previous = config::previous_agent().expect("the previous version");
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        let rules = dns("*.good.test") + &names("*.good.test") + &cidr("198.51.100.0/24");
        lab.write_policy("web.yaml", &egress("web", "web", &rules))?;
        let rules = dns("*") + &names("www.good.test");
        lab.write_policy("client.yaml", &egress("client", "client", &rules))?;
        let mut agent = lab.start_agent(&options(Some(previous.clone())))?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.connected("one")?;
        for pod in [&lab.a, &lab.b] {
            pod.ask(&Query::a("www.good.test", DNS4))?
                .expect(web4(10))?;
            pod.ask(&Query::aaaa("www.good.test", DNS4))?
                .expect(web6(10))?;
        }
        let identities = lab.identities()?;
        let streams = [
            lab.a.stream(at(web4(10), 80))?,
            lab.a.stream(at(web6(10), 80))?,
            lab.b.stream(at(web4(10), 80))?,
        ];
        let kept = lab.a.datagrams(at(web4(10), UDP_PORT))?;
        let shut = lab.a.datagrams(at(web4(12), UDP_PORT))?;

        // Upgraded, downgraded, and upgraded again. The first agent is killed, the others are
        // ended.
        for (number, program) in [None, Some(previous), None].into_iter().enumerate() {
            let before = maps(lab)?;
            if number == 0 {
                agent.kill_9()?;
            } else {
                agent.terminate(SOON)?;
            }
            agent = lab.start_agent(&options(program))?;
            let step = format!("start {number}");
            let after = lab.identities()?;
            for (id, labels) in &identities {
                ensure!(after.get(id) == Some(labels), "{step}: {id} was {labels}");
            }
            ensure!(maps(lab)? == before, "{step}: a map changed");
            ensure!(
                !agent.log().contains(".corrupt"),
                "{step}: a file was damaged"
            );
            for stream in &streams {
                stream.expect_alive().context(step.clone())?;
            }
            lab.connected("one")?;
            lab.audit_settled("good.test", SOON).context(step.clone())?;
            let name = format!("new{number}.good.test");
            let host = 14 + u8::try_from(number)?;
            lab.zone.set(&name, &[web4(host)], 600);
            lab.a.ask(&Query::a(&name, DNS4))?.expect(web4(host))?;
            lab.a.expect_open(at(web4(host), 80)).context(step)?;
            eventually("the name is on disk", SOON, || {
                let id = lab.endpoint_id(&lab.a)?;
                let file = lab
                    .directory()
                    .join(format!("state/state/{id}/ep_config.json"));
                ensure!(std::fs::read_to_string(&file)?.contains(&name), "not yet");
                Ok(())
            })?;
        }
        let (sent, echoed) = kept.finish();
        ensure!(echoed == sent, "{echoed} of {sent} datagrams came back");
        let (_, echoed) = shut.finish();
        ensure!(echoed == 0, "a closed address answered");
        Ok(())
    });
}
