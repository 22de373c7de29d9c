//! Restrictions of the process once its sockets exist: an ordinary user, few
//! capabilities, few files, few system calls.
//!
//! Call [`Sandbox::enter`] before the first thread starts: credentials, capabilities and Landlock
//! are per thread, and threads inherit them. Sockets that share a port with root's sockets must be
//! *made* before the call, because the kernel compares their creators. They may be bound later.

mod calls;
mod capabilities;
mod directory;
mod files;

use std::{fmt, path::PathBuf, str::FromStr};

use caps::Capability;
use daemon::unix_socket::PROXY_ID;
use nix::unistd::{Gid, Uid};
use serde::{Deserialize, Serialize};

/// User of the process once everything that needs root is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunAs {
    /// The user that started the process, without any restriction.
    Unchanged,
    /// This user and group, with only the capabilities that the proxy needs.
    User { uid: u32, gid: u32 },
}

impl RunAs {
    /// Group id: the given one, or the present effective group.
    pub fn group(self) -> u32 {
        match self {
            Self::Unchanged => Gid::effective().as_raw(),
            Self::User { gid, .. } => gid,
        }
    }
}

impl Default for RunAs {
    fn default() -> Self {
        Self::User {
            uid: PROXY_ID,
            gid: PROXY_ID,
        }
    }
}

impl FromStr for RunAs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "root" {
            return Ok(Self::Unchanged);
        }
        let wrong = || format!("{text:?} is not a user: write UID, UID:GID, or root to stay root");
        let (uid, gid) = text.split_once(':').unwrap_or((text, text));
        let uid = uid.parse().map_err(|_| wrong())?;
        let gid = gid.parse().map_err(|_| wrong())?;
        if uid == 0 {
            return Err(format!("{text:?}: to stay root, write root"));
        }
        Ok(Self::User { uid, gid })
    }
}

impl fmt::Display for RunAs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unchanged => f.write_str("root"),
            Self::User { uid, gid } => write!(f, "{uid}:{gid}"),
        }
    }
}

/// Why the process cannot be restricted.
#[derive(Debug, thiserror::Error)]
#[error("--user {user}: {what}: {reason}; `--user root` runs without these restrictions")]
pub struct PrivilegeError {
    user: RunAs,
    what: String,
    reason: String,
}

/// User and directories to which [`Sandbox::enter`] restricts the process.
#[derive(Clone, Debug, Default)]
pub struct Sandbox {
    /// User and group to change to.
    pub user: RunAs,
    /// Directories whose files the process reads later.
    pub readable: Vec<PathBuf>,
    /// Directories in which the process makes, writes and removes files. They are made if they are
    /// missing, and given to the user.
    pub writable: Vec<PathBuf>,
    /// Directories in which the process makes files and appends to them. Only missing directories
    /// are made and given to the user, because existing ones may belong to others.
    pub appendable: Vec<PathBuf>,
}

/// Restrictions of the process that are in force, for `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Privileges {
    /// Id of the effective user.
    pub uid: u32,
    /// Id of the effective group.
    pub gid: u32,
    /// Effective capabilities, by the kernel's names.
    pub capabilities: Vec<String>,
    /// Whether Landlock limits which files can be opened; `None` if no restriction was requested.
    pub files: Option<bool>,
    /// Whether the kernel refuses the system calls that the process never needs.
    pub calls: bool,
    /// Capabilities that only older kernels need: CAP_BPF to open a pinned map (before Linux 5.19),
    /// CAP_NET_ADMIN to mark a socket (before 5.17).
    pub for_kernel: Vec<String>,
}

