//! Connections to sockets of another user.
//!
//! Root without CAP_DAC_OVERRIDE, as in a container, may not connect to the socket of a proxy that
//! has changed its user. Root may become that user for a moment, as the proxy did.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::Path,
};

use daemon::{command_line::failure, unix_socket};
use nix::unistd::{Gid, Uid, setegid, seteuid};
use tokio::net::UnixStream;

/// Connects to the socket at `path`. If root is not permitted to, it connects as the socket's
/// owner.
pub(super) async fn connect(path: &Path) -> io::Result<UnixStream> {
    match UnixStream::connect(path).await {
        Err(error) if is_refused_root(&error) => {
            let _owner = Owner::become_of(path)?;
            UnixStream::connect(path).await
        }
        other => other,
    }
}

/// Like [`connect`], without an async runtime.
pub(super) fn connect_now(path: &Path) -> io::Result<OwnedFd> {
    match unix_socket::connect_now(path) {
        Err(error) if is_refused_root(&error) => {
            let _owner = Owner::become_of(path)?;
            unix_socket::connect_now(path)
        }
        other => other,
    }
}

fn is_refused_root(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied && Uid::effective().is_root()
}

/// Lets this process act as another user until the value is dropped.
struct Owner {
    group: Gid,
}

impl Owner {
    fn become_of(path: &Path) -> io::Result<Self> {
        let found = fs::symlink_metadata(path)?;
        let before = Self {
            group: Gid::effective(),
        };
        setegid(Gid::from_raw(found.gid()))?;
        seteuid(Uid::from_raw(found.uid()))?;
        Ok(before)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The saved user id is root's, so both calls succeed.
        let restored = seteuid(Uid::from_raw(0)).and_then(|()| setegid(self.group));
        if let Err(errno) = restored {
            let note = format!("cannot become root again: {errno}");
            failure::note("holdfast-sdp", &note);
        }
    }
}
