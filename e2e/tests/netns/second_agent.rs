//! A second agent on the node changes nothing of the first one, and no other user can prevent an
//! agent or a proxy from starting.
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::node::{AgentOptions, SdpOptions};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::process::Program;
use holdfast_e2e::{Lab, Query, config, eventually, with_lab};
use nix::unistd::{Uid, fchown};
use shared_maps::pin;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

const SOON: Duration = Duration::from_secs(10);
/// Default port of the proxies.
const PORT: u16 = 10094;

/// Starts an agent with state directory, sockets and port of its own, wrapped in `wrapper`.
fn other(lab: &Lab, name: &str, bpf_root: &Path, wrapper: &[&str]) -> Result<Program> {
    let program = config::program("holdfast-agent")?;
    let dir = lab.directory().join(name);
    fs::create_dir_all(&dir)?;
    let (wrap, rest) = wrapper.split_first().unwrap_or((&"env", &[]));
    let mut command = lab.node.command(wrap);
    command.args(rest).arg(program).arg("run");
    command.arg("--bpf-root").arg(bpf_root);
    command.arg("--state-dir").arg(dir.join("state"));
    command.arg("--sdp-socket").arg(dir.join("sdp.sock"));
    command.arg("--admin-socket").arg(dir.join("agent.sock"));
    command.args(["--metrics-address=off", "--disable-builtin-dns-proxy"]);
    Program::start(
        name,
        command,
        &lab.directory().join(format!("log/{name}.log")),
    )
}

fn refused(mut agent: Program, by: u32) -> Result<()> {
    let status = agent.wait(SOON)?;
    ensure!(!status.success(), "it ended well: {status}");
    let log = agent.log();
    for part in [
        &format!("pid {by}"),
        "stop that agent",
        "--bpf-root",
        "--state-dir",
    ] {
        ensure!(log.contains(part), "no {part:?} in: {log}");
    }
    Ok(())
}

#[test]
fn a_second_agent_on_the_same_bpf_root_is_refused_and_removes_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let programs = lab.start(&good_names())?;
        let id = lab.endpoint_id(&lab.a)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let links = lab.bpf_root().join(pin::LINKS).join(id.to_string());
        let first = programs.agent.id();

        refused(other(lab, "second", lab.bpf_root(), &[])?, first)?;
        let namespace = ["unshare", "--mount", "--propagation=private", "--"];
        refused(other(lab, "elsewhere", lab.bpf_root(), &namespace)?, first)?;
        ensure!(fs::read_dir(&links)?.count() == 2, "links are gone");
        lab.a.expect_closed(at(web4(12), 80))?;
        lab.a.expect_open(at(web4(10), 80))?;

        // The remedy that the message names.
        let own = lab.bpf_root().join("second");
        let second = other(lab, "third", &own, &[])?;
        eventually("it runs on a root of its own", SOON, || {
            ensure!(own.join(pin::LINKS).exists() && second.log().contains("agent starting"));
            Ok(())
        })?;
        drop(second);
        lab.a.expect_closed(at(web4(12), 80))?;

        // The lock ends with its holder, however the holder ends.
        drop(programs.agent);
        let _next = lab.start_agent(&AgentOptions::default())?;
        Ok(())
    });
}

#[test]
fn one_of_two_agents_that_start_at_the_same_time_runs() {
    with_lab(|lab| {
        for round in 0..3 {
            let start = |n: u32| other(lab, &format!("both-{round}-{n}"), lab.bpf_root(), &[]);
            let mut both = [start(1)?, start(2)?];
            eventually("one has ended and one runs", SOON, || {
                let ended = both.iter_mut().map(|agent| agent.check_alive().is_err());
                let ended = ended.filter(|ended| *ended).count();
                let started = both
                    .iter()
                    .filter(|agent| agent.log().contains("agent starting"))
                    .count();
                ensure!(
                    (ended, started) == (1, 1),
                    "{ended} ended, {started} started"
                );
                Ok(())
            })?;
        }
        Ok(())
    });
}

/// Tries to lock a directory, as another user.
fn locks(path: &Path, gid: u32) -> Result<bool> {
    let status = Command::new("setpriv")
        .args([
            "--reuid=65534",
            &format!("--regid={gid}"),
            "--clear-groups",
            "--",
        ])
        .args(["flock", "--nonblock"])
        .arg(path)
        .arg("true")
        .stderr(Stdio::null())
        .status()
        .context("setpriv")?;
    Ok(status.success())
}

#[test]
fn locks_are_for_root_and_the_proxies_group_alone() {
    with_lab(|lab| {
        let agent = lab.start_agent(&AgentOptions::default())?;
        drop(agent);
        let of = |lock: &str, gid| locks(&lab.bpf_root().join(lock), gid);
        let group = daemon::unix_socket::PROXY_ID;
        for lock in [pin::AGENT_LOCK, pin::PROGRAMS_LOCK] {
            ensure!(!of(lock, group)?, "{lock}");
        }
        ensure!(!of(pin::SLOTS_LOCK, 65534)?, "anyone locks the slots");
        ensure!(
            of(pin::SLOTS_LOCK, group)?,
            "the group cannot lock the slots"
        );
        let state = lab.directory().join("state/agent.lock");
        ensure!(!locks(&state, group)?, "anyone locks the state directory");

        // A local user locks every file that he may open, and keeps the locks.
        let globals = lab.bpf_root().join(pin::GLOBALS);
        let squat = |path: &Path| -> Result<Program> {
            let mut command = Command::new("setpriv");
            command.args([
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "--",
                "flock",
                "--no-fork",
            ]);
            command
                .arg(path)
                .args(["sh", "-c", "echo locked; exec sleep 60"]);
            Program::start("squat", command, &lab.directory().join("log/squat.log"))
        };
        let squatters = [squat(&globals)?, squat(&lab.bpf_root().join(pin::LINKS))?];
        for squatter in &squatters {
            eventually("it is locked", SOON, || {
                ensure!(squatter.log().contains("locked"));
                Ok(())
            })?;
        }
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.write_policy("web.yaml", &good_names())?;
        lab.add_endpoint(&lab.a, WEB)?;
        eventually("the proxy has slots", SOON, || {
            let status = lab.sdp_json("one", &["status"])?;
            let slots = status.pointer("/steering/slots").and_then(|s| s.as_array());
            ensure!(slots.is_some_and(|slots| !slots.is_empty()), "{status}");
            Ok(())
        })
    });
}