impl Privileges {
    /// The privileges as one line for a terminal.
    pub fn text(&self) -> String {
        let capabilities = if self.capabilities.is_empty() {
            "no capabilities".to_owned()
        } else {
            self.capabilities.join(" ")
        };
        let for_kernel = if self.for_kernel.is_empty() {
            String::new()
        } else {
            format!(
                " ({} only because this kernel is old)",
                self.for_kernel.join(" ")
            )
        };
        let files = match self.files {
            None => "not restricted",
            Some(true) => "only its own files",
            Some(false) => "all files (this kernel cannot restrict them: no Landlock)",
        };
        let calls = if self.calls { "filtered" } else { "all" };
        format!(
            "uid {} gid {}, {capabilities}{for_kernel}, {files}, system calls {calls}",
            self.uid, self.gid
        )
    }
}

impl Sandbox {
    /// Restricts the calling thread, and the threads that it starts. A process that was not started
    /// as root keeps its user and gets the other restrictions.
    pub fn enter(&self) -> Result<Privileges, PrivilegeError> {
        let RunAs::User { uid, gid } = self.user else {
            // An earlier run may have given the directories to another user, who could exchange
            // what root makes in them.
            let root = Uid::effective()
                .is_root()
                .then(|| (Uid::effective(), Gid::effective()));
            self.prepare(root);
            return Ok(in_force(None, false, &[]));
        };
        let failed = |what: &str, reason: &dyn fmt::Display| PrivilegeError {
            user: self.user,
            what: what.to_owned(),
            reason: reason.to_string(),
        };
        let as_root = Uid::effective().is_root();
        let (user, group) = (Uid::from_raw(uid), Gid::from_raw(gid));
        self.prepare(as_root.then_some((user, group)));
        let for_kernel = if as_root {
            capabilities::needed_by_kernel()
        } else {
            Vec::new()
        };
        if as_root {
            capabilities::become_user(user, group, &for_kernel)
                .map_err(|e| failed("cannot change to it", &e))?;
        }
        nix::sys::prctl::set_no_new_privs().map_err(|e| failed("cannot set no_new_privs", &e))?;
        let files = files::restrict(&self.readable, &self.writable, &self.appendable)
            .map_err(|e| failed("cannot restrict files", &e))?;
        calls::restrict().map_err(|e| failed("cannot filter system calls", &e))?;
        Ok(in_force(Some(files), true, &for_kernel))
    }

    fn prepare(&self, owner: Option<(Uid, Gid)>) {
        let missing = self.appendable.iter().filter(|dir| !dir.exists());
        for dir in self.writable.iter().chain(missing) {
            if let Err(error) = directory::prepare(dir, owner) {
                // The part of the proxy that needs the directory reports what fails without it.
                tracing::warn!(dir = %dir.display(), %error, "cannot prepare the directory");
            }
        }
    }
}

fn in_force(files: Option<bool>, calls: bool, for_kernel: &[Capability]) -> Privileges {
    Privileges {
        uid: Uid::effective().as_raw(),
        gid: Gid::effective().as_raw(),
        capabilities: capabilities::effective(),
        files,
        calls,
        for_kernel: for_kernel.iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_that_stays_root_gets_its_directories_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let (journal, log) = (dir.path().join("a/journal"), dir.path().join("log"));
        let sandbox = Sandbox {
            user: RunAs::Unchanged,
            writable: vec![journal.clone()],
            appendable: vec![log.clone()],
            ..Sandbox::default()
        };
        sandbox.enter().expect("no restriction");
        assert!(journal.is_dir() && log.is_dir());
    }

    #[test]
    fn users_are_numbers_or_root() {
        let user = |uid, gid| Ok(RunAs::User { uid, gid });
        assert_eq!("1000".parse(), user(1000, 1000));
        assert_eq!("1000:5".parse(), user(1000, 5));
        assert_eq!("root".parse(), Ok(RunAs::Unchanged));
        for bad in ["", "0", "0:5", "nobody", "1:", "-1"] {
            assert!(bad.parse::<RunAs>().is_err(), "{bad:?} was taken");
        }
        for text in ["10094:10094", "root"] {
            let parsed: RunAs = text.parse().expect("a user");
            assert_eq!(parsed.to_string(), text);
        }
    }
}
