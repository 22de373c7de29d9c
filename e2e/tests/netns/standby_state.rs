//! A state directory that is full, read-only or damaged beside a standby, and an owner of another release: the standby
//! takes over, or says why not. Nothing opens.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::process::Program;
use holdfast_e2e::small_disk::SmallDisk;
use holdfast_e2e::standby::{
    LOOKS_FIRST, TAKING_OVER, edit_owner_file, expect_as_before, expect_owner, has_looked,
    owner_of_a_name, second, standing_by,
};
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, shell, with_lab};

const SOON: Duration = Duration::from_secs(15);

fn options() -> AgentOptions {
    AgentOptions::default().flag("--standby")
}

fn start(lab: &Lab) -> Result<(Program, Program)> {
    lab.zone.set("new.good.test", &[web4(11)], 600);
    owner_of_a_name(lab, &options())
}

fn expect_new_name(lab: &Lab) -> Result<()> {
    eventually("a new name opens", SOON, || {
        lab.a
            .ask(&Query::a("new.good.test", DNS4))?
            .expect(web4(11))?;
        lab.a.expect_open(at(web4(11), 80))
    })
}

#[test]
fn a_standby_takes_over_on_a_full_disk() {
    with_lab(|lab| {
        let disk = SmallDisk::at(&lab.directory().join("state"))?;
        let (owner, _proxy) = start(lab)?;
        let standby = standing_by(lab, "standby", &options())?;
        disk.fill()?;
        owner.kill_9()?;
        expect_owner(lab, &standby)?;
        expect_as_before(lab)?;
        // The file that it could not write is not one of the owner before.
        let file = lab.directory().join("state/owner.json");
        eventually("there is no file of the owner before", SOON, || {
            ensure!(!file.exists(), "{}", fs::read_to_string(&file)?);
            Ok(())
        })?;
        let next = standing_by(lab, "next", &options())?;
        standby.kill_9()?;
        expect_owner(lab, &next)?;
        ensure!(next.log().contains(LOOKS_FIRST), "{}", next.log());
        expect_as_before(lab)?;
        disk.empty()?;
        expect_new_name(lab)
    });
}

/// A directory that cannot be written through its path. Files that are open stay as they are.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn at(path: &Path) -> Result<Self> {
        let text = path.display().to_string();
        shell::run("mount", &["--bind", &text, &text])?;
        let mounted = Self(path.to_owned());
        shell::run("mount", &["-o", "remount,bind,ro", &text])?;
        Ok(mounted)
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let path = self.0.display().to_string();
        if let Err(error) = shell::run("umount", &["-l", &path]) {
            eprintln!("left behind: {path}: {error:#}");
        }
    }
}

#[test]
fn a_standby_on_a_read_only_state_directory_says_so_and_ends() {
    with_lab(|lab| {
        let (owner, _proxy) = start(lab)?;
        let mut standby = standing_by(lab, "standby", &options())?;
        let read_only = ReadOnly::at(&lab.directory().join("state"))?;
        owner.kill_9()?;
        let status = standby.wait(SOON)?;
        ensure!(!status.success(), "it ended well");
        for part in ["agent.lock", "Read-only file system", "--state-dir"] {
            ensure!(standby.log().contains(part), "{part}: {}", standby.log());
        }
        expect_as_before(lab)?;
        drop(read_only);
        let next = lab.start_agent(&options())?;
        expect_owner(lab, &next)?;
        expect_as_before(lab)?;
        expect_new_name(lab)
    });
}

#[test]
fn a_standby_takes_over_with_damaged_files() {
    with_lab(|lab| {
        let (owner, _proxy) = start(lab)?;
        let standby = standing_by(lab, "standby", &options())?;
        let state = lab.directory().join("state");
        let id = lab.endpoint_id(&lab.a)?;
        let damaged = [
            "owner.json".to_owned(),
            "state/epoch.json".to_owned(),
            "state/local_allocator_state.json".to_owned(),
            format!("state/{id}/ep_config.json"),
        ];
        owner.signal(nix::sys::signal::Signal::SIGSTOP)?;
        for file in &damaged {
            ensure!(state.join(file).exists(), "{file} is not there");
            fs::write(state.join(file), "{\"version\":")?;
        }
        ensure!(!standby.log().contains(TAKING_OVER), "{}", standby.log());
        owner.kill_9()?;
        expect_owner(lab, &standby)?;
        ensure!(standby.log().contains(LOOKS_FIRST), "{}", standby.log());
        lab.a.expect_closed(at(web4(12), 80))?;
        for file in &damaged[1..] {
            lab.status_has(SOON, &[file.as_str()])?;
        }
        expect_new_name(lab)
    });
}

#[test]
fn an_owner_of_an_earlier_format_has_a_standby_and_one_of_a_later_format_has_none() {
    with_lab(|lab| {
        let (owner, _proxy) = start(lab)?;
        // The fields that an earlier build does not write.
        edit_owner_file(lab, |file| {
            if let Some(fields) = file.as_object_mut() {
                fields.remove("run");
                fields.remove("takeovers");
            }
        })?;
        let standby = standing_by(lab, "earlier", &options())?;
        owner.kill_9()?;
        expect_owner(lab, &standby)?;
        ensure!(standby.log().contains(LOOKS_FIRST), "{}", standby.log());
        expect_as_before(lab)?;
        has_looked(lab)?;

        // One waits already, and one starts.
        let waiting = standing_by(lab, "waiting", &options())?;
        edit_owner_file(lab, |file| file["version"] = 2.into())?;
        for mut refused in [waiting, second(lab, "refused", &options())?] {
            let status = refused.wait(SOON)?;
            ensure!(!status.success(), "it ended well");
            for part in ["owner.json", "has version 2", "run the newer release"] {
                ensure!(refused.log().contains(part), "{part}: {}", refused.log());
            }
            ensure!(!refused.log().contains(TAKING_OVER), "{}", refused.log());
        }
        // The owner goes on.
        expect_owner(lab, &standby).context("the owner")?;
        expect_as_before(lab)?;
        expect_new_name(lab)
    });
}
