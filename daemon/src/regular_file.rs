//! Reads and makes files that must be regular ones.
//!
//! Opening a pipe waits for a writer, and opening a device may do anything. Files of other kinds
//! are refused by their type and are not opened.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::Path,
};

use nix::{errno::Errno, fcntl::OFlag};

use crate::lookup::Lookup;

/// Maximum length of a file, in bytes.
pub const MAX_FILE: u64 = 256 << 20;

/// Flags for opening a file that should be regular: opening a pipe does not wait for its other end,
/// and a link is not followed.
pub const NO_WAIT: OFlag = OFlag::O_NONBLOCK.union(OFlag::O_NOFOLLOW);

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A directory, pipe, device or socket.
    #[error("is {0}, not a regular file; it was not opened")]
    NotAFile(&'static str),
    /// The file has this many bytes, more than a file may have.
    #[error("has {0} bytes; a file may have at most {MAX_FILE}")]
    Long(u64),
    /// A system call failed, or the text is not UTF-8.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl FileError {
    /// The remedy for the operator, as text.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NotAFile(_) => "put a regular file, or a link to one, in its place",
            Self::Long(_) => "divide its documents among several files",
            Self::Io(_) => "make it readable UTF-8",
        }
    }

    /// Whether the same file may be readable a moment later, because only the process or the node
    /// lacked a resource.
    fn is_passing(&self) -> bool {
        let Self::Io(error) = self else {
            return false;
        };
        let passing = [
            Errno::EMFILE,
            Errno::ENFILE,
            Errno::ENOMEM,
            Errno::EINTR,
            Errno::EAGAIN,
            Errno::ENOBUFS,
        ];
        let code = error.raw_os_error();
        code.is_some_and(|code| passing.contains(&Errno::from_raw(code)))
    }
}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> Self {
        match error {
            FileError::Io(error) => error,
            other => Self::other(other),
        }
    }
}

/// Whether an error of [`look`] may pass without a change of the file.
pub fn is_passing(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(error) => FileError::is_passing(error),
        None => false,
    }
}

/// Opens a regular file to read it. Symbolic links are followed.
pub fn open(path: &Path) -> Result<File, FileError> {
    check(&fs::metadata(path)?)?;
    // The file may have been replaced since. With these flags, opening a pipe does not wait.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits() | OFlag::O_NOCTTY.bits())
        .open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

/// Reads a regular file of at most [`MAX_FILE`] bytes.
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    if length > MAX_FILE {
        return Err(FileError::Long(length));
    }
    let mut bytes = Vec::new();
    // One byte more, so that the end is seen without another allocation.
    bytes.reserve_exact(usize::try_from(length).unwrap_or(0) + 1);
    let read = file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    match u64::try_from(read) {
        Ok(length) if length <= MAX_FILE => Ok(bytes),
        _ => Err(FileError::Long(MAX_FILE + 1)),
    }
}

/// Makes an empty file, or empties an existing one. A pipe, a socket or a link in its place is
/// removed: opening a pipe would wait for a reader.
pub fn create(path: &Path) -> io::Result<File> {
    if let Ok(found) = fs::symlink_metadata(path)
        && !found.is_file()
        && !found.is_dir()
    {
        fs::remove_file(path)?;
    }
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(NO_WAIT.bits())
        .open(path)
}

/// Like [`read`], but refuses a file that is not UTF-8.
pub fn read_text(path: &Path) -> Result<String, FileError> {
    String::from_utf8(read(path)?).map_err(|error| {
        let error = io::Error::new(io::ErrorKind::InvalidData, error.utf8_error());
        FileError::Io(error)
    })
}

/// Like [`read`], for a file that may have been removed. If the file exists or may exist, the error
/// contains a [`FileError`].
pub fn look(path: &Path) -> Lookup<Vec<u8>> {
    match read(path) {
        Ok(bytes) => Lookup::Found(bytes),
        Err(FileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
            // The path may be a link whose target is absent.
            match Lookup::of_path(fs::symlink_metadata(path)) {
                Lookup::Found(_) => Lookup::Unknown(io::Error::other(FileError::NotAFile(
                    "a symbolic link to a file that is absent",
                ))),
                Lookup::Gone => Lookup::Gone,
                Lookup::Unknown(error) => Lookup::Unknown(io::Error::other(FileError::Io(error))),
            }
        }
        Err(error) => Lookup::Unknown(io::Error::other(error)),
    }
}

fn check(metadata: &Metadata) -> Result<(), FileError> {
    let kind = metadata.file_type();
    let other = match () {
        () if kind.is_file() => None,
        () if kind.is_fifo() => Some("a named pipe"),
        () if kind.is_char_device() => Some("a character device"),
        () if kind.is_block_device() => Some("a block device"),
        () if kind.is_socket() => Some("a socket"),
        () => Some("a directory"),
    };
    other.map_or(Ok(()), |other| Err(FileError::NotAFile(other)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn only_an_absent_file_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert!(look(&at("absent")).is_gone());
        fs::write(at("file"), "text").unwrap();
        symlink("file", at("link")).unwrap();
        for name in ["file", "link"] {
            assert!(matches!(look(&at(name)), Lookup::Found(text) if text == b"text"));
        }
        mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
        fs::create_dir(at("directory")).unwrap();
        symlink("absent", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        symlink("/dev/zero", at("device")).unwrap();
        for (name, says) in [
            ("pipe", "a named pipe"),
            ("directory", "a directory"),
            ("dangling", "absent"),
            ("loop", "symbolic links"),
            ("device", "a character device"),
            ("file/below", "Not a directory"),
        ] {
            let Lookup::Unknown(error) = look(&at(name)) else {
                panic!("{name}");
            };
            assert!(error.to_string().contains(says), "{name}: {error}");
            assert!(!is_passing(&error), "{name}");
        }
        let lacks = FileError::Io(Errno::EMFILE.into());
        assert!(is_passing(&io::Error::other(lacks)));
    }
}
