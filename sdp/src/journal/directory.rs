//! The journal's directory. Only this program and root may write to it, because a journal in it is
//! accepted as the mappings of a proxy that ended, and rules in it are accepted as the agent's.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::Path,
};

use daemon::unix_socket::PROXY_ID;
use nix::unistd::Uid;

/// Write permission of every user.
const WORLD_WRITABLE: u32 = 0o002;

/// Makes the directory if it is missing, and checks it.
pub(crate) fn make(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    check(dir)
}

/// Refuses a directory to which another user can write.
pub(crate) fn check(dir: &Path) -> io::Result<()> {
    let found = fs::metadata(dir)?;
    let own = Uid::effective().as_raw();
    if ![0, own, PROXY_ID].contains(&found.uid()) {
        return Err(refused(format!(
            "{} belongs to uid {}, who could write mappings into it: give it to uid {own} (chown), \
             or name another --journal-dir",
            dir.display(),
            found.uid()
        )));
    }
    if found.mode() & WORLD_WRITABLE != 0 {
        return Err(refused(format!(
            "every user can write to {}: chmod 700, or name another --journal-dir",
            dir.display()
        )));
    }
    Ok(())
}

fn refused(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_directory_that_every_user_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(make(&dir.path().join("a/b")).is_ok());
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = check(dir.path()).unwrap_err().to_string();
        assert!(error.contains("chmod 700"), "{error}");
        assert!(make(dir.path()).is_err());
    }
}
