//! Checks that the load detects lost and wrong answers, by causing both.

use anyhow::Result;

use super::setup::{LEAVES, Setup};
use super::{COUNTED, Row};
use crate::policy::{egress, names};

/// The only replica dies. Then a policy refuses the names.
pub(super) fn broken(setup: &Setup) -> Result<Vec<Row>> {
    let _agent = setup.agent(&setup.agent_options())?;
    let only = setup.replica(0)?;
    let load = setup.load()?;
    only.kill_9()?;
    std::thread::sleep(setup.size.pause);
    let next = setup.replica(1)?;
    load.flows()?;
    let refused = setup.rules("*.other.test");
    setup
        .lab
        .write_policy("web.yaml", &egress("good-names", "web", &refused))?;
    setup.lab.proxies_in_step()?;
    std::thread::sleep(setup.size.pause);
    let allowed = setup.rules("*.good.test") + &names("*.good.test");
    setup
        .lab
        .write_policy("web.yaml", &egress("good-names", "web", &allowed))?;
    let report = load.finish()?;
    next.terminate(LEAVES)?;
    // The client's kernel repeats a SYN, so TCP may lose nothing in such a short time.
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