/// A socket of another user, bound to the proxy port.
fn bind_as(uid: u32, kind: Type, protocol: Protocol, reuse_address: bool) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, kind, Some(protocol))?;
    fchown(&socket, Some(Uid::from_raw(uid)), None)?;
    socket.set_reuse_port(true)?;
    socket.set_reuse_address(reuse_address)?;
    let at = std::net::SocketAddr::from(([127, 0, 0, 1], PORT));
    socket.bind(&SockAddr::from(at))?;
    Ok(socket)
}

#[test]
fn no_other_user_binds_the_proxy_port_while_no_proxy_runs() {
    with_lab(|lab| {
        let kinds = [(Type::DGRAM, Protocol::UDP), (Type::STREAM, Protocol::TCP)];
        let squat = |reuse| {
            kinds.map(|(kind, protocol)| lab.node.enter(|| bind_as(4711, kind, protocol, reuse)))
        };
        let _agent = lab.start_agent(&AgentOptions::default())?;
        for reuse in [false, true] {
            for bound in squat(reuse) {
                ensure!(
                    bound?.is_err(),
                    "another user bound the port, reuse {reuse}"
                );
            }
        }
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        for reuse in [false, true] {
            for bound in squat(reuse) {
                ensure!(
                    bound?.is_err(),
                    "another user bound a proxy's port, reuse {reuse}"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn an_agent_names_the_owner_of_the_proxy_port_and_holds_it_once_it_is_free() {
    with_lab(|lab| {
        let taken = lab
            .node
            .enter(|| bind_as(4711, Type::DGRAM, Protocol::UDP, false))??;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let status = |lab: &Lab| lab.agent(&["status"]);
        eventually("status names the user", SOON, || {
            let text = status(lab)?;
            ensure!(
                text.contains("uid 4711") && text.contains("10094"),
                "{text}"
            );
            Ok(())
        })?;
        drop(taken);
        eventually("the port is held", SOON, || {
            let text = status(lab)?;
            ensure!(!text.contains("4711"), "{text}");
            Ok(())
        })?;
        let again = lab
            .node
            .enter(|| bind_as(4711, Type::DGRAM, Protocol::UDP, false))?;
        ensure!(again.is_err(), "another user bound the port");
        Ok(())
    });
}

#[test]
fn an_agent_on_another_bpf_file_system_removes_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let _programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        // A container with a BPF file system of its own.
        let script = "mount -t bpf bpf /sys/fs/bpf && exec \"$0\" \"$@\"";
        let wrapper = [
            "unshare",
            "--mount",
            "--propagation=private",
            "--",
            "sh",
            "-c",
            script,
        ];
        let second = other(lab, "elsewhere", Path::new("/sys/fs/bpf"), &wrapper)?;
        eventually("it runs", SOON, || {
            ensure!(second.log().contains("agent starting"), "{}", second.log());
            Ok(())
        })?;
        drop(second);
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        Ok(())
    });
}

#[test]
fn a_directory_that_another_user_made_in_the_bpf_root_is_refused_by_name() {
    with_lab(|lab| {
        let theirs = lab.bpf_root().join("holdfast");
        fs::create_dir(&theirs)?;
        nix::unistd::chown(&theirs, Some(Uid::from_raw(4711)), None)?;
        let mut agent = other(lab, "refuses", lab.bpf_root(), &[])?;
        ensure!(
            !agent.wait(SOON)?.success(),
            "it used another user's directory"
        );
        let log = agent.log();
        ensure!(
            log.contains("uid 4711") && log.contains("holdfast"),
            "{log}"
        );
        Ok(())
    });
}

#[test]
fn root_gives_the_proxys_user_no_other_files() {
    with_lab(|lab| {
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let user = daemon::unix_socket::PROXY_ID;
        let (theirs, secret) = (
            lab.directory().join("theirs"),
            lab.directory().join("secret"),
        );
        for dir in [&theirs, &secret] {
            fs::create_dir(dir)?;
        }
        nix::unistd::chown(&theirs, Some(Uid::from_raw(user)), None)?;
        // State that a compromised proxy leaves for root's next start.
        std::os::unix::fs::symlink(&secret, theirs.join("journal"))?;
        let journal = format!("--journal-dir={}", theirs.join("journal").display());
        let _sdp = lab.start_sdp(&SdpOptions::default().flag(&journal))?;
        let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&secret)?);
        ensure!(owner == 0, "root gave its directory to uid {owner}");
        Ok(())
    });
}
