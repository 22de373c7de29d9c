//! A directory with one file per setting, as Kubernetes mounts a ConfigMap.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::regular_file;

/// The directory, or a file in it, cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}", path = .path.display())]
pub struct DirError {
    /// The directory or file that cannot be read.
    pub path: PathBuf,
    /// The I/O error. For a file, it may also say that the kind, size or encoding is wrong.
    pub source: io::Error,
}

/// A setting: one file of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Path of the file, for messages about the value.
    pub path: PathBuf,
    /// Name of the setting, which is the file's name.
    pub key: String,
    /// The file's content without white space around it; never empty.
    pub text: String,
}

/// The settings in `dir`, by name. An empty file counts as absent.
pub fn read(dir: &Path) -> Result<Vec<Entry>, DirError> {
    let failed = |path: &Path, source| DirError {
        path: path.to_owned(),
        source,
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| failed(dir, e))? {
        paths.push(entry.map_err(|e| failed(dir, e))?.path());
    }
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        let Some(key) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        // A mounted ConfigMap also has the link `..data` and a directory whose name is a date.
        if key.starts_with("..") || path.is_dir() {
            continue;
        }
        let text = regular_file::read_text(&path);
        let text = text.map_err(|error| failed(&path, error.into()))?;
        if text.trim().is_empty() {
            continue;
        }
        found.push(Entry {
            key: key.to_owned(),
            text: text.trim().to_owned(),
            path,
        });
    }
    Ok(found)
}

/// Parses a boolean like Go's strconv.ParseBool.
pub(crate) fn go_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_mounted_config_map_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("..2026_11_22")).unwrap();
        fs::write(at("..2026_11_22/b"), " 2\n").unwrap();
        fs::write(at("..2026_11_22/a"), "1").unwrap();
        fs::write(at("..2026_11_22/empty"), "\n").unwrap();
        symlink("..2026_11_22", at("..data")).unwrap();
        for key in ["a", "b", "empty"] {
            symlink(format!("..data/{key}"), at(key)).unwrap();
        }
        let found = read(dir.path()).unwrap();
        let pairs: Vec<_> = found.iter().map(|e| (&*e.key, &*e.text)).collect();
        assert_eq!(pairs, [("a", "1"), ("b", "2")]);
        let error = read(&at("none")).unwrap_err().to_string();
        assert!(error.contains("none"), "{error}");
    }
}
