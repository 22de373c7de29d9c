//! A policy or endpoint document that cannot be read, or a missing directory of documents, opens no
//! pod: what was read last stays in force, and `status` names what to repair.
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{UDP_PORT, at, web4};
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Pod, eventually, with_lab};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

const SOON: Duration = Duration::from_secs(20);

/// Server that no policy here allows.
const DENIED: u8 = 12;

/// What can stand in a file's place.
#[derive(Clone, Copy, Debug)]
enum Other {
    /// What a runtime makes for a bind mount of a missing file.
    Directory,
    Pipe,
    Socket,
    Device,
    DanglingLink,
    LinkToDirectory,
    Loop,
}

const OTHERS: [Other; 7] = [
    Other::Directory,
    Other::Pipe,
    Other::Socket,
    Other::Device,
    Other::DanglingLink,
    Other::LinkToDirectory,
    Other::Loop,
];

impl Other {
    /// Replaces what is at `path` in one step, as far as the kernel allows it.
    fn replace(self, path: &Path) -> Result<()> {
        let new = path.with_extension("other");
        match self {
            Self::Directory => fs::create_dir(&new)?,
            Self::Pipe => mkfifo(&new, Mode::from_bits_truncate(0o600))?,
            Self::Socket => drop(UnixListener::bind(&new)?),
            Self::Device => symlink("/dev/zero", &new)?,
            Self::DanglingLink => symlink("absent", &new)?,
            Self::LinkToDirectory => symlink("/proc", &new)?,
            Self::Loop => symlink(path.file_name().context("name")?, &new)?,
        }
        if matches!(self, Self::Directory) {
            fs::remove_file(path)?;
        }
        Ok(fs::rename(&new, path)?)
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => Ok(fs::remove_dir_all(path)?),
        false => Ok(fs::remove_file(path)?),
    }
}

/// Writes a file in one step, with the temporary file out of the way of the agent.
fn write(lab: &Lab, path: &Path, text: &str) -> Result<()> {
    let new = lab.directory().join("written.new");
    fs::write(&new, text)?;
    Ok(fs::rename(&new, path)?)
}

fn only_web10() -> String {
    egress("web", "web", &cidr("203.0.113.10/32"))
}

fn endpoint(pod: &Pod) -> String {
    format!("netns: {}\nlabels: [{WEB}]\n", pod.netns.name())
}

fn expect_closed(lab: &Lab) -> Result<()> {
    lab.a.expect_open(at(web4(10), 80))?;
    lab.a.expect_closed(at(web4(DENIED), 80))
}

/// Waits until `status`, or a list of refused policies that it refers to, has these words.
fn named(lab: &Lab, words: &[&str]) -> Result<()> {
    eventually("it is named", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let policies = lab.agent_json(&["policy", "get"])?;
        let said = format!("{} {}", status["problems"], policies["rejected"]);
        for word in words {
            ensure!(said.contains(word), "does not name {word}: {said}");
        }
        Ok(())
    })
}

/// Waits until neither `status` nor that list names a document or a directory of documents.
fn unnamed(lab: &Lab) -> Result<()> {
    eventually("no problem is left", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let policies = lab.agent_json(&["policy", "get"])?;
        let said = format!("{} {}", status["problems"], policies["rejected"]);
        let dir = lab.directory().display().to_string();
        ensure!(!said.contains(".yaml") && !said.contains(&dir), "{said}");
        Ok(())
    })
}

fn opens(lab: &Lab) -> Result<()> {
    eventually("the pod is open", SOON, || {
        lab.a.expect_open(at(web4(DENIED), 80))
    })
}

