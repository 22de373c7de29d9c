//! `--log-level` and `--log-format`, of every command that runs, and the lines that they ask for.

use clap::{Args, ValueEnum};
use tracing::Subscriber;
use tracing_subscriber::{EnvFilter, Layer, registry::LookupSpan};

use crate::{
    log_filter::{self, LogFilterError},
    one_line::OneLine,
};

/// Both programs have this module.
const EXAMPLE: &str = "holdfast_sdp";
const LEVEL: &str = "HOLDFAST_LOG_LEVEL";
const FORMER_LEVEL: &str = "HOLDFAST_LOG";

/// Settings of the log.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Lowest severity that is logged: error, warn, info, debug, trace or off. Modules may have their
    /// own, for example info,holdfast_sdp=debug
    // Commands of the agent had it as --log.
    #[arg(long, alias = "log", value_name = "LEVEL", value_parser = level, default_value = "info", env = level_variable())]
    pub log_level: String,
    /// Format of the log
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Former spelling of `--log-format json`
    #[arg(long, hide = true)]
    pub log_json: bool,
}

/// The environment variable of the level: the former one if only that is set.
#[expect(
    clippy::disallowed_methods,
    reason = "a variable has one name for clap, and this one has two"
)]
fn level_variable() -> &'static str {
    let is_set = |name| std::env::var_os(name).is_some();
    match !is_set(LEVEL) && is_set(FORMER_LEVEL) {
        true => FORMER_LEVEL,
        false => LEVEL,
    }
}

fn level(text: &str) -> Result<String, LogFilterError> {
    log_filter::parse(text, EXAMPLE).map(|_| text.to_owned())
}

/// Format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines to read.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogArgs {
    /// The filter of the log.
    pub fn filter(&self) -> EnvFilter {
        log_filter::parse(&self.log_level, EXAMPLE).expect("a checked level")
    }

    /// Lines on standard error, without control characters.
    pub fn lines<S>(&self) -> Box<dyn Layer<S> + Send + Sync>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let lines = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .with_writer(OneLine(std::io::stderr));
        match self.format() {
            LogFormat::Text => lines.boxed(),
            LogFormat::Json => lines.json().flatten_event(true).boxed(),
        }
    }

    /// Format of the lines.
    pub fn format(&self) -> LogFormat {
        match self.log_json {
            true => LogFormat::Json,
            false => self.log_format,
        }
    }
}
