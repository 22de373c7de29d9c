//! State files that are lost, or that are no regular files, open no pod. The agent still starts and
//! answers, and `status` names the files.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, with_lab};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

/// Puts something that is no regular file at a path.
type Spoil = fn(&Path) -> Result<()>;

const SOON: Duration = Duration::from_secs(20);
const ALLOWED: u8 = 10;
const DENIED: u8 = 12;

fn pipe(path: &Path) -> Result<()> {
    Ok(mkfifo(path, Mode::from_bits_truncate(0o600))?)
}

fn problems(lab: &Lab) -> Result<String> {
    let status = lab.agent_json(&["status"])?;
    Ok(status.get("problems").context("problems")?.to_string())
}

/// All files in `dir` and its subdirectories, sorted.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        match path.is_dir() {
            true => found.extend(files(&path)?),
            false => found.push(path),
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn a_lost_list_of_added_endpoints_opens_no_pod() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(ALLOWED)], 600);
        let mut programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(ALLOWED))?;
        let file = lab.directory().join("state/state/added_endpoints.json");
        ensure!(file.exists(), "{} is not there", file.display());
        let shut = lab.a.datagrams(at(web4(DENIED), UDP_PORT))?;
        let kinds: [(&str, Spoil); 3] = [
            ("absent", |_| Ok(())),
            ("directory", |path| Ok(fs::create_dir(path)?)),
            ("pipe", pipe),
        ];
        for (kind, make) in kinds {
            programs.agent.kill_9()?;
            fs::remove_file(&file)?;
            make(&file)?;
            programs.agent = lab.start_agent(&AgentOptions::default())?;
            lab.endpoint_id(&lab.a)
                .with_context(|| format!("{kind}: the endpoint is gone"))?;
            lab.a.expect_open(at(web4(ALLOWED), 80))?;
            lab.a.expect_closed(at(web4(DENIED), 80))?;
            let said = problems(lab)?;
            ensure!(said.contains("added_endpoints.json"), "{kind}: {said}");
            ensure!(file.is_file(), "{kind}: the list is not written again");
            // The next start finds the list.
            programs.agent.kill_9()?;
            programs.agent = lab.start_agent(&AgentOptions::default())?;
            lab.endpoint_id(&lab.a)?;
            let _aside = fs::remove_file(file.with_extension("json.corrupt"))
                .or_else(|_| fs::remove_dir(file.with_extension("json.corrupt")));
        }
        let (sent, echoed) = shut.finish();
        ensure!(
            sent > 0 && echoed == 0,
            "{echoed} of {sent} datagrams passed"
        );
        // What an administrator removes is not added again.
        let key = format!("cli/{}/eth0", lab.a.netns.name());
        lab.agent(&["endpoint", "remove", &key])?;
        lab.a.expect_open(at(web4(DENIED), 80))?;
        programs.agent.kill_9()?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let list = lab.agent_json(&["endpoint", "list"])?;
        ensure!(list.as_array().is_some_and(Vec::is_empty), "{list}");
        lab.a.expect_open(at(web4(DENIED), 80))
    });
}

#[test]
fn an_agent_whose_state_is_lost_answers_at_once_and_opens_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(ALLOWED)], 600);
        let programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(ALLOWED))?;
        let shut = lab.a.datagrams(at(web4(DENIED), UDP_PORT))?;
        programs.agent.kill_9()?;
        let state = lab.directory().join("state");
        for entry in fs::read_dir(&state)? {
            let path = entry?.path();
            match path.is_dir() {
                true => fs::remove_dir_all(&path)?,
                false => fs::remove_file(&path)?,
            }
        }
        fs::remove_dir_all(lab.endpoint_store())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        for words in [&["status"][..], &["endpoint", "list"][..]] {
            let begin = Instant::now();
            lab.agent_json(words)?;
            let took = begin.elapsed();
            ensure!(took < Duration::from_secs(5), "{words:?} took {took:?}");
        }
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        let said = problems(lab)?;
        ensure!(
            said.contains(&lab.a.host_side) && said.contains("endpoint add"),
            "{said}"
        );
        // The pod gets its policy back when its endpoint is added again.
        lab.add_endpoint(&lab.a, WEB)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(ALLOWED))?;
        lab.a.expect_open(at(web4(ALLOWED), 80))?;
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        let (sent, echoed) = shut.finish();
        ensure!(
            sent > 0 && echoed == 0,
            "{echoed} of {sent} datagrams passed"
        );
        eventually("nothing is said of it any more", SOON, || {
            let said = problems(lab)?;
            ensure!(!said.contains(&lab.a.host_side), "{said}");
            Ok(())
        })
    });
}

#[test]
fn a_pipe_in_the_place_of_a_state_file_does_not_stop_the_start() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(ALLOWED)], 600);
        let programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(ALLOWED))?;
        let clean = ["fqdn", "cache", "clean", "--matchpattern", "absent.test"];
        lab.agent(&clean)?;
        let id = lab.endpoint_id(&lab.a)?;
        let state = lab.directory().join("state");
        let file = state.join(format!("state/{id}/ep_config.json"));
        eventually("the name is on disk", SOON, || {
            ensure!(fs::read_to_string(&file)?.contains("www.good.test"));
            Ok(())
        })?;
        let mut agent = programs.agent;
        let shut = lab.a.datagrams(at(web4(DENIED), UDP_PORT))?;
        let mut all = files(&state)?;
        // The agent reads neither of these files when it starts.
        all.retain(|path| !path.ends_with("agent.lock") && !path.ends_with("owner.json"));
        ensure!(all.len() > 5, "{all:?}");
        for path in all {
            let name = path.file_name().context("name")?.to_string_lossy();
            agent.kill_9()?;
            fs::remove_file(&path)?;
            pipe(&path)?;
            // A pipe is also at the temporary name of the next write.
            let new = path.with_file_name(format!("{name}.new"));
            pipe(&new)?;
            agent = lab
                .start_agent(&AgentOptions::default())
                .with_context(|| format!("a pipe as {}", path.display()))?;
            let said = problems(lab)?;
            ensure!(said.contains(&*name), "{} is not named: {said}", name);
            lab.a.expect_closed(at(web4(DENIED), 80))?;
            let _written = fs::remove_file(&new);
        }
        let (sent, echoed) = shut.finish();
        ensure!(
            sent > 0 && echoed == 0,
            "{echoed} of {sent} datagrams passed"
        );
        Ok(())
    });
}
