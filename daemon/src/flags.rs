//! Rules that hold for the flags of both programs, and flags that files set.
//!
//! A setting in a file becomes the flag that it stands for, so that a value is written and checked
//! the same way in both places. Flags and environment have priority.

use clap::{Arg, ArgAction, ArgMatches, Command, Id, parser::ValueSource};

use crate::config_dir::{Entry, go_bool};

/// Flags that a file cannot set.
const NOT_FROM_FILES: [&str; 2] = ["config", "config-dir"];

/// A value in a file is not valid for its key.
#[derive(Debug, thiserror::Error)]
#[error("{path}, key {key:?}: {reason}", path = .entry.path.display(), key = .entry.key)]
pub struct ValueError {
    entry: Entry,
    reason: String,
}

impl ValueError {
    /// `reason` says what is wrong with the text of `entry`.
    pub fn new(entry: &Entry, reason: impl Into<String>) -> Self {
        Self {
            entry: entry.clone(),
            reason: reason.into(),
        }
    }
}

/// Completes a flag. Its environment variable is `HOLDFAST_` and its name in capitals, unless it
/// has another variable. A flag that is true or false may stand without a value.
pub fn complete(arg: Arg) -> Arg {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return arg;
    }
    let variable = match (arg.get_env(), arg.get_long()) {
        (None, Some(flag)) => format!("HOLDFAST_{}", flag.to_uppercase().replace('-', "_")),
        _ => return complete_bool(arg),
    };
    complete_bool(arg.env(variable))
}

fn complete_bool(arg: Arg) -> Arg {
    match is_bool(&arg) {
        true => arg
            .value_name("BOOL")
            .num_args(0..=1)
            .default_missing_value("true")
            .require_equals(true),
        false => arg,
    }
}

/// Whether a flag has or had this name.
fn is_called(arg: &Arg, name: &str) -> bool {
    let former = arg.get_all_aliases().unwrap_or_default();
    arg.get_long() == Some(name) || former.contains(&name)
}

/// Whether a flag takes the value true or false.
fn is_bool(arg: &Arg) -> bool {
    let values = arg.get_possible_values();
    values.iter().any(|value| value.get_name() == "true")
}

/// Whether `entry` is true, in any of Go's words for that.
pub fn is_true(entry: &Entry) -> Result<bool, ValueError> {
    let reason = || format!("{:?} is neither true nor false", entry.text);
    go_bool(&entry.text).ok_or_else(|| ValueError::new(entry, reason()))
}

/// Flags that files add to a command line.
#[derive(Debug)]
pub(crate) struct FileFlags<'a> {
    command: &'a Command,
    given: &'a ArgMatches,
    /// Flags of the command, each as on a command line, in the order of the files.
    added: Vec<(Id, Option<String>)>,
}

impl<'a> FileFlags<'a> {
    /// Flags for `command`, whose command line and environment gave `given`.
    pub(crate) fn new(command: &'a Command, given: &'a ArgMatches) -> Self {
        Self {
            command,
            given,
            added: Vec::new(),
        }
    }

    /// Adds the flag of `entry`, unless the command line or an earlier entry has it. Returns whether
    /// there is such a flag.
    pub(crate) fn add(&mut self, entry: &Entry) -> Result<bool, ValueError> {
        let mut all = self.command.get_arguments();
        let Some(arg) = all.find(|arg| is_called(arg, &entry.key)) else {
            return Ok(false);
        };
        if NOT_FROM_FILES.contains(&&*entry.key) {
            return Ok(false);
        }
        let is_added = self.added.iter().any(|(id, _)| id == arg.get_id());
        if !is_added && !self.is_given(arg) {
            let flag = self.flag(arg, entry)?;
            self.added.push((arg.get_id().clone(), flag));
        }
        Ok(true)
    }

    /// The flag that was probably meant by an unknown key.
    pub(crate) fn nearest(&self, key: &str) -> Option<&'a str> {
        nearest::nearest(key, self.names())
    }

    /// The flag of which `key` is a misspelling. This is stricter than [`Self::nearest`], because a
    /// directory also has keys of other programs.
    pub(crate) fn misspelt(&self, key: &str) -> Option<&'a str> {
        nearest::misspelt(key, self.names())
    }

    fn names(&self) -> impl Iterator<Item = &'a str> {
        let shown = self
            .command
            .get_arguments()
            .filter(|arg| !arg.is_hide_set());
        let flags = shown.filter_map(Arg::get_long);
        flags.filter(|flag| !NOT_FROM_FILES.contains(flag))
    }

    fn is_given(&self, arg: &Arg) -> bool {
        let source = self.given.value_source(arg.get_id().as_str());
        source.is_some_and(|source| source != ValueSource::DefaultValue)
    }

    /// The flag for `entry`. `None` if `entry` turns a switch off.
    fn flag(&self, arg: &Arg, entry: &Entry) -> Result<Option<String>, ValueError> {
        let Entry { key, text, .. } = entry;
        if matches!(arg.get_action(), ArgAction::SetTrue) {
            return Ok(is_true(entry)?.then(|| format!("--{key}")));
        }
        let flag = match go_bool(text) {
            Some(value) if is_bool(arg) => format!("--{key}={value}"),
            _ => format!("--{key}={text}"),
        };
        let parsed = self.command.clone().try_get_matches_from(["", &flag]);
        parsed.map_err(|error| {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            ValueError::new(entry, first.strip_prefix("error: ").unwrap_or(first))
        })?;
        Ok(Some(flag))
    }

    /// The flags, as they stand on a command line.
    pub(crate) fn into_arguments(self) -> impl Iterator<Item = String> {
        self.added.into_iter().filter_map(|(_, flag)| flag)
    }
}
