//! Machines of systemd-nspawn on a bridge of the lab's node.
//!
//! ```text
//!  systemd-nspawn ─► interface vb-NAME, port of the bridge
//!       └► first process: sets its address, then sends at once ─► world: Sent
//! ```

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::image;
use crate::bridge::Bridge;
use crate::lab::Lab;
use crate::process::Program;

const ENDS: Duration = Duration::from_secs(20);

/// A machine with its own address on a bridge.
#[derive(Debug)]
pub struct Machine<'l> {
    lab: &'l Lab,
    name: String,
    bridge: String,
    root: PathBuf,
}

impl<'l> Machine<'l> {
    /// Makes the root directory of a machine with the address 10.88.0.`host`.
    pub fn new(lab: &'l Lab, bridge: &Bridge<'_>, name: &str, host: u8) -> Result<Self> {
        let home = lab.directory().join("nspawn");
        std::fs::create_dir_all(&home)?;
        let root = home.join(name);
        for part in ["bin", "etc", "usr"] {
            std::fs::create_dir_all(root.join(part))?;
        }
        std::fs::copy(image::first_process(&home)?, root.join("first-process"))?;
        std::fs::copy("/bin/busybox", root.join("bin/busybox"))?;
        for applet in ["sh", "ip"] {
            symlink("busybox", root.join("bin").join(applet))?;
        }
        let init = root.join("init");
        std::fs::write(
            &init,
            format!(
                "#!/bin/sh\nip address add 10.88.0.{host}/24 dev host0\nip link set host0 up\n\
                 ip route add default via 10.88.0.1\nexec /first-process\n"
            ),
        )?;
        std::fs::set_permissions(&init, std::fs::Permissions::from_mode(0o755))?;
        Ok(Self {
            lab,
            name: name.to_owned(),
            bridge: bridge.name().to_owned(),
            root,
        })
    }

    /// Starts the machine. It ends when the result is dropped.
    pub fn start(&self) -> Result<Running> {
        let mut command = self.lab.node.command("systemd-nspawn");
        command.args(["--quiet", "--register=no", "--keep-unit", "--console=pipe"]);
        command.arg(format!("--machine={}", self.name));
        command.arg(format!("--network-bridge={}", self.bridge));
        command.arg(format!("--directory={}", self.root.display()));
        command.arg("/init");
        let log = self.lab.directory().join(format!("log/{}.log", self.name));
        let program = Program::start(&self.name, command, &log)?;
        Ok(Running(program))
    }
}

/// A machine that runs.
#[derive(Debug)]
pub struct Running(Program);

impl Running {
    /// Ends the machine, and waits until it has ended.
    pub fn stop(self) -> Result<()> {
        self.0.terminate(ENDS).map(drop)
    }
}
