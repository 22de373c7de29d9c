//! The words of `--query-log…`.

use std::{
    fmt,
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use clap::ValueEnum;

/// Which queries are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// None.
    #[default]
    Off,
    /// Refused queries.
    Denied,
    /// Refused queries, and queries that are sent on.
    All,
}

impl Which {
    /// The value of `--query-log` that selects it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Denied => "denied",
            Self::All => "all",
        }
    }
}

/// Output to which the lines of the log are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    #[default]
    Stdout,
    /// Standard error, between the lines of the program's own log.
    Stderr,
    /// Absolute path of a file to which lines are appended.
    File(PathBuf),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stdout" | "-" => Ok(Self::Stdout),
            "stderr" => Ok(Self::Stderr),
            path if path.starts_with('/') => {
                let path = PathBuf::from(path);
                let climbs = path.components().any(|part| part == Component::ParentDir);
                // The proxy may write into the directory as long as it runs.
                if climbs || path.parent().is_none_or(|dir| dir == Path::new("/")) {
                    return Err(format!(
                        "{text:?} is not in a directory of its own: name one, without .."
                    ));
                }
                Ok(Self::File(path))
            }
            _ => Err(format!(
                "{text:?} is not stdout, stderr or an absolute path"
            )),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("stdout"),
            Self::Stderr => f.write_str("stderr"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// Sampling rate: one query in this many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample(u32);

impl Sample {
    /// The log has one query in this many; at least 1.
    pub const fn one_in(self) -> u32 {
        self.0
    }
}

impl FromStr for Sample {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a sampling rate: write 1/N, such as 1/100");
        let number = text.strip_prefix("1/").or((text == "1").then_some("1"));
        match number.ok_or_else(wrong)?.parse() {
            Ok(0) | Err(_) => Err(wrong()),
            Ok(n) => Ok(Self(n)),
        }
    }
}