#[test]
fn a_document_that_is_another_kind_of_file_keeps_its_last_version() {
    with_lab(|lab| {
        let policy = lab.policy_dir().join("web.yaml");
        let pods = lab.directory().join("endpoints/pods.yaml");
        lab.write_policy("web.yaml", &only_web10())?;
        write(lab, &pods, &endpoint(&lab.a))?;
        let mut agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.a)?;
        eventually("policy is in force", SOON, || expect_closed(lab))?;
        let shut = lab.a.datagrams(at(web4(DENIED), UDP_PORT))?;
        for other in OTHERS {
            let while_it_is_so = |path: &Path, name: &str| -> Result<()> {
                named(lab, &[name]).with_context(|| format!("{other:?} as {}", path.display()))?;
                expect_closed(lab).with_context(|| format!("{other:?} as {}", path.display()))
            };
            other.replace(&policy)?;
            while_it_is_so(&policy, "web.yaml")?;
            other.replace(&pods)?;
            while_it_is_so(&pods, "pods.yaml")?;
            // After a restart, the agent reads the documents for the first time.
            agent.kill_9()?;
            agent = lab.start_agent(&AgentOptions::default())?;
            while_it_is_so(&policy, "web.yaml")?;
            while_it_is_so(&pods, "pods.yaml")?;
            for (path, text) in [(&policy, only_web10()), (&pods, endpoint(&lab.a))] {
                if path.symlink_metadata()?.is_dir() {
                    fs::remove_dir(path)?;
                }
                write(lab, path, &text)?;
            }
            unnamed(lab)?;
        }
        let (sent, echoed) = shut.finish();
        ensure!(
            sent > 0 && echoed == 0,
            "{echoed} of {sent} datagrams passed"
        );
        // A document that is deleted has no effect any more.
        remove(&policy)?;
        opens(lab)
    });
}

/// A file system on a directory, unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn on(dir: &Path) -> Result<Self> {
        mount(
            Some("tmpfs"),
            dir,
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )?;
        Ok(Self(dir.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _unmounted = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_directory_that_is_unmounted_or_replaced_keeps_what_it_had() {
    with_lab(|lab| {
        let (policies, endpoints) = (lab.policy_dir(), lab.directory().join("endpoints"));
        let mounts = [Mounted::on(&policies)?, Mounted::on(&endpoints)?];
        fs::write(policies.join("web.yaml"), only_web10())?;
        fs::write(endpoints.join("pods.yaml"), endpoint(&lab.a))?;
        let mut agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.a)?;
        eventually("policy is in force", SOON, || expect_closed(lab))?;
        let shut = lab.a.datagrams(at(web4(DENIED), UDP_PORT))?;

        // Unmounted: the directory below is empty.
        drop(mounts);
        let both = [
            policies.display().to_string(),
            endpoints.display().to_string(),
        ];
        let both: Vec<&str> = both.iter().map(String::as_str).collect();
        named(lab, &both)?;
        expect_closed(lab)?;
        // The agent starts before the file systems are mounted again.
        for _ in 0..2 {
            agent.kill_9()?;
            agent = lab.start_agent(&AgentOptions::default())?;
            named(lab, &both)?;
            expect_closed(lab)?;
        }

        // A file replaces the directory, and then nothing is there. (An agent would not start with either.)
        for dir in [&policies, &endpoints] {
            fs::remove_dir(dir)?;
            fs::write(dir, "")?;
        }
        named(lab, &both)?;
        expect_closed(lab)?;
        for dir in [&policies, &endpoints] {
            fs::remove_file(dir)?;
        }
        named(lab, &both)?;
        expect_closed(lab)?;

        // The directories are back, and then their documents.
        for dir in [&policies, &endpoints] {
            fs::create_dir(dir)?;
        }
        named(lab, &both)?;
        fs::write(policies.join("web.yaml"), only_web10())?;
        fs::write(endpoints.join("pods.yaml"), endpoint(&lab.a))?;
        unnamed(lab)?;
        expect_closed(lab)?;
        let (sent, echoed) = shut.finish();
        ensure!(
            sent > 0 && echoed == 0,
            "{echoed} of {sent} datagrams passed"
        );
        // A file is deleted from the directory that the agent reads.
        fs::remove_file(policies.join("web.yaml"))?;
        opens(lab)
    });
}

/// An administrator replaces the directory by another one without documents, and says so.
#[test]
fn an_empty_document_confirms_that_the_others_are_gone() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &only_web10())?;
        write(
            lab,
            &lab.directory().join("endpoints/pods.yaml"),
            &endpoint(&lab.a),
        )?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.a)?;
        eventually("policy is in force", SOON, || expect_closed(lab))?;
        let policies = lab.policy_dir();
        fs::rename(&policies, lab.directory().join("former"))?;
        fs::create_dir(&policies)?;
        named(lab, &[&policies.display().to_string(), "none.yaml"])?;
        expect_closed(lab)?;
        fs::write(policies.join("none.yaml"), "---\n")?;
        opens(lab)
    });
}
