//! A containerd of our own, apart from the machine's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::text;
use crate::process;

const STARTS_WITHIN: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// This snapshotter copies layers, so it works on every file system.
const SNAPSHOTTER: &str = "native";

/// A running containerd, which ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Containerd {
    process: Child,
    socket: PathBuf,
    home: PathBuf,
}

impl Containerd {
    /// Starts containerd with all of its files in `home`.
    pub(crate) fn start(home: &Path) -> Result<Self> {
        if home.exists() {
            fs::remove_dir_all(home)?;
        }
        fs::create_dir_all(home)?;
        let socket = home.join("containerd.sock");
        let path = text(home)?;
        let config = format!(
            "version = 2\nroot = \"{path}/root\"\nstate = \"{path}/state\"\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
             [grpc]\naddress = \"{path}/containerd.sock\"\n\
             [ttrpc]\naddress = \"{path}/containerd.sock.ttrpc\"\n"
        );
        fs::write(home.join("config.toml"), config)?;
        let log = fs::File::create(home.join("log"))?;
        let process = Command::new("containerd")
            .arg("-c")
            .arg(home.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start containerd")?;
        let mut started = Self {
            process,
            socket,
            home: home.to_owned(),
        };
        started.wait()?;
        Ok(started)
    }

    fn wait(&mut self) -> Result<()> {
        let deadline = Instant::now() + STARTS_WITHIN;
        while Instant::now() < deadline {
            if let Some(status) = self.process.try_wait()? {
                bail!(
                    "containerd ended ({status}): see {}/log",
                    self.home.display()
                );
            }
            if process::succeeds(self.ctr(&["version"])) {
                return Ok(());
            }
            thread::sleep(POLL_INTERVAL);
        }
        bail!(
            "containerd does not answer: see {}/log",
            self.home.display()
        )
    }

    pub(crate) fn import(&self, archive: &Path) -> Result<()> {
        let mut import = self.ctr(&["images", "import", "--snapshotter", SNAPSHOTTER]);
        import.arg(archive);
        process::output(import).map(drop)
    }

    /// Runs a program of an image. Returns its standard output.
    pub(crate) fn run(&self, image: &str, line: &[&str]) -> Result<String> {
        let mut run = self.ctr(&["run", "--rm", "--snapshotter", SNAPSHOTTER, image, "check"]);
        run.args(line);
        process::output(run)
    }

    fn ctr(&self, args: &[&str]) -> Command {
        let mut command = process::command("ctr", &["--address"]);
        command.arg(&self.socket).args(args);
        command
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let id = self.process.id().to_string();
        // On SIGTERM, containerd removes its mounts.
        let asked = process::succeeds(process::command("kill", &[&id]));
        let ended = if asked {
            self.process.wait()
        } else {
            self.process.kill().and_then(|()| self.process.wait())
        };
        if let Err(error) = ended {
            eprintln!("warning: containerd (process {id}) did not end: {error}");
        }
    }
}
