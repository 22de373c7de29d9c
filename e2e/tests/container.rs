//! A proxy works with the rights and mounts of a container, or its status names the missing ones.
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Program, Query, SdpOptions, config, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);
/// All capabilities that docs/src/privileges.md requires. DAC_OVERRIDE is not among them.
const CAPABILITIES: &str = "--bounding-set=-all,+net_raw,+net_bind_service,+dac_read_search,\
                            +setuid,+setgid,+setpcap,+chown,+sys_admin,+bpf,+net_admin";

/// The proxy's command line, run by another program in the node's namespace.
fn behind(lab: &Lab, wrapper: &[&str]) -> Result<Command> {
    let plain = lab.sdp_command(&SdpOptions::default())?;
    let arguments: Vec<_> = plain.get_args().map(ToOwned::to_owned).collect();
    let at = arguments
        .iter()
        .position(|argument| argument == "--")
        .context("nsenter --net=… -- program")?;
    let mut command = Command::new(plain.get_program());
    command.args(&arguments[..=at]).args(wrapper);
    command.args(&arguments[at + 1..]);
    Ok(command)
}

fn start(lab: &Lab, wrapper: &[&str]) -> Result<Program> {
    let log = lab.directory().join("log/sdp-one.log");
    Program::start("holdfast-sdp", behind(lab, wrapper)?, &log)
}

fn agent(lab: &Lab) -> Result<Program> {
    lab.zone.set("www.good.test", &[web4(10)], 60);
    lab.write_policy("web.yaml", &good_names())?;
    let agent = lab.start_agent(&AgentOptions::default())?;
    lab.add_endpoint(&lab.a, WEB)?;
    Ok(agent)
}

#[test]
fn a_proxy_without_dac_override_starts_again_after_it_dropped_root() {
    with_lab(|lab| {
        let _agent = agent(lab)?;
        for run in 1..=2 {
            let mut sdp = start(lab, &["setpriv", CAPABILITIES])?;
            eventually("the pod gets an answer", SOON, || {
                sdp.check_alive().with_context(|| format!("start {run}"))?;
                lab.a
                    .ask(&Query::a("www.good.test", DNS4))?
                    .expect(web4(10))
            })?;
            sdp.terminate(SOON)?;
        }
        Ok(())
    });
}

#[test]
fn a_proxy_that_may_not_call_bpf_names_the_remedy() {
    with_lab(|lab| {
        let _agent = agent(lab)?;
        let wrapper = config::program("without_bpf")?;
        let mut sdp = start(lab, &[wrapper.to_str().context("a path of UTF-8")?])?;
        eventually("status and /readyz say why", SOON, || {
            sdp.check_alive()?;
            let status = lab.sdp_json("one", &["status"])?;
            let problem = status["maps"]["lxc_problem"].as_str().unwrap_or_default();
            let (code, body) = lab.http(9961, "/readyz")?;
            for said in [problem, &body] {
                ensure!(
                    said.contains("bpf() is forbidden") && said.contains("seccomp"),
                    "{code}: {said}"
                );
            }
            ensure!(code != 200, "ready without maps");
            Ok(())
        })
    });
}

/// The capabilities that a chart gives the proxy, for setpriv.
fn of_chart(file: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../charts")
        .join(file);
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    let section = text.rsplit_once("capabilities:\n").context("a list")?.1;
    let names = section
        .lines()
        .map_while(|line| line.trim_start().strip_prefix("- "))
        .map(|name| format!(",+{}", name.to_lowercase()));
    Ok(format!("--bounding-set=-all{}", names.collect::<String>()))
}

#[test]
fn the_probes_of_the_chart_work_with_the_capabilities_of_the_chart() {
    with_lab(|lab| {
        let _agent = agent(lab)?;
        let capabilities = of_chart("holdfast/values.yaml")?;
        ensure!(capabilities.contains("+net_raw"), "{capabilities}");
        ensure!(!capabilities.contains("dac_override"), "{capabilities}");
        let mut sdp = start(lab, &["setpriv", &capabilities])?;
        let probe = |verb: &str| -> Result<String> {
            let socket = lab.sdp_admin("one");
            let mut command = Command::new("setpriv");
            command.arg(&capabilities).arg("--inh-caps=-all");
            command.arg(config::program("holdfast-sdp")?);
            command.arg("--admin-socket").arg(socket).arg(verb);
            let output = command.output()?;
            let error = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{verb}: {error}");
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        eventually("the proxy is ready", SOON, || {
            sdp.check_alive()?;
            let text = probe("ready")?;
            ensure!(text.starts_with("ready"), "{text}");
            Ok(())
        })?;
        ensure!(probe("alive")?.starts_with("alive"));
        sdp.terminate(SOON)?;
        let error = probe("alive").expect_err("the proxy has ended").to_string();
        ensure!(error.contains("no proxy runs with this socket"), "{error}");
        Ok(())
    });
}
