//! `-o`: the form of what a command prints.

use std::io;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::terminal::{self, Screen, harmless};

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text to read, in columns.
    // `text` is the former name of this value.
    #[value(alias = "text")]
    Table,
    /// One JSON value.
    Json,
    /// One YAML document.
    Yaml,
}

/// `-o`, of every command that prints something.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArgs {
    /// Form of the output
    #[arg(short, long, value_name = "FORM", value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

/// Why a value is not printed.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Write(#[from] io::Error),
    /// The value cannot be written as JSON.
    #[error("the answer cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The value cannot be written as YAML.
    #[error("the answer cannot be written as YAML: {0}")]
    Yaml(#[from] serde_yaml_ng::Error),
}

/// Prints `value`, or the text that `table` makes of it. A reader that closed the pipe is no error.
///
/// # Errors
/// Standard output cannot be written.
pub fn print<T: Serialize + ?Sized>(
    output: Output,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<(), OutputError> {
    // Outside of its strings, JSON has none of the characters that are escaped.
    let mut text = match output {
        Output::Table => Screen::current().paint(&harmless(&table(value))),
        Output::Json => harmless(&serde_json::to_string_pretty(value)?),
        Output::Yaml => serde_yaml_ng::to_string(value)?,
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    terminal::write(&text)?;
    Ok(())
}

/// Prints one of several values: a line of JSON, or a document of YAML after a line `---`. Returns
/// whether the reader still reads.
///
/// # Errors
/// Standard output cannot be written.
pub fn print_next<T: Serialize>(
    output: Output,
    value: &T,
    line: impl FnOnce(&T) -> String,
) -> Result<bool, OutputError> {
    let text = match output {
        Output::Table => Screen::current().paint(&terminal::one_line(&line(value))) + "\n",
        Output::Json => harmless(&serde_json::to_string(value)?) + "\n",
        Output::Yaml => format!("---\n{}", serde_yaml_ng::to_string(value)?),
    };
    Ok(terminal::write(&text)?)
}

#[cfg(test)]
mod tests {
    use super::{super::terminal::is_steering, *};

    #[test]
    fn json_stays_json_whatever_a_name_holds() {
        let name = "x\u{1b}[2J\n\t\u{7f}\u{9b}\u{202e}\"\\";
        let text = harmless(&serde_json::to_string_pretty(&[name]).unwrap());
        assert!(!text.contains(|c| c != '\n' && is_steering(c)), "{text:?}");
        let read: Vec<String> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, [name]);
    }

    #[test]
    fn yaml_stays_yaml_whatever_a_name_holds() {
        let name = "x\u{1b}[2J\n\t\u{7f}\u{9b}: - #\"\\";
        let text = serde_yaml_ng::to_string(&[name]).unwrap();
        assert!(!text.contains(|c| c != '\n' && is_steering(c)), "{text:?}");
        let read: Vec<String> = serde_yaml_ng::from_str(&text).unwrap();
        assert_eq!(read, [name]);
    }
}
