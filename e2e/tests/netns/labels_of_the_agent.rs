//! An endpoint cannot be given a label that only the agent gives, and one that an earlier release gave
//! such a label is closed until it gets labels of its own.
use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::WEB;
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);
const HOST: &str = "reserved:host";

fn problems(lab: &Lab) -> Result<String> {
    Ok(lab.agent_json(&["status"])?["problems"].to_string())
}

#[test]
fn a_label_that_only_the_agent_gives_is_refused_and_leaves_an_endpoint_of_an_earlier_run() {
    with_lab(|lab| {
        let agent = lab.start_agent(&AgentOptions::default())?;
        let netns = lab.a.netns.name();
        let add = ["endpoint", "add", "--netns", netns, "--labels"];
        let error = lab.agent(&[&add[..], &[HOST]].concat());
        let error = error.expect_err("refused").to_string();
        ensure!(
            error.contains(HOST) && error.contains("remove the label"),
            "{error}"
        );
        let document = format!("netns: {netns}\nlabels: [{HOST}]\n");
        fs::write(lab.directory().join("endpoints/a.yaml"), document)?;
        eventually("the document is refused", SOON, || {
            let problems = problems(lab)?;
            ensure!(problems.contains(HOST), "{problems}");
            Ok(())
        })?;
        fs::remove_file(lab.directory().join("endpoints/a.yaml"))?;

        // No policy is about the endpoint.
        lab.add_endpoint(&lab.a, WEB)?;
        lab.a.expect_open(at(web4(12), 80))?;
        drop(agent);
        let added = lab.directory().join("state/state/added_endpoints.json");
        let text = fs::read_to_string(&added)?.replace("k8s:app=web", HOST);
        ensure!(text.contains(HOST), "{text}");
        fs::write(&added, text)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.a)?;
        eventually("the endpoint is closed", SOON, || {
            lab.a.expect_closed(at(web4(12), 80))
        })?;
        let problems = problems(lab)?;
        ensure!(
            problems.contains(HOST) && problems.contains("add it again"),
            "{problems}"
        );
        let of_pods = lab.identities()?.into_iter().filter(|(id, _)| *id >= 256);
        let of_pods = format!("{:?}", of_pods.collect::<Vec<_>>());
        ensure!(!of_pods.contains(HOST), "{of_pods}");

        lab.add_endpoint(&lab.a, WEB)?;
        lab.a.expect_open(at(web4(12), 80))?;
        let problems = self::problems(lab)?;
        ensure!(!problems.contains(HOST), "{problems}");
        Ok(())
    });
}
