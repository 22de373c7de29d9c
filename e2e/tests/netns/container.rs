//! A proxy works with the rights and mounts of a container, or its status names what is missing.
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use daemon::steering_program::link_pin;
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Program, Query, SdpOptions, config, eventually, with_lab};
use shared_maps::user::Globals;

const SOON: Duration = Duration::from_secs(10);
/// All capabilities that docs/src/privileges.md requires. DAC_OVERRIDE is not among them.
const CAPABILITIES: &str = "--bounding-set=-all,+net_raw,+net_bind_service,+dac_read_search,\
                            +setuid,+setgid,+setpcap,+chown,+bpf,+net_admin";

/// Calls that default profiles of container runtimes refuse to a container with the capabilities of the
/// agent. Some of them allow `perf_event_open`.
const REFUSED_BY_DEFAULT: [libc::c_long; 43] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_chroot,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mbind,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_move_pages,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_set_mempolicy,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

/// The command line of `plain` in the node's namespace, run there through `wrapper`.
fn behind(plain: &Command, wrapper: &[&str]) -> Result<Command> {
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
    let plain = lab.sdp_command(&SdpOptions::default())?;
    Program::start("holdfast-sdp", behind(&plain, wrapper)?, &log)
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
        let wrapper = config::program("lab")?;
        let wrapper = wrapper.to_str().context("a path of UTF-8")?;
        let bpf = libc::SYS_bpf.to_string();
        let mut sdp = start(lab, &[wrapper, "without", &bpf])?;
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

/// The capabilities that chart `holdfast` gives a program, for setpriv.
fn of_chart(program: &str) -> Result<String> {
    let values = values_of("holdfast")?;
    let section = values.split_once(&format!("\n{program}:\n"));
    capabilities(section.context("a section of the program")?.1)
}

fn values_of(chart: &str) -> Result<String> {
    let charts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts");
    Ok(std::fs::read_to_string(
        charts.join(chart).join("values.yaml"),
    )?)
}

/// The first list of capabilities in the text of a chart's values.
fn capabilities(values: &str) -> Result<String> {
    let names = values
        .split_once("capabilities:\n")
        .context("a list of capabilities")?
        .1
        .lines()
        .map_while(|line| line.trim_start().strip_prefix("- "))
        .filter_map(|line| line.split_whitespace().next())
        .map(|name| format!(",+{}", name.to_lowercase()));
    Ok(format!("--bounding-set=-all{}", names.collect::<String>()))
}

#[test]
fn the_agent_works_with_the_capabilities_and_the_seccomp_profile_of_the_chart() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.write_policy("web.yaml", &good_names())?;
        let capabilities = of_chart("agent")?;
        ensure!(!capabilities.contains("sys_"), "{capabilities}");
        let options = AgentOptions {
            builtin: true,
            ..AgentOptions::default()
        };
        let plain = lab.agent_command(&options)?;
        let log = lab.directory().join("log/agent.log");
        let values = values_of("holdfast")?;
        ensure!(values.contains("type: RuntimeDefault"), "another profile");
        let refused: Vec<String> = REFUSED_BY_DEFAULT.map(|call| call.to_string()).into();
        let lab_program = config::program("lab")?;
        let lab_program = lab_program.to_str().context("a path of UTF-8")?;
        let wrapper = [
            "setpriv",
            &capabilities,
            lab_program,
            "without",
            &refused.join(","),
        ];
        for run in 1..=2 {
            let command = behind(&plain, &wrapper)?;
            let mut agent = Program::start("holdfast-agent", command, &log)?;
            eventually("the agent is ready", SOON, || {
                agent
                    .check_alive()
                    .with_context(|| format!("start {run}"))?;
                let (code, body) = lab.http(9962, "/readyz")?;
                ensure!(code == 200, "{code}: {body}");
                Ok(())
            })?;
            if run == 1 {
                lab.add_endpoint(&lab.a, WEB)?;
            }
            eventually("the pod gets an answer", SOON, || {
                lab.a
                    .ask(&Query::a("www.good.test", DNS4))?
                    .expect(web4(10))
            })?;
            agent.terminate(SOON)?;
        }
        Ok(())
    });
}

#[test]
fn the_probes_of_the_chart_work_with_the_capabilities_of_the_chart() {
    with_lab(|lab| {
        let _agent = agent(lab)?;
        let capabilities = of_chart("sdp")?;
        ensure!(capabilities.contains("+net_raw"), "{capabilities}");
        ensure!(!capabilities.contains("dac_override"), "{capabilities}");
        let mut sdp = start(lab, &["setpriv", &capabilities])?;
        let probe = |verb: &[&str]| -> Result<String> {
            let socket = lab.sdp_admin("one");
            let mut command = Command::new("setpriv");
            command.arg(&capabilities).arg("--inh-caps=-all");
            command.arg(config::program("holdfast-sdp")?);
            command.arg("--admin-socket").arg(socket).args(verb);
            let output = command.output()?;
            let error = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{verb:?}: {error}");
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        eventually("the proxy is ready", SOON, || {
            sdp.check_alive()?;
            let text = probe(&["health"])?;
            ensure!(text.starts_with("healthy"), "{text}");
            Ok(())
        })?;
        // The last two are what probes of older manifests call.
        let probes = [&["health", "--live"][..], &["ready"], &["alive"]];
        for verb in probes {
            ensure!(probe(verb)?.starts_with("healthy"), "{verb:?}");
        }
        sdp.terminate(SOON)?;
        for verb in probes {
            let error = probe(verb).expect_err("the proxy has ended").to_string();
            ensure!(error.contains("no proxy runs with this socket"), "{error}");
        }
        Ok(())
    });
}

/// Under Cilium's agent no other program loads it.
#[test]
fn a_proxy_loads_the_steering_program_with_the_capabilities_of_its_own_chart() {
    with_lab(|lab| {
        let capabilities = capabilities(&values_of("holdfast-sdp")?)?;
        ensure!(!capabilities.contains("sys_admin"), "{capabilities}");
        let mut sdp = start(lab, &["setpriv", &capabilities])?;
        let pin = link_pin(&Globals::new(lab.bpf_root()));
        eventually("the steering program is attached", SOON, || {
            sdp.check_alive()?;
            ensure!(pin.exists(), "{}", lab.sdp_json("one", &["status"])?);
            Ok(())
        })?;
        sdp.terminate(SOON)?;
        Ok(())
    });
}
