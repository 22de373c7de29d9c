//! Settings from `--config` (one YAML file) and `--config-dir` (one file per key), for every command
//! that runs.

use std::{
    ffi::OsString,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use clap::{Arg, ArgMatches, Command};
use limits::yaml;
use serde_json::Value;

use crate::{
    config_dir::{self, DirError, Entry},
    flags::{FileFlags, ValueError},
};

/// Maximum length of a settings file, in bytes.
const MAX_FILE: usize = 1 << 20;

/// Why the files of a command line cannot be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("--config {path}: {source}; correct the path, or make the file readable", path = .path.display())]
    Read {
        /// The value of the flag.
        path: PathBuf,
        /// The error of the kernel or the decoder.
        source: io::Error,
    },
    /// The directory cannot be read.
    #[error("--config-dir {0}; correct the path, or make it readable")]
    Dir(#[from] DirError),
    /// The file is not a YAML mapping of settings to plain values.
    #[error("--config {path}: {reason}", path = .path.display())]
    Syntax {
        /// The value of the flag.
        path: PathBuf,
        /// What is wrong, with the remedy.
        reason: String,
    },
    /// A key of the file is no flag of the command.
    #[error(
        "--config {path}: unknown key {key:?}: {} (`{help} --help` lists all keys, as flags)",
        remedy(.meant.as_deref()), path = .entry.path.display(), key = .entry.key
    )]
    UnknownKey {
        /// The key, with its file.
        entry: Entry,
        /// The key that was probably meant.
        meant: Option<String>,
        /// The command, as a user types it.
        help: String,
    },
    /// A value is not valid for its key.
    #[error(transparent)]
    Value(#[from] ValueError),
}

fn remedy(meant: Option<&str>) -> String {
    match meant {
        Some(meant) => format!("did you mean {meant}?"),
        None => "remove it".to_owned(),
    }
}

/// Settings that the files add to a command line.
#[derive(Debug, Default)]
pub struct FileSettings {
    /// Flags for the keys that neither the command line nor the environment has.
    pub arguments: Vec<OsString>,
    /// Keys of the directory that are no flags of the command.
    pub ignored: Vec<String>,
}

/// Reads the files that the flags `--config` and `--config-dir` of `command` name; `given` has the
/// flags from its command line and environment. The file overrides the directory, which `directory`
/// reads.
///
/// `line`: the command as a user types it, for messages.
///
/// # Errors
/// A file cannot be read, has an unknown key, or a value that is not valid for its key.
pub fn read<E: From<SettingsError>>(
    line: &str,
    command: &Command,
    given: &ArgMatches,
    directory: impl FnOnce(&Path) -> Result<Vec<Entry>, E>,
) -> Result<FileSettings, E> {
    let mut flags = FileFlags::new(command, given);
    if let Some(path) = given.get_one::<PathBuf>("config") {
        for entry in yaml(path, &|key| delimiter(command, key))? {
            if !flags.add(&entry).map_err(SettingsError::from)? {
                let meant = flags.nearest(&entry.key).map(str::to_owned);
                let help = line.to_owned();
                return Err(SettingsError::UnknownKey { entry, meant, help }.into());
            }
        }
    }
    let mut ignored = Vec::new();
    if let Some(dir) = given.get_one::<PathBuf>("config_dir") {
        for entry in directory(dir)? {
            if !flags.add(&entry).map_err(SettingsError::from)? {
                ignored.push(match flags.misspelt(&entry.key) {
                    Some(meant) => format!("{} (did you mean {meant}?)", entry.key),
                    None => entry.key,
                });
            }
        }
    }
    let arguments = flags.into_arguments().map(OsString::from).collect();
    Ok(FileSettings { arguments, ignored })
}

/// Reads the file of `--config` for those keys that are flags of `command`. The file belongs to
/// another command, which checks the other keys.
///
/// # Errors
/// The file cannot be read, or a value is not valid for its key.
pub fn shared(command: &Command, given: &ArgMatches) -> Result<Vec<OsString>, SettingsError> {
    let mut flags = FileFlags::new(command, given);
    if let Some(path) = given.get_one::<PathBuf>("config") {
        for entry in yaml(path, &|key| delimiter(command, key))? {
            flags.add(&entry)?;
        }
    }
    Ok(flags.into_arguments().map(OsString::from).collect())
}

