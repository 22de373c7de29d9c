//! A node goes from `netpol run` to `run`: nothing opens, and no stale table is left.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::process::Program;
use holdfast_e2e::{AgentOptions, Lab, config, eventually, shell, with_lab};
use serde_json::json;

use super::{PORT, Pods, SOON, both, of, reaches, status_has};

#[test]
fn a_node_that_gets_programs_opens_nothing_meanwhile() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy(
            "b",
            &json!({"podSelector": of("b"), "ingress": [{"ports": [{"port": PORT}]}]}),
        )?;
        let netpol = lab.start_netpol(&[])?;
        reaches(&lab.a, &both(&lab.b, 8080), false)?;
        let done = AtomicBool::new(false);
        let opened = std::thread::scope(|scope| -> Result<usize> {
            let watch = scope.spawn(|| {
                let mut opened = 0;
                while !done.load(Ordering::Relaxed) {
                    let to = both(&lab.b, 8080)[0];
                    opened += usize::from(lab.a.connect(to, Duration::from_millis(50)).is_ok());
                }
                opened
            });
            let handed = (|| -> Result<()> {
                ensure!(netpol.terminate(SOON)?.success(), "exit code");
                let options = AgentOptions::default().flag("--node-name=n1");
                let _agent = lab.start_agent(&options)?;
                // The table stays until each pod is an endpoint.
                std::thread::sleep(Duration::from_secs(5));
                ensure!(
                    lab.netpol_table().is_ok(),
                    "the table went before the endpoints came"
                );
                for (name, pod) in [("a", &lab.a), ("b", &lab.b)] {
                    let key = format!("default/{name}");
                    let netns = pod.netns.name();
                    lab.agent(&["endpoint", "add", "--netns", netns, "--pod", &key])?;
                }
                eventually("the table is deleted", SOON * 2, || {
                    ensure!(lab.netpol_table().is_err(), "it is there");
                    Ok(())
                })?;
                reaches(&lab.a, &both(&lab.b, PORT), true)?;
                reaches(&lab.a, &both(&lab.b, 8080), false)
            })();
            done.store(true, Ordering::Relaxed);
            let opened = watch.join().expect("the watch does not panic");
            handed.map(|()| opened)
        })?;
        ensure!(opened == 0, "port 8080 was open {opened} times");
        Ok(())
    });
}

#[test]
fn both_enforcements_warn_while_they_run_side_by_side() {
    with_lab(|lab| {
        let _netpol = lab.start_netpol(&[])?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        status_has(lab, &["WARNING", "`holdfast-agent run` (pid"])?;
        let status = lab.agent(&["status"])?;
        let warning = "`holdfast-agent netpol run` runs on this node too";
        ensure!(status.contains(warning), "{status}");
        Ok(())
    });
}

#[test]
fn a_cleanup_removes_the_table_unless_its_process_runs() {
    with_lab(|lab| {
        let cleanup = || -> Result<String> {
            let state = lab.directory().join("state");
            shell::finish(&mut cleanup_command(lab, lab.bpf_root(), &state)?)
        };
        let netpol = lab.start_netpol(&[])?;
        cleanup()?;
        lab.netpol(&["status"])?;
        lab.netpol_table()?;
        removes_the_table(lab, netpol, cleanup)
    });
}

/// A plugin that nothing answers would prevent that pods start.
#[test]
fn a_cleanup_keeps_the_plugin_that_netpol_run_answers() {
    with_lab(|lab| {
        let state = lab.directory().join("state");
        let (conf, socket) = (lab.directory().join("net.d"), state.join("cni.sock"));
        fs::create_dir(&conf)?;
        let base = json!({"name": "net", "cniVersion": "1.0.0", "plugins": [{"type": "ptp"}]});
        fs::write(conf.join("10-net.conflist"), base.to_string())?;
        let own = conf.join("05-holdfast.conflist");
        let cleanup = || -> Result<String> {
            let mut command = cleanup_command(lab, lab.bpf_root(), &state)?;
            shell::finish(command.arg("--cni-conf-dir").arg(&conf))
        };
        let netpol = lab.start_netpol(&[
            &format!("--cni-conf-dir={}", conf.display()),
            &format!("--cni-socket={}", socket.display()),
        ])?;
        eventually("the plugin is configured", SOON, || {
            ensure!(own.exists(), "no {}", own.display());
            Ok(())
        })?;
        let said = cleanup()?;
        ensure!(said.contains("kept the CNI configuration in"), "{said}");
        ensure!(own.exists(), "the configuration is removed");
        UnixStream::connect(&socket).context("the plugin's socket")?;
        ensure!(netpol.terminate(SOON)?.success(), "exit code");
        let said = cleanup()?;
        ensure!(!said.contains("kept"), "{said}");
        ensure!(!own.exists() && !socket.exists(), "left behind: {said}");
        Ok(())
    });
}

#[test]
fn a_cleanup_without_a_bpf_file_system_removes_the_table() {
    with_lab(|lab| {
        let cleanup = || -> Result<String> {
            let mut command = cleanup_command(lab, lab.directory(), lab.directory())?;
            // The programs cannot be looked at, so the cleanup fails.
            let output = command.output()?;
            ensure!(output.status.code() == Some(1), "{output:?}");
            let error = String::from_utf8_lossy(&output.stderr);
            for text in ["were not looked at", "mount -t bpf"] {
                ensure!(error.contains(text), "no {text:?} in: {error}");
            }
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let netpol = lab.start_netpol(&[])?;
        let kept = cleanup()?;
        let pid = format!("(pid {}), which runs", netpol.id());
        ensure!(kept.contains(&pid), "{kept}");
        lab.netpol_table()?;
        removes_the_table(lab, netpol, cleanup)
    });
}

fn cleanup_command(lab: &Lab, bpf_root: &Path, state_dir: &Path) -> Result<Command> {
    let program = config::program("holdfast-agent")?;
    let mut command = lab.node.command(program.to_str().context("UTF-8")?);
    command.args(["cleanup", "--bpf-root"]).arg(bpf_root);
    command.arg("--state-dir").arg(state_dir);
    Ok(command)
}

/// Once `netpol run` has ended, a cleanup removes its table.
fn removes_the_table(
    lab: &Lab,
    netpol: Program,
    cleanup: impl Fn() -> Result<String>,
) -> Result<()> {
    ensure!(netpol.terminate(SOON)?.success(), "exit code");
    let removed = cleanup()?;
    ensure!(
        removed.contains("removed the nftables table of `netpol run`"),
        "{removed}"
    );
    ensure!(lab.netpol_table().is_err(), "it is there");
    Ok(())
}
