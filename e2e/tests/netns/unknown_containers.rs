//! `--unknown-containers BRIDGE=closed`: nothing passes ports of a bridge that are not endpoints.
use std::time::Duration;

use anyhow::ensure;
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Program, eventually, with_lab};

const SOON: Duration = Duration::from_secs(20);
const OPEN: u8 = 10;
const DENIED: u8 = 12;
const CLOSED: &str = "--unknown-containers=br0=closed";

/// Whether this kernel can tell the bridge of a frame.
fn knows_bridges(lab: &Lab) -> bool {
    let rule = "add table bridge hf-try; add chain bridge hf-try c; add rule bridge hf-try c meta ibrname \"br0\"";
    let tried = lab.node.run("nft", &[rule]).is_ok();
    let _absent = lab.node.run("nft", &["delete table bridge hf-try"]);
    tried
}

#[test]
fn ports_of_a_closed_bridge_pass_nothing_until_they_are_endpoints() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
        let options = AgentOptions::default().flag(CLOSED);
        if !knows_bridges(lab) {
            println!("this kernel lacks CONFIG_NFT_BRIDGE_META: only the refusal is tested");
            let log = lab.directory().join("log/agent.log");
            let mut agent = Program::start("holdfast-agent", lab.agent_command(&options)?, &log)?;
            ensure!(!agent.wait(SOON)?.success(), "it runs");
            ensure!(
                agent.log().contains("--unknown-containers"),
                "{}",
                agent.log()
            );
            ensure!(
                agent.log().contains("CONFIG_NFT_BRIDGE_META"),
                "{}",
                agent.log()
            );
            return Ok(());
        }
        let agent = lab.start_agent(&options)?;
        let first = bridge.add_pod("p", 11)?;
        let second = bridge.add_pod("q", 12)?;
        for pod in [&first, &second] {
            pod.expect_closed(at(web4(OPEN), 80))?;
        }
        // A routed pod is not a port of the bridge.
        lab.a.expect_open(at(web4(DENIED), 80))?;
        lab.add_endpoint(&first, WEB)?;
        eventually("its policy holds", SOON, || {
            first.expect_open(at(web4(OPEN), 80))
        })?;
        first.expect_closed(at(web4(DENIED), 80))?;
        agent.kill_9()?;
        let third = bridge.add_pod("r", 13)?;
        for pod in [&second, &third] {
            pod.expect_closed(at(web4(OPEN), 80))?;
        }
        first.expect_open(at(web4(OPEN), 80))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        eventually("without the flag it is open again", SOON, || {
            third.expect_open(at(web4(DENIED), 80))
        })
    });
}
