//! If an agent and its proxy have different state directories, `status` of both says so and names the
//! directories and the flag.
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{AgentOptions, Lab, SdpOptions, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(10);
const FLAG: &str = "the same --state-dir";

/// Problems of the agent, and the two directories that the proxy reports.
fn reported(lab: &Lab) -> Result<(String, Value)> {
    let problems = lab.agent_json(&["status"])?["problems"].to_string();
    let status = lab.sdp_json("one", &["status"])?;
    Ok((
        problems,
        status["agent"]["connection"]["other_state_dir"].clone(),
    ))
}

#[test]
fn different_state_directories_are_reported_by_both_programs() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let own = lab.directory().join("state").display().to_string();
        let other = lab.directory().join("other").display().to_string();
        std::fs::create_dir(&other)?;
        let options = SdpOptions::default().flag(&format!("--state-dir={other}"));
        let sdp = lab.start_sdp(&options)?;
        lab.connected("one")?;
        let (problems, dirs) = reported(lab)?;
        for part in ["proxy one", &own, &other, FLAG] {
            ensure!(problems.contains(part), "no {part}: {problems}");
        }
        ensure!(dirs == json!({"agent": own, "own": other}), "{dirs}");
        ensure!(sdp.log().contains(FLAG), "{}", sdp.log());
        drop(sdp);

        // The same directory at another path, as in a container.
        let link = lab.directory().join("link");
        std::os::unix::fs::symlink(&own, &link)?;
        let options = SdpOptions::default().flag(&format!("--state-dir={}", link.display()));
        let _sdp = lab.start_sdp(&options)?;
        lab.connected("one")?;
        eventually("no directory is reported", SOON, || {
            let (problems, dirs) = reported(lab)?;
            ensure!(
                !problems.contains(FLAG) && dirs.is_null(),
                "{problems} {dirs}"
            );
            Ok(())
        })
    });
}
