//! Bad inputs give errors that name the wrong field or file, and change nothing else.
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4};
use holdfast_e2e::policy::{CLIENT, WEB, dns, egress, good_names, names};
use holdfast_e2e::{AgentOptions, Lab, Program, Query, SdpOptions, eventually, shell, with_lab};

const SOON: Duration = Duration::from_secs(10);

#[test]
fn a_bad_document_is_named_and_the_last_good_one_stays() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let _programs = lab.start(&good_names())?;
        let good = good_names();
        let both = "- toFQDNs: [{matchName: a.test, matchPattern: \"*.test\"}]\n";
        let cases = [
            (
                good.replace("endpointSelector", "endpointSelektor"),
                "endpointSelektor",
            ),
            (
                good.replace("toFQDNs: [{matchPattern: \"*.good.test\"}]", "toFQDNs: web"),
                "toFQDNs",
            ),
            (good.replace("*.good.test", "a{1,2}.x"), "a{1,2}.x"),
            (egress("good-names", "web", both), "matchPattern"),
            (good.replace("\"80\"", "\"no_port!\""), "no_port!"),
            ("this: [is not".to_owned(), "web.yaml"),
        ];
        for (text, named) in cases {
            lab.write_policy("web.yaml", &text)?;
            eventually(&format!("{named} is reported"), SOON, || {
                let listing = lab.agent_json(&["policy", "get"])?;
                let rejected = listing.get("rejected").context("rejected")?.to_string();
                ensure!(rejected.contains(named), "{rejected}");
                Ok(())
            })?;
            lab.a
                .ask(&Query::a("www.good.test", DNS4))?
                .expect(web4(10))?;
            lab.a.expect_open(at(web4(10), 80))?;
            lab.a
                .ask(&Query::a("www.bad.test", DNS4))?
                .expect_refused()?;
            lab.write_policy("web.yaml", &good)?;
            eventually("no document is refused any more", SOON, || {
                let list = lab.agent_json(&["policy", "get"])?;
                let rejected = list.get("rejected").and_then(serde_json::Value::as_array);
                ensure!(rejected.is_some_and(Vec::is_empty), "{rejected:?}");
                Ok(())
            })?;
        }
        Ok(())
    });
}

#[test]
fn an_endpoint_in_a_missing_namespace_is_an_error() {
    with_lab(|lab| {
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let absent = format!("{}-absent", lab.node.name());
        let arguments = [
            "endpoint", "add", "--netns", &absent, "--ifname", "eth0", "--labels", WEB,
        ];
        let error = refused(lab, &arguments)?;
        ensure!(
            error.contains(&absent),
            "does not name the namespace: {error}"
        );
        let missing = [
            "endpoint",
            "add",
            "--netns",
            lab.a.netns.name(),
            "--ifname",
            "eth9",
            "--labels",
            WEB,
        ];
        let error = refused(lab, &missing)?;
        ensure!(
            error.contains("eth9"),
            "does not name the interface: {error}"
        );
        lab.add_endpoint(&lab.a, WEB)?;
        Ok(())
    });
}

#[test]
fn a_port_in_use_is_named() {
    with_lab(|lab| {
        let _held = lab
            .node
            .enter(|| std::net::TcpListener::bind("127.0.0.1:10094"))??;
        let _udp = lab
            .node
            .enter(|| std::net::UdpSocket::bind("127.0.0.1:10094"))??;
        let error = ends(lab, lab.sdp_command(&SdpOptions::default())?, "sdp")?;
        ensure!(error.contains("10094"), "does not name the port: {error}");
        let _metrics = lab
            .node
            .enter(|| std::net::TcpListener::bind("127.0.0.1:9962"))??;
        let error = ends(lab, lab.agent_command(&AgentOptions::default())?, "agent")?;
        ensure!(error.contains("9962"), "does not name the port: {error}");
        Ok(())
    });
}

#[test]
fn a_missing_bpffs_is_named() {
    with_lab(|lab| {
        let plain = lab.directory().join("no-bpffs");
        std::fs::create_dir(&plain)?;
        let usual = lab.agent_command(&AgentOptions::default())?;
        let mut command = Command::new(usual.get_program());
        command.args(usual.get_args().map(|argument| {
            if argument == lab.bpf_root() {
                plain.as_os_str()
            } else {
                argument
            }
        }));
        let error = ends(lab, command, "agent")?;
        ensure!(
            error.contains("BPF file system") && error.contains("mount -t bpf"),
            "does not name the file system and the remedy: {error}"
        );
        Ok(())
    });
}

#[test]
fn a_map_of_another_layout_is_named_with_both_layouts() {
    with_lab(|lab| {
        let globals = lab.bpf_root().join("tc/globals");
        std::fs::create_dir_all(&globals)?;
        let pin = globals.join("cilium_lxc").display().to_string();
        shell::run(
            "bpftool",
            &[
                "map",
                "create",
                &pin,
                "type",
                "hash",
                "key",
                "20",
                "value",
                "52",
                "entries",
                "16",
                "name",
                "cilium_lxc",
                "flags",
                "0x81",
            ],
        )?;
        let error = ends(lab, lab.agent_command(&AgentOptions::default())?, "agent")?;
        for part in ["cilium_lxc", "48-byte values", "52-byte values"] {
            ensure!(error.contains(part), "does not name {part}: {error}");
        }
        Ok(())
    });
}

