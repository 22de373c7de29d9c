//! Files of the state directory: replaced in one step, set aside if they are damaged, and left alone
//! if a newer release wrote them.
//!
//! A file is written whole to a temporary name, synced, renamed, and the directory synced: after a
//! crash there is the old file or the new one.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    lookup::Lookup,
    regular_file::{self, create},
};

/// Ending of a temporary name. A crash or a failed write leaves the file behind, and the next
/// write replaces it.
const TEMPORARY: &str = ".new";
/// Number of names that are tried for a file that is set aside.
const ASIDES: u32 = 16;

/// Why a file can be neither used nor replaced.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// A system call failed.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file or directory that the call was about.
        path: PathBuf,
        /// Error of the call.
        source: io::Error,
    },
    /// A newer release wrote the file.
    #[error("{path} has version {found}; this program reads up to {newest}; run the newer release, or move the file away", path = .path.display())]
    Newer {
        /// The file, which is left as it is.
        path: PathBuf,
        /// Version number in the file.
        found: u32,
        /// Newest version that this program reads.
        newest: u32,
    },
}

impl StateFileError {
    /// Returns a function that makes errors of calls about `path`.
    pub fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        |source| Self::Io {
            path: path.to_owned(),
            source,
        }
    }
}

/// What was found at a path.
#[derive(Debug)]
pub enum Content<T> {
    /// The file as it was parsed.
    Found(T),
    /// There is no file.
    Absent,
    /// A file that cannot be used, or another thing in its place.
    Damaged(Damage),
}

/// What is wrong with a file that is still in its place.
#[derive(Debug)]
pub struct Damage {
    path: PathBuf,
    error: String,
}

impl Damage {
    /// Sets the file aside. Returns a text with the error, `how` and the new path.
    pub fn set_aside(self, how: &str) -> io::Result<String> {
        let aside = set_aside(&self.path)?;
        Ok(format!("{}{how} {}", self.error, aside.display()))
    }

    /// Like [`Self::set_aside`], but a failure becomes part of the text: the start continues with
    /// the file in its place.
    pub fn try_to_set_aside(self, how: &str) -> String {
        let Self { path, error } = self;
        match set_aside(&path) {
            Ok(aside) => format!("{error}{how} {}", aside.display()),
            Err(failed) => format!("{error}; it could not be set aside ({failed})"),
        }
    }
}

/// Reads a file. If the same file may be readable a moment later, this returns an error instead of
/// [`Content::Damaged`].
pub fn read<T, E: Display>(
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, E>,
) -> io::Result<Content<T>> {
    let damaged = |error: String| {
        let path = path.to_owned();
        Content::Damaged(Damage { path, error })
    };
    match regular_file::look(path) {
        Lookup::Found(bytes) => Ok(match parse(&bytes) {
            Ok(content) => Content::Found(content),
            Err(error) => damaged(error.to_string()),
        }),
        Lookup::Gone => Ok(Content::Absent),
        Lookup::Unknown(error) if regular_file::is_passing(&error) => Err(error),
        Lookup::Unknown(error) => Ok(damaged(error.to_string())),
    }
}

/// Like [`read`], for a file that the start can do without. A file that cannot be used or read is
/// set aside, so that the next write does not replace it.
///
/// # Errors
/// What is wrong with the file, and where it is now.
pub fn read_or_set_aside<T, E: Display>(
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, E>,
) -> Result<Option<T>, String> {
    let damage = match read(path, parse) {
        Ok(Content::Found(content)) => return Ok(Some(content)),
        Ok(Content::Absent) => return Ok(None),
        Ok(Content::Damaged(damage)) => damage,
        Err(error) => Damage {
            path: path.to_owned(),
            error: error.to_string(),
        },
    };
    Err(damage.try_to_set_aside("; set aside as"))
}

/// Reads a JSON file with a field `version`, which is `newest` at most.
pub fn read_versioned<T: DeserializeOwned>(
    path: &Path,
    newest: u32,
) -> Result<Content<T>, StateFileError> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }

    let mut newer = None;
    let content = read(path, |bytes| {
        // The rest of a newer file may have another form.
        if let Ok(Versioned { version }) = serde_json::from_slice(bytes) {
            newer = Some(version).filter(|version| *version > newest);
        }
        serde_json::from_slice(bytes)
    });
    match newer {
        Some(found) => Err(StateFileError::Newer {
            path: path.to_owned(),
            found,
            newest,
        }),
        None => content.map_err(StateFileError::io(path)),
    }
}

