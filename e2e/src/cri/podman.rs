//! Debian's podman on the lab's node, with its own store.
//!
//! ```text
//!  podman ─► netavark ─► bridge podman1 of the node
//!     └► conmon ─► runc ─► createRuntime: holdfast-agent oci-hook ─► agent
//!                     └► first process, which sends at once ─► world: Sent
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use super::image;
use crate::lab::Lab;
use crate::node::AgentOptions;
use crate::process::Program;
use crate::{config, shell};

/// Containers of podman, which all end when this is dropped.
#[derive(Debug)]
pub struct Podman<'l> {
    lab: &'l Lab,
    home: PathBuf,
}

impl<'l> Podman<'l> {
    /// Makes the store, the hook and the image.
    pub fn new(lab: &'l Lab) -> Result<Self> {
        let home = lab.directory().join("podman");
        for part in ["hooks", "networks"] {
            std::fs::create_dir_all(home.join(part))?;
        }
        let podman = Self { lab, home };
        std::fs::write(podman.settings(), podman.configuration())?;
        let (root, run) = (podman.root(), podman.home.join("run"));
        let storage =
            format!("[storage]\ndriver = \"vfs\"\ngraphroot = {root:?}\nrunroot = {run:?}\n");
        std::fs::write(podman.home.join("storage.conf"), storage)?;
        podman.write_hook()?;
        let archive = image::archive(&podman.home)?;
        podman.run(&["load", "--quiet", "--input", path(&archive)?])?;
        Ok(podman)
    }

    /// Starts the agent, which reads names of containers from this store.
    pub fn start_agent(&self, options: AgentOptions) -> Result<Program> {
        let root = format!("--podman-root={}", path(&self.root())?);
        self.lab.start_agent(&options.flag(&root))
    }

    /// Writes a document about a container.
    pub fn describe(&self, file: &str, name: &str, further: &str) -> Result<()> {
        let document = format!("container: podman/{name}\nlabels: [k8s:app=web]\n{further}");
        Ok(std::fs::write(
            self.lab.directory().join("endpoints").join(file),
            document,
        )?)
    }

    /// Runs a container of the image in the background.
    pub fn start(&self, name: &str, further: &[&str]) -> Result<String> {
        let begin = ["run", "--detach", "--name", name];
        self.run(&[&begin[..], further, &[image::NAME]].concat())
    }

    /// Runs a command of podman, and returns its output.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        shell::finish(self.command()?.args(arguments))
    }

    /// A command of podman in the node's network.
    pub fn command(&self) -> Result<Command> {
        let mut command = self.lab.node.command("podman");
        command.env("CONTAINERS_CONF", self.settings());
        command.env("CONTAINERS_STORAGE_CONF", self.home.join("storage.conf"));
        for (flag, part) in [
            ("--tmpdir", "tmp"),
            ("--network-config-dir", "networks"),
            ("--hooks-dir", "hooks"),
        ] {
            command.arg(flag).arg(self.home.join(part));
        }
        Ok(command)
    }

    fn root(&self) -> PathBuf {
        self.home.join("root")
    }

    fn settings(&self) -> PathBuf {
        self.home.join("containers.conf")
    }

    fn configuration(&self) -> String {
        // runc works with both versions of cgroups. The limits are the highest that a container
        // inside a container may have.
        "[engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"none\"\n\
         lock_type = \"file\"\n\
         [network]\nnetwork_backend = \"netavark\"\n\
         [containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=4096:4096\"]\n"
            .to_owned()
    }

    /// Writes the hook file of the packages, with the paths of this lab.
    fn write_hook(&self) -> Result<()> {
        let packaged = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/oci-hook.json");
        let mut hook: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(packaged)?)?;
        let program = config::program("holdfast-agent")?;
        let places = [
            ("--admin-socket", self.lab.agent_socket()),
            ("--endpoint-store", self.lab.endpoint_store()),
            ("--podman-root", self.root()),
        ];
        let arguments = hook["hook"]["args"].as_array_mut().context("args")?;
        for (flag, place) in places {
            arguments.extend([json!(flag), json!(path(&place)?)]);
        }
        arguments.extend([json!("--wait"), json!("5s")]);
        hook["hook"]["path"] = json!(path(&program)?);
        std::fs::write(self.home.join("hooks/holdfast.json"), hook.to_string())?;
        Ok(())
    }
}

impl Drop for Podman<'_> {
    fn drop(&mut self) {
        for arguments in [
            &["rm", "--all", "--force", "--time", "0"][..],
            &["network", "prune", "--force"],
        ] {
            if let Err(error) = self.run(arguments) {
                eprintln!("left behind: {error:#}");
            }
        }
    }
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}