#[test]
fn a_corrupt_endpoint_file_affects_only_its_endpoint() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("www.client.test", &[web4(11)], 600);
        let client = egress(
            "client",
            "client",
            &(dns("*.client.test") + &names("*.client.test")),
        );
        lab.write_policy("client.yaml", &client)?;
        let programs = lab.start(&good_names())?;
        let first = lab.endpoint_id(&lab.a)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;

        programs.agent.kill_9()?;
        programs.sdp.kill_9()?;
        let file = lab
            .directory()
            .join(format!("state/state/{first}/ep_config.json"));
        truncate(&file)?;
        let sdp = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        lab.b
            .ask(&Query::a("www.client.test", DNS4))?
            .expect(web4(11))?;
        ensure!(
            sdp.log().contains("ep_config.json"),
            "the file is not named"
        );
        let damaged = lab.metric(9971, "holdfast_damaged_files", "")?;
        ensure!(damaged == 1.0, "the proxy counts {damaged} damaged files");
        let skipped = lab.sdp_json("two", &["status"])?;
        let skipped = skipped.get("skipped_files").context("skipped_files")?;
        ensure!(
            skipped.to_string().contains(&file.display().to_string()),
            "{skipped}"
        );
        let refused = Query::a("www.good.test", DNS4).within(Duration::from_millis(800));
        ensure!(
            lab.a
                .ask(&refused)
                .map_or(true, |reply| reply.expect_refused().is_ok()),
            "answered without rules"
        );

        // The agent writes the file again from policy.
        let _agent = lab.start_agent(&AgentOptions::default())?;
        says_damaged(lab, &file)?;
        lab.proxies_in_step()?;
        eventually("the endpoint's queries are answered again", SOON, || {
            lab.a
                .ask(&Query::a("www.good.test", DNS4))?
                .expect(web4(10))
        })?;
        lab.a.expect_open(at(web4(10), 80))
    });
}

#[test]
fn a_corrupt_checkpoint_loses_only_identity_numbers() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        let state = lab.directory().join("state/state");
        let id = lab.endpoint_id(&lab.a)?;
        let file = state.join(id.to_string()).join("ep_config.json");
        eventually("the name is on disk", SOON, || {
            ensure!(std::fs::read_to_string(&file)?.contains("www.good.test"));
            Ok(())
        })?;
        let kept = lab.a.datagrams(at(web4(10), UDP_PORT))?;
        let shut = lab.a.datagrams(at(web4(11), UDP_PORT))?;
        programs.agent.kill_9()?;
        let checkpoint = state.join("local_allocator_state.json");
        truncate(&checkpoint)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        says_damaged(lab, &checkpoint)?;
        ensure!(
            agent.log().contains("local_allocator_state.json"),
            "the file is not named"
        );
        lab.a.expect_open(at(web4(10), 80))?;
        stream.expect_alive()?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.proxies_in_step()?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let (sent, echoed) = kept.finish();
        ensure!(echoed == sent, "{echoed} of {sent} datagrams came back");
        let (_, echoed) = shut.finish();
        ensure!(echoed == 0, "a closed address answered");
        lab.a.expect_open(at(web4(10), 80))
    });
}

/// Checks that the agent counts one damaged file, and that `status` has its path and the path to
/// which it was moved.
fn says_damaged(lab: &Lab, file: &Path) -> Result<()> {
    let counted = lab.metric(9962, "holdfast_restore_damaged_files", "")?;
    ensure!(counted == 1.0, "the agent counts {counted} damaged files");
    let status = lab.agent_json(&["status"])?;
    let aside = format!("{}.corrupt", file.display());
    for field in ["damaged_files", "problems"] {
        let listed = status.get(field).context("field")?.to_string();
        ensure!(listed.contains(&aside), "{field} lacks {aside}: {listed}");
    }
    ensure!(Path::new(&aside).exists(), "{aside} is not there");
    let text = lab.agent(&["status"])?;
    ensure!(
        text.lines()
            .any(|line| line.starts_with("PROBLEM") && line.contains(&aside)),
        "{text}"
    );
    Ok(())
}

/// Cuts a file off in the middle.
fn truncate(file: &Path) -> Result<()> {
    let text = std::fs::read(file).with_context(|| format!("read {}", file.display()))?;
    std::fs::write(file, text.get(..text.len() / 2).unwrap_or_default())?;
    Ok(())
}

/// Runs a client command that must fail. Returns its error without the command line.
fn refused(lab: &Lab, arguments: &[&str]) -> Result<String> {
    let error = lab.agent(arguments).expect_err("refused").to_string();
    let (_, said) = error
        .rsplit_once("holdfast-agent: ")
        .with_context(|| format!("names no error: {error}"))?;
    Ok(said.to_owned())
}

/// Runs a program that must end by itself with a failure. Returns its error without the rest of its
/// log.
fn ends(lab: &Lab, mut command: Command, name: &str) -> Result<String> {
    command.stdin(Stdio::null());
    let log = lab.directory().join(format!("log/failing-{name}.log"));
    let mut program = Program::start(name, command, &log)?;
    let status = program.wait(SOON)?;
    ensure!(!status.success(), "{name} ended well: {}", program.log());
    let log = program.log();
    let error = log.lines().rfind(|line| line.starts_with("holdfast-"));
    Ok(error
        .with_context(|| format!("{name} names no error: {log}"))?
        .to_owned())
}
