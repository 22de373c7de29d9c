//! Opens files in directories where other processes may replace them.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

/// Opens a regular file, and does not wait for the other end of a pipe. Links are not followed, so
/// that a user who may write to the directory cannot redirect it. Errors name the path.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let failed = |error: io::Error| match error.raw_os_error() {
        Some(libc::ELOOP) => refused(path, "a symbolic link"),
        _ => io::Error::new(error.kind(), format!("{}: {error}", path.display())),
    };
    let file = options
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(path)
        .map_err(failed)?;
    if file.metadata().map_err(failed)?.is_file() {
        Ok(file)
    } else {
        Err(refused(path, "not a regular file"))
    }
}

fn refused(path: &Path, found: &str) -> io::Error {
    io::Error::other(format!(
        "{}: {found}; put a regular file in its place, or choose another path",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn a_link_a_pipe_and_a_directory_are_refused_by_name_and_a_file_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink(at("file"), at("link")).unwrap();
        mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
        fs::create_dir(at("directory")).unwrap();
        for (name, found) in [
            ("link", "a symbolic link"),
            ("pipe", "not a regular file"),
            ("directory", "not a regular file"),
        ] {
            let error = open(&at(name), OpenOptions::new().read(true)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(found) && text.contains(name), "{text}");
        }
        let error = open(&at("none"), OpenOptions::new().read(true)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let file = open(&at("file"), OpenOptions::new().read(true)).unwrap();
        assert_eq!(io::read_to_string(file).unwrap(), "text");
    }
}