/// The settings in a directory whose keys are flags.
///
/// # Errors
/// The directory or a file in it cannot be read.
pub fn directory(dir: &Path) -> Result<Vec<Entry>, SettingsError> {
    Ok(config_dir::read(dir)?)
}

/// The character between the values of a flag.
fn delimiter(command: &Command, flag: &str) -> char {
    let mut all = command.get_arguments();
    let arg = all.find(|arg| arg.get_long() == Some(flag));
    arg.and_then(Arg::get_value_delimiter).unwrap_or(',')
}

fn yaml(path: &Path, delimiter: &dyn Fn(&str) -> char) -> Result<Vec<Entry>, SettingsError> {
    let mut text = String::new();
    // One byte more than allowed shows that a file is too long. A device has no end.
    let most = u64::try_from(MAX_FILE + 1).unwrap_or(u64::MAX);
    let read = fs::File::open(path).and_then(|file| file.take(most).read_to_string(&mut text));
    read.map_err(|source| SettingsError::Read {
        path: path.to_owned(),
        source,
    })?;
    parse_yaml(path, &text, delimiter)
}

fn parse_yaml(
    path: &Path,
    text: &str,
    delimiter: &dyn Fn(&str) -> char,
) -> Result<Vec<Entry>, SettingsError> {
    let syntax = |reason: String| SettingsError::Syntax {
        path: path.to_owned(),
        reason,
    };
    if text.len() > MAX_FILE {
        return Err(syntax(format!(
            "has more than {MAX_FILE} bytes; is it a file of settings?"
        )));
    }
    let documents = yaml::documents(text);
    let document = match documents.as_slice() {
        [] => return Ok(Vec::new()),
        [one] => one.value(),
        [_, _, ..] => {
            return Err(syntax(
                "has several documents; write all settings in one, without a line `---` between \
                 them"
                    .into(),
            ));
        }
    };
    let mapping = match document.map_err(|e| syntax(format!("{e}; {}", e.remedy())))? {
        Value::Null => return Ok(Vec::new()),
        Value::Object(mapping) => mapping,
        _ => return Err(syntax("expected a mapping of settings to values".into())),
    };
    let entry = |(key, value): (String, Value)| {
        let text = plain(&value, delimiter(&key));
        let mut entry = Entry {
            path: path.to_owned(),
            key,
            text: String::new(),
        };
        let reason = "expected a plain value or a list of plain values";
        entry.text = text.ok_or_else(|| ValueError::new(&entry, reason))?;
        Ok(entry)
    };
    mapping.into_iter().map(entry).collect()
}

/// A value as it stands on the command line.
fn plain(value: &Value, delimiter: char) -> Option<String> {
    match value {
        Value::Array(items) => {
            let items: Option<Vec<_>> = items.iter().map(scalar).collect();
            Some(items?.join(delimiter.encode_utf8(&mut [0; 4])))
        }
        one => scalar(one),
    }
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yaml_is_read_within_limits() {
        let error = |text: &str| {
            let error = parse_yaml(Path::new("c.yaml"), text, &|_| ',').unwrap_err();
            error.to_string()
        };
        let deep = error(&"[".repeat(200_000));
        assert!(deep.contains("levels deep"), "{deep}");
        let aliases = format!(
            "name: &a {}\nagent-address: [{}]\n",
            "x".repeat(400_000),
            "*a, ".repeat(10)
        );
        let aliases = error(&aliases);
        assert!(aliases.contains("aliases"), "{aliases}");
        let long = error(&"#".repeat(MAX_FILE + 1));
        assert!(long.contains("bytes"), "{long}");
        let several = error("name: a\n---\nname: b\n");
        assert!(several.contains("several documents"), "{several}");
        let twice = error("name: a\nname: b\n");
        assert!(twice.contains("duplicate"), "{twice}");
        // An endless file is not read to its end.
        let endless = yaml(Path::new("/dev/zero"), &|_| ',')
            .unwrap_err()
            .to_string();
        assert!(endless.contains("/dev/zero"), "{endless}");
        for empty in ["", "# nothing\n", "---\n"] {
            assert!(
                parse_yaml(Path::new("c.yaml"), empty, &|_| ',').is_ok(),
                "{empty:?}"
            );
        }
    }
}