/// Replaces the file at `path` in one step, with mode 0600.
pub fn write_atomic(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(TEMPORARY);
    let temporary = PathBuf::from(temporary);
    let mut file = create(&temporary)?;
    file.write_all(text)?;
    rename_synced(&file, &temporary, path)
}

/// Like [`write_atomic`], with `content` as JSON.
pub fn write_json(path: &Path, content: &impl Serialize) -> io::Result<()> {
    write_atomic(path, &serde_json::to_vec_pretty(content)?)
}

/// Renames a complete file from `temporary` to `path`, durably.
pub fn rename_synced(file: &File, temporary: &Path, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(temporary, path)?;
    sync_dir(path.parent().unwrap_or(Path::new(".")))
}

/// Makes the names in a directory durable.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Moves an unusable file out of the way, to the path with `.corrupt`. Returns its new path. A file
/// that was set aside earlier is replaced; a directory is not.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let mut last = None;
    for number in 0..ASIDES {
        let mut aside = path.as_os_str().to_owned();
        aside.push(match number {
            0 => ".corrupt".to_owned(),
            number => format!(".corrupt.{number}"),
        });
        let aside = PathBuf::from(aside);
        match fs::rename(path, &aside) {
            Ok(()) => return Ok(aside),
            Err(error) => match error.kind() {
                io::ErrorKind::IsADirectory
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::DirectoryNotEmpty
                | io::ErrorKind::AlreadyExists => last = Some(error),
                _ => return Err(error),
            },
        }
    }
    Err(last.unwrap_or_else(|| io::ErrorKind::AlreadyExists.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_intact() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write_atomic(&path, b"old").unwrap();
        // With a directory in place of the temporary file, the write fails before the rename.
        fs::create_dir(dir.path().join("f.new")).unwrap();
        assert!(write_atomic(&path, b"new").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        fs::remove_dir(dir.path().join("f.new")).unwrap();
        // A file that a crash left behind is overwritten, even by a shorter text.
        fs::write(dir.path().join("f.new"), b"half of something longer").unwrap();
        write_atomic(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(!dir.path().join("f.new").exists());
    }

    #[test]
    fn a_pipe_or_a_directory_in_the_way_neither_delays_a_write_nor_keeps_its_name() {
        use nix::{sys::stat::Mode, unistd::mkfifo};

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for path in [&path, &dir.path().join("f.new")] {
            mkfifo(path, Mode::S_IRWXU).unwrap();
        }
        let aside = set_aside(&path).unwrap();
        assert_eq!(aside, dir.path().join("f.corrupt"));
        write_atomic(&path, b"text").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"text");
        // A directory does not replace the pipe that was set aside.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(set_aside(&path).unwrap(), dir.path().join("f.corrupt.1"));
        write_atomic(&path, b"text").unwrap();
        assert_eq!(set_aside(&path).unwrap(), aside);
    }

    #[test]
    fn a_newer_file_of_another_form_stays_and_a_damaged_one_is_set_aside() {
        #[derive(Debug, Deserialize)]
        struct Counted {
            count: u32,
        }

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let read = || read_versioned::<Counted>(&path, 2);
        assert!(matches!(read(), Ok(Content::Absent)));
        fs::write(&path, r#"{"version":2,"count":7}"#).unwrap();
        assert!(matches!(read(), Ok(Content::Found(Counted { count: 7 }))));
        fs::write(&path, r#"{"version":3,"counts":[]}"#).unwrap();
        let error = read().unwrap_err().to_string();
        assert!(error.contains("has version 3; this program reads up to 2"));
        fs::write(&path, r#"{"version":2"#).unwrap();
        let Ok(Content::Damaged(damage)) = read() else {
            panic!("half a file was read");
        };
        let text = damage.set_aside("; set aside as").unwrap();
        let aside = format!("; set aside as {}.corrupt", path.display());
        assert!(text.ends_with(&aside), "{text}");
        assert!(!path.exists());
    }
}
