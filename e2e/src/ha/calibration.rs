//! That the load sees what is lost and what is wrong: both are brought about.

use anyhow::Result;

use super::stage::{LEAVES, Stage};
use super::{COUNTED, Row};
use crate::policy::{egress, names};

/// The only replica dies, and no other is there; then policy takes the names away.
pub(super) fn broken(stage: &Stage) -> Result<Vec<Row>> {
    let _agent = stage.agent(&stage.agent_options())?;
    let only = stage.replica(0)?;
    let load = stage.load()?;
    only.kill_9()?;
    std::thread::sleep(stage.size.pause);
    let next = stage.replica(1)?;
    load.flows()?;
    let refused = stage.rules("*.other.test");
    stage
        .lab
        .write_policy("web.yaml", &egress("good-names", "web", &refused))?;
    stage.lab.proxies_in_step()?;
    std::thread::sleep(stage.size.pause);
    let allowed = stage.rules("*.good.test") + &names("*.good.test");
    stage
        .lab
        .write_policy("web.yaml", &egress("good-names", "web", &allowed))?;
    let report = load.finish()?;
    next.terminate(LEAVES)?;
    // The client's kernel repeats a SYN, so that TCP may lose nothing in so short a time.
    let both = [&report.udp, &report.tcp]
        .iter()
        .all(|counts| counts.right > 0 && counts.wrong > 0)
        && report.udp.lost > 0;
    Ok(vec![Row::new(
        String::new(),
        COUNTED,
        &report,
        both,
        "no replica for a while, then a policy that refuses".to_owned(),
    )])
}
