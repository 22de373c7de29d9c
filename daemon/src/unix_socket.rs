//! Permissions of a unix socket, set by descriptor, and whether a process serves it.

use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
};

use nix::{
    fcntl::{AtFlags, OFlag, open},
    sys::{
        socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
        stat::{Mode, SFlag, fstat},
    },
    unistd::{Gid, Uid, fchownat},
};

/// User and group of a proxy that was started as root, and the group to which
/// the agent opens what the proxy needs.
pub const PROXY_ID: u32 = 10094;

/// Connects without waiting. If the socket's queue of waiting connections is full, the error is
/// `WouldBlock`: a process has the socket and does not accept connections.
pub fn connect_now(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let client = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(client.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(client)
}

/// Lets the owner and the group of the socket at `path` connect; `group` becomes its group.
///
/// The directory may belong to another user, who could put a link to any file in the socket's
/// place. So the path is looked up once, links are not followed, and only a socket that belongs
/// to this process's user is changed.
pub fn share(path: &Path, group: Option<u32>) -> io::Result<()> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let socket = open(path, flags, Mode::empty())?;
    let found = fstat(&socket)?;
    let kind = SFlag::from_bits_truncate(found.st_mode & SFlag::S_IFMT.bits());
    let ours = found.st_uid == Uid::effective().as_raw() && found.st_nlink == 1;
    if kind != SFlag::S_IFSOCK || !ours {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the socket was replaced by something else right after it was made; look who can \
             write in its directory",
        ));
    }
    if let Some(group) = group {
        let group = Some(Gid::from_raw(group));
        fchownat(&socket, "", None, group, AtFlags::AT_EMPTY_PATH)?;
    }
    let by_descriptor = format!("/proc/self/fd/{}", socket.as_raw_fd());
    fs::set_permissions(
        by_descriptor,
        std::os::unix::fs::PermissionsExt::from_mode(0o660),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::{
        fs::{PermissionsExt as _, symlink},
        net::UnixListener,
    };

    use super::*;

    #[test]
    fn a_process_that_accepts_nothing_holds_up_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match connect_now(&path) {
                Ok(connection) => waiting.push(connection),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop((listener, waiting));
        let refused = connect_now(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_link_put_in_the_sockets_place_changes_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let (path, secret) = (dir.path().join("sock"), dir.path().join("secret"));
        let _listener = UnixListener::bind(&path).unwrap();
        share(&path, None).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o660);
        fs::write(&secret, "").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&secret, &path).unwrap();
        share(&path, None).unwrap_err();
        fs::remove_file(&path).unwrap();
        fs::hard_link(&secret, &path).unwrap();
        share(&path, None).unwrap_err();
        assert_eq!(mode(&secret), 0o600);
    }
}
