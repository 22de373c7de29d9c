//! Addresses that were learned without an agent open when it is back, even if the proxy that
//! learned them was killed, replaced or stopped.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, eventually, shell, with_lab};
use serde_json::Value;

/// Longest time until addresses open (promise R5), from the time when the agent is ready.
const OPENS: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(10);
const ZONE: &str = "good.test";

fn names(lab: &Lab) {
    for n in 10..18 {
        lab.zone
            .set(&format!("n{n}.{ZONE}"), &[web4(n), web6(n)], 600);
    }
}

fn learn(lab: &Lab, n: u8) -> Result<()> {
    let name = format!("n{n}.{ZONE}");
    lab.a.ask(&Query::a(&name, DNS4))?.expect(web4(n))?;
    lab.a
        .ask(&Query::aaaa(&name, DNS6).tcp())?
        .expect(web6(n))?;
    Ok(())
}

fn journal(lab: &Lab, proxy: &str) -> Result<Value> {
    let status = lab.sdp_json(proxy, &["status"])?;
    status.get("journal").cloned().context("no journal")
}

fn number(journal: &Value, key: &str) -> Result<u64> {
    journal
        .get(key)
        .and_then(Value::as_u64)
        .context("no number")
}

/// Waits until the proxy with this name has adopted `pairs` pairs from the journals of other
/// proxies.
fn takes_up(lab: &Lab, proxy: &str, pairs: u64) -> Result<()> {
    eventually("it adopts the journals", SOON, || {
        let journal = journal(lab, proxy)?;
        ensure!(number(&journal, "adopted_pairs")? >= pairs, "{journal}");
        Ok(())
    })
}

fn files(lab: &Lab) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(lab.directory().join("journal"))?;
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

#[test]
fn a_killed_proxy_has_written_its_mappings_to_the_journal() {
    with_lab(|lab| {
        names(lab);
        let programs = lab.start(&good_names())?;
        learn(lab, 10)?;
        programs.agent.kill_9()?;
        learn(lab, 11)?;
        // A client may use the answer at once, so no time passes in between.
        programs.sdp.kill_9()?;
        ensure!(files(lab)?.len() == 1, "{:?}", files(lab)?);
        let sdp = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        takes_up(lab, "two", 2)?;
        lab.a.expect_closed(at(web4(11), 80))?;
        learn(lab, 12)?;
        sdp.kill_9()?;
        let _sdp = lab.start_sdp(&SdpOptions::new("three", 9972))?;
        takes_up(lab, "three", 4)?;

        let agent = lab.start_agent(&AgentOptions::default())?;
        lab.audit_settled(ZONE, OPENS)?;
        for n in [11, 12] {
            lab.a.expect_open(at(web4(n), 80))?;
            lab.a.expect_open(at(web6(n), 80))?;
        }

        // The agent is killed twice more, and names are learned each time.
        agent.kill_9()?;
        learn(lab, 13)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        agent.kill_9()?;
        learn(lab, 14)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.audit_settled(ZONE, OPENS)?;
        eventually("durable: the journal is empty", SOON, || {
            let journal = journal(lab, "three")?;
            ensure!(number(&journal, "pairs")? == 0, "{journal}");
            Ok(())
        })
    });
}

#[test]
fn a_running_proxy_adopts_another_journal() {
    with_lab(|lab| {
        names(lab);
        let programs = lab.start(&good_names())?;
        programs.agent.kill_9()?;
        learn(lab, 11)?;
        let other = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        ensure!(
            files(lab)?.len() == 2,
            "each has its own: {:?}",
            files(lab)?
        );
        programs.sdp.kill_9()?;
        takes_up(lab, "two", 2)?;

        // A proxy that drains also hands over its journal.
        learn(lab, 12)?;
        other.terminate(SOON)?;
        ensure!(files(lab)?.len() == 1, "{:?}", files(lab)?);
        let last = lab.start_sdp(&SdpOptions::new("three", 9972))?;
        takes_up(lab, "three", 4)?;

        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.audit_settled(ZONE, OPENS)?;
        lab.a.expect_open(at(web4(11), 80))?;
        lab.a.expect_open(at(web6(12), 80))?;
        eventually("durable: the journal is empty", SOON, || {
            ensure!(number(&journal(lab, "three")?, "pairs")? == 0);
            Ok(())
        })?;
        last.terminate(SOON)?;
        ensure!(
            files(lab)?.is_empty(),
            "nothing to hand over: {:?}",
            files(lab)?
        );
        Ok(())
    });
}

/// A small file system for the journal, removed when dropped.
struct Disk(String);

impl Disk {
    fn mount(lab: &Lab) -> Result<Self> {
        let at = lab.directory().join("journal").display().to_string();
        shell::run(
            "mount",
            &["-t", "tmpfs", "-o", "size=64k,mode=700", "journal", &at],
        )?;
        Ok(Self(at))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The lab's directory could not be removed otherwise.
        let _ = shell::run("umount", &["--lazy", &self.0]);
    }
}

#[test]
fn a_full_disk_loses_no_answer_and_is_reported() {
    with_lab(|lab| {
        names(lab);
        let disk = Disk::mount(lab)?;
        let programs = lab.start(&good_names())?;
        programs.agent.kill_9()?;
        learn(lab, 11)?;
        let ballast = format!("{}/ballast", disk.0);
        // Fails when the disk is full, which is the purpose.
        let _ = std::fs::write(&ballast, vec![1; 128 << 10]);
        // The current page of the file has room for some more names.
        for n in 0..100 {
            let name = format!("m{n}.{ZONE}");
            lab.zone.set(&name, &[web4(12)], 600);
            lab.a.ask(&Query::a(&name, DNS4))?.expect(web4(12))?;
        }
        let full = journal(lab, "one")?;
        ensure!(number(&full, "errors")? > 0, "{full}");
        ensure!(
            full.get("memory_only").is_some_and(Value::is_string),
            "{full}"
        );
        ensure!(lab.metric(9961, "holdfast_journal_memory_only", "")? == 1.0);
        ensure!(lab.metric(9961, "holdfast_journal_errors_total", "")? > 0.0);

        std::fs::remove_file(&ballast)?;
        eventually("it is written again", SOON, || {
            let now = journal(lab, "one")?;
            ensure!(now.get("memory_only").is_some_and(Value::is_null), "{now}");
            Ok(())
        })?;
        programs.sdp.kill_9()?;
        let _sdp = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        takes_up(lab, "two", 102)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.audit_settled(ZONE, OPENS)
    });
}

#[test]
fn without_a_directory_everything_else_works() {
    with_lab(|lab| {
        names(lab);
        std::fs::write(lab.directory().join("file"), b"")?;
        let programs = lab.start(&good_names())?;
        learn(lab, 10)?;
        programs.sdp.terminate(SOON)?;
        let dir = lab.directory().join("file/below");
        let other = SdpOptions::new("two", 9971).flag(&format!("--journal-dir={}", dir.display()));
        let _sdp = lab.start_sdp(&other)?;
        let journal = journal(lab, "two")?;
        ensure!(
            journal
                .get("memory_only")
                .and_then(Value::as_str)
                .is_some_and(|why| why.contains("file/below")),
            "{journal}"
        );
        lab.connected("two")?;
        learn(lab, 11)?;
        lab.a.expect_open(at(web4(11), 80))?;
        programs.agent.kill_9()?;
        learn(lab, 12)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.audit_settled(ZONE, OPENS)?;
        ensure!(lab.audit(ZONE, &[9971])? == 0);
        Ok(())
    });
}
