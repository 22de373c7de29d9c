//! The operations that the proxy can and cannot do after it has dropped root.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::{
    AgentOptions, Lab, Query, SdpOptions, config, eventually,
    lab::{DNS4, web4},
    policy::good_names,
    shell, with_lab,
};
use shared_maps::{
    lxc::{self, LxcKey, LxcValue},
    user::{Globals, Map, MapKind},
};

const SOON: Duration = Duration::from_secs(10);
const EPERM: &str = "1";
const EACCES: &str = "13";
const KEPT: &str = "CAP_DAC_READ_SEARCH CAP_NET_BIND_SERVICE CAP_NET_RAW";

/// Directories and a map for one probe, removed when dropped.
struct TestRoot {
    dir: tempfile::TempDir,
    bpf: PathBuf,
}

impl TestRoot {
    fn new(test: &str) -> Result<Self> {
        let bpf = PathBuf::from(format!("/sys/fs/bpf/hf-e2e-{}-{test}", std::process::id()));
        let globals = Globals::new(&bpf);
        fs::create_dir_all(globals.dir()).context("bpffs is writable")?;
        Map::<LxcKey, LxcValue>::open_or_create(
            &globals.path(lxc::NAME),
            MapKind::Hash,
            64,
            lxc::FLAGS,
        )?;
        let dir = tempfile::tempdir()?;
        for (name, mode) in [("state", 0o600), ("other", 0o644)] {
            let file = dir.path().join(name).join("file");
            fs::create_dir(dir.path().join(name))?;
            fs::write(&file, "x")?;
            fs::set_permissions(&file, fs::Permissions::from_mode(mode))?;
        }
        Ok(Self { dir, bpf })
    }

    fn probe(&self, user: &str) -> Result<(String, BTreeMap<String, String>)> {
        let at = |name: &str| self.dir.path().join(name);
        let mut command = Command::new(config::program("bench")?);
        command
            .arg("sandbox-probe")
            .arg("--readable")
            .arg(at("state"))
            .arg("--writable")
            .arg(at("journal"))
            .arg("--other")
            .arg(at("other"))
            .arg("--bpf-root")
            .arg(&self.bpf)
            .args(["--user", user]);
        let said = shell::finish(&mut command)?;
        let (first, rest) = said.split_once('\n').context("a probe says something")?;
        let outcomes = rest.lines().filter_map(|line| line.split_once(": "));
        let outcomes = outcomes.map(|(name, outcome)| (name.to_owned(), outcome.to_owned()));
        Ok((first.to_owned(), outcomes.collect()))
    }
}

impl Drop for TestRoot {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.bpf);
    }
}

#[test]
fn only_operations_needed_for_serving_work() -> Result<()> {
    let root = TestRoot::new("sandbox")?;
    let (in_force, outcomes) = root.probe("10094")?;
    ensure!(
        in_force
            == format!("uid 10094 gid 10094, {KEPT}, only its own files, system calls filtered"),
        "{in_force}"
    );
    let expected = [
        ("read a file", "ok"),
        ("read a setting", "ok"),
        ("write a journal", "ok"),
        ("read a map", "ok"),
        ("answer from port 53", "ok"),
        ("mark a query", "ok"),
        ("raw socket", "ok"),
        ("connect", "ok"),
        ("read another file", EACCES),
        ("read passwords", EACCES),
        ("write where it reads", EACCES),
        ("write a map", EACCES),
        ("make a map", EPERM),
        ("run a program", EPERM),
        ("become root", EPERM),
        ("another namespace", EPERM),
        ("listen to the node", EPERM),
        ("end another's process", EPERM),
    ];
    let expected: BTreeMap<String, String> = expected
        .into_iter()
        .map(|(name, outcome)| (name.to_owned(), outcome.to_owned()))
        .collect();
    ensure!(outcomes == expected, "{outcomes:#?}");
    Ok(())
}

#[test]
fn staying_root_is_an_option() -> Result<()> {
    let root = TestRoot::new("root")?;
    fs::create_dir(root.dir.path().join("journal"))?;
    let (in_force, outcomes) = root.probe("root")?;
    ensure!(in_force.starts_with("uid 0 gid 0, "), "{in_force}");
    for name in ["read another file", "write a map", "run a program"] {
        ensure!(
            outcomes.get(name).is_some_and(|o| o == "ok"),
            "{outcomes:#?}"
        );
    }
    Ok(())
}

#[test]
fn a_serving_proxy_is_restricted_in_every_thread_and_opens_new_pins_and_files() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("other.good.test", &[web4(11)], 600);
        let programs = lab.start(&good_names())?;
        let ask = |name: &str, ip: u8| lab.a.ask(&Query::a(name, DNS4))?.expect(web4(ip));
        ask("www.good.test", 10)?;
        restricted(programs.sdp.id())?;
        let status = lab.sdp_json("one", &["status"])?;
        let uid = status.pointer("/privileges/uid");
        ensure!(
            uid.and_then(serde_json::Value::as_u64) == Some(10094),
            "{status}"
        );

        // The agent creates the maps again. The proxy must be able to open them with its rights.
        programs.agent.terminate(SOON)?;
        for name in [lxc::NAME, shared_maps::ipcache::NAME] {
            fs::remove_file(lab.pin(name)).with_context(|| format!("removing pin {name}"))?;
        }
        let agent = lab.start_agent(&AgentOptions::default())?;
        eventually("names are answered through the new maps", SOON, || {
            ask("other.good.test", 11)?;
            served_from_agent(lab)
        })?;
        // A proxy that starts now, without the agent, reads the files of root's agent.
        agent.kill_9()?;
        let two = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        restricted(two.id())?;
        ask("www.good.test", 10)?;
        Ok(())
    });
}

fn served_from_agent(lab: &Lab) -> Result<()> {
    let status = lab.sdp_json("one", &["status"])?;
    ensure!(status.pointer("/ready") == Some(&true.into()), "{status}");
    ensure!(
        status
            .pointer("/steering/slots")
            .and_then(|slots| slots.as_array())
            .is_some_and(|slots| !slots.is_empty()),
        "{status}"
    );
    Ok(())
}

/// Checks user, capabilities and restrictions of every thread of a process.
fn restricted(pid: u32) -> Result<()> {
    let tasks = Path::new("/proc").join(pid.to_string()).join("task");
    let mut threads = 0;
    for task in fs::read_dir(&tasks)? {
        let text = fs::read_to_string(task?.path().join("status"))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.map(|rest| rest.split_whitespace().collect::<Vec<_>>().join(" "))
                .with_context(|| format!("no {name} in {text}"))
        };
        ensure!(field("Uid:")? == "10094 10094 10094 10094", "{text}");
        ensure!(field("Gid:")? == "10094 10094 10094 10094", "{text}");
        // DAC_READ_SEARCH 2, NET_BIND_SERVICE 10, NET_RAW 13.
        let kept = format!("{:016x}", 1u64 << 2 | 1 << 10 | 1 << 13);
        ensure!(
            field("CapEff:")? == kept && field("CapPrm:")? == kept,
            "{text}"
        );
        let none = "0".repeat(16);
        ensure!(
            field("CapBnd:")? == none && field("CapInh:")? == none,
            "{text}"
        );
        ensure!(
            field("NoNewPrivs:")? == "1" && field("Seccomp:")? == "2",
            "{text}"
        );
        threads += 1;
    }
    ensure!(threads > 3, "{threads} threads");
    Ok(())
}
