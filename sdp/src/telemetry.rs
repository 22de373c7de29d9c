//! The log: one subscriber, set up once by the binary.

use daemon::{
    log_filter::{self, LogFilterError},
    one_line::OneLine,
};
use tracing_subscriber::{
    Layer, filter::LevelFilter, layer::SubscriberExt, util::SubscriberInitExt,
};

use crate::{config::LogFormat, recent_warnings::RecentWarnings};

/// Why the log could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter does not parse.
    #[error("--log-level (HOLDFAST_LOG_LEVEL) {filter:?}: {reason}")]
    Filter {
        filter: String,
        reason: LogFilterError,
    },
}

/// Sends the log to standard error, in `format`, as far as `filter` lets it.
/// Warnings and errors are remembered, whatever it lets through.
pub fn init(filter: &str, format: LogFormat) -> Result<RecentWarnings, TelemetryError> {
    let parsed =
        log_filter::parse(filter, "holdfast_sdp").map_err(|reason| TelemetryError::Filter {
            filter: filter.to_owned(),
            reason,
        })?;
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(OneLine(std::io::stderr));
    let recent_warnings = RecentWarnings::default();
    let remembered = recent_warnings.clone().with_filter(LevelFilter::WARN);
    let registry = tracing_subscriber::registry().with(remembered);
    let done = match format {
        LogFormat::Text => {
            let lines = lines.with_target(false);
            registry.with(lines.with_filter(parsed)).try_init()
        }
        LogFormat::Json => {
            let lines = lines.json().flatten_event(true);
            registry.with(lines.with_filter(parsed)).try_init()
        }
    };
    if done.is_err() {
        tracing::debug!("a log subscriber was already there");
    }
    Ok(recent_warnings)
}
