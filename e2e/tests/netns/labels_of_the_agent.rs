//! An endpoint cannot be given a label that only the agent gives.
use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);
const HOST: &str = "reserved:host";

fn problems(lab: &Lab) -> Result<String> {
    Ok(lab.agent_json(&["status"])?["problems"].to_string())
}

#[test]
fn a_label_that_only_the_agent_gives_is_refused() {
    with_lab(|lab| {
        let _agent = lab.start_agent(&AgentOptions::default())?;
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
        Ok(())
    });
}
