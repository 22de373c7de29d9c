//! Where IPv6 is disabled on the node, both programs say which flag they need, and run with it.
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Program, Query, SdpOptions, with_lab};

const SOON: Duration = Duration::from_secs(10);
const IPV4_ONLY: &str = "--enable-ipv6=false";

fn disable(lab: &Lab) -> Result<()> {
    lab.node
        .sysctl(&[("net.ipv6.conf.all.disable_ipv6", "1")])?;
    Ok(())
}

/// Checks that the program ends, and names the flag.
fn needs_the_flag(lab: &Lab, name: &str, mut command: Command) -> Result<()> {
    command.stdin(Stdio::null());
    let log = lab.directory().join(format!("log/{name}-with-ipv6.log"));
    let mut program = Program::start(name, command, &log)?;
    let status = program.wait(SOON)?;
    let log = program.log();
    ensure!(status.code() == Some(1), "{name}: {status}: {log}");
    for part in [IPV4_ONLY, "net.ipv6.conf.all.disable_ipv6"] {
        ensure!(log.contains(part), "{name} does not name {part}: {log}");
    }
    Ok(())
}

#[test]
fn without_ipv6_both_programs_name_the_flag_and_run_with_it() {
    with_lab(|lab| {
        disable(lab)?;
        needs_the_flag(lab, "agent", lab.agent_command(&AgentOptions::default())?)?;
        needs_the_flag(lab, "sdp", lab.sdp_command(&SdpOptions::default())?)?;

        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&AgentOptions::default().flag(IPV4_ONLY))?;
        let _sdp = lab.start_sdp(&SdpOptions::default().flag(IPV4_ONLY))?;
        lab.connected("one")?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_refused()?;
        lab.a.expect_closed(at(web4(12), 80))
    });
}

#[test]
fn the_builtin_proxy_answers_without_ipv6() {
    with_lab(|lab| {
        disable(lab)?;
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let options = AgentOptions::default().with_builtin().flag(IPV4_ONLY);
        let _agent = lab.start_agent(&options)?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))
    });
}
