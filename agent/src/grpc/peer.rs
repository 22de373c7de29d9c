//! Who is at the other end of a unix socket.

use std::{
    io,
    os::{fd::OwnedFd, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use daemon::{
    guests::{Activity, Guests},
    link_stream::LinkStream,
    peer::{Peer as Who, process_of},
    unix_socket,
};
use tokio::net::{UnixListener, UnixStream};

use super::bounded::Bounded;

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process accepts connections on it.
    #[error("{0} is served by another process; stop it, or choose another path")]
    InUse(PathBuf),
    /// The path is that of a directory.
    #[error(
        "{path} is a directory; give the path of a socket in it, for example {path}/holdfast.sock",
        path = .0.display()
    )]
    Directory(PathBuf),
    #[error("{path}: {call}: {source}", path = .path.display())]
    Io {
        /// The socket, or its directory.
        path: PathBuf,
        /// The system call or step that failed, as text.
        call: &'static str,
        source: io::Error,
    },
}

/// Which users may connect to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Group whose members may connect, besides root and the agent's own user.
    pub group: Option<u32>,
}

impl Allowed {
    fn admits(self, uid: u32, gid: u32) -> bool {
        uid == 0 || uid == nix::unistd::geteuid().as_raw() || self.group == Some(gid)
    }
}

/// Binds a socket for root only, if a path is given.
pub(crate) fn bind_some(path: Option<PathBuf>) -> Result<Option<UnixListener>, SocketError> {
    path.map(|path| bind(&path, None)).transpose()
}

/// Binds a unix socket of mode 0660 in a directory of mode 0750. Replaces a socket on which no process listens.
pub fn bind(path: &Path, group: Option<u32>) -> Result<UnixListener, SocketError> {
    let failed = |path: &Path, call| {
        let path = path.to_owned();
        move |source| SocketError::Io { path, call, source }
    };
    let group = group.map(nix::unistd::Gid::from_raw);
    if let Some(dir) = path.parent().filter(|dir| !dir.exists()) {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(dir)
            .map_err(failed(dir, "creating the directory"))?;
        if group.is_some() {
            nix::unistd::chown(dir, None, group)
                .map_err(io::Error::from)
                .map_err(failed(dir, "giving the directory to --sdp-group"))?;
        }
    }
    if path.is_dir() {
        return Err(SocketError::Directory(path.to_owned()));
    }
    match unix_socket::connect_now(path) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            return Err(SocketError::InUse(path.to_owned()));
        }
        Ok(_) => return Err(SocketError::InUse(path.to_owned())),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(failed(path, "removing the unserved socket"))?;
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(path, "looking who serves it")(e)),
    }
    let listener = UnixListener::bind(path).map_err(failed(path, "binding"))?;
    unix_socket::share(path, group.map(nix::unistd::Gid::as_raw)).map_err(failed(
        path,
        "setting mode 0660 and the group of --sdp-group",
    ))?;
    Ok(listener)
}

/// The process at the other end of a connection, with data from its Hello.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Process id from `SO_PEERCRED`: 0 if the process is in a PID namespace that this one does not
    /// see. `None` = unknown.
    pub pid: Option<i32>,
    /// The same process, as a descriptor that is readable once the process has ended.
    pub process: Option<Arc<OwnedFd>>,
    /// The identity of the peer, by which limits count its connections.
    pub who: Who,
    /// Whether the peer's connection has requests.
    pub activity: Activity,
    instance: Arc<OnceLock<String>>,
    other_state_dir: Arc<OnceLock<String>>,
}

impl Peer {
    /// Id of the peer's process. The kernel gives 0 for a process of a pid namespace that this one does not see
    /// (unix(7), SO_PEERCRED).
    pub fn visible_pid(&self) -> Option<i32> {
        self.pid.filter(|pid| *pid > 0)
    }

    /// Name that the peer gave in its Hello, or `pid-N`.
    pub fn instance(&self) -> String {
        match (self.instance.get(), self.visible_pid()) {
            (Some(name), _) => name.clone(),
            (None, Some(pid)) => format!("pid-{pid}"),
            (None, None) => "unknown".to_owned(),
        }
    }

    /// Takes the name from the peer's Hello; the first one counts.
    pub fn named(&self, instance: &str) {
        if !instance.is_empty() {
            let _kept = self.instance.set(shown(instance, 64));
        }
    }

    /// Takes the state directory from the peer's first Hello, if it is not the agent's.
    pub(super) fn has_state_dir(&self, dir: &Path) {
        let text = shown(&dir.to_string_lossy(), 256);
        let _kept = self.other_state_dir.set(text);
    }

    /// The peer's state directory, if it is not the agent's.
    pub(super) fn other_state_dir(&self) -> Option<&str> {
        self.other_state_dir.get().map(String::as_str)
    }
}

/// The first characters of a text, for terminals.
fn shown(text: &str, length: usize) -> String {
    let first = text.chars().take(length);
    first
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// A connection of a proxy that counts against the limit.
pub(super) type ProxyConnection = Bounded<LinkStream, Peer>;

/// A connection whose peer may be served, before it counts against the limit.
#[derive(Debug)]
pub(super) struct Checked {
    stream: UnixStream,
    process: Option<OwnedFd>,
    who: Who,
    pid: Option<i32>,
}

impl Checked {
    /// Checks the credentials of a fresh connection.
    pub(super) fn new(stream: UnixStream, allowed: Allowed) -> io::Result<Self> {
        let credentials = stream.peer_cred()?;
        if !allowed.admits(credentials.uid(), credentials.gid()) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "uid {} gid {} may not connect: run it as root, or in the group of --sdp-group",
                    credentials.uid(),
                    credentials.gid()
                ),
            ));
        }
        // Without the descriptor, the end of the process is not seen.
        let process = process_of(&stream);
        Ok(Self {
            who: Who::named(&stream, process.as_ref()),
            pid: credentials.pid(),
            stream,
            process,
        })
    }

    /// Registers the connection with `guests`, which may close an older one for it.
    pub(super) fn admit(self, guests: &Guests<Who>) -> io::Result<ProxyConnection> {
        let stream = LinkStream::new(self.stream)?;
        let guest = guests.admit(self.who);
        let peer = Peer {
            pid: self.pid,
            process: self.process.map(Arc::new),
            who: self.who,
            activity: guest.activity(),
            instance: Arc::default(),
            other_state_dir: Arc::default(),
        };
        Ok(Bounded::new(stream, peer, guest))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn root_the_agents_user_and_the_group_are_admitted() {
        let own = nix::unistd::geteuid().as_raw();
        let stranger = own + 1;
        let open = Allowed { group: Some(4711) };
        let closed = Allowed { group: None };
        assert!(closed.admits(0, 4712) && closed.admits(own, 4712));
        assert!(open.admits(stranger, 4711));
        assert!(!open.admits(stranger, 4712));
        assert!(!closed.admits(stranger, 4711));
    }

    #[tokio::test]
    async fn a_socket_left_by_a_dead_agent_is_taken_over_a_served_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/x.sock");
        drop(bind(&path, None).unwrap());
        assert!(path.exists());
        let _served = bind(&path, None).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o660);
        assert_eq!(mode(path.parent().unwrap()), 0o750);
        assert!(matches!(bind(&path, None), Err(SocketError::InUse(_))));
        let error = bind(dir.path(), None).unwrap_err().to_string();
        assert!(error.contains("is a directory; give the path"), "{error}");
    }
}
