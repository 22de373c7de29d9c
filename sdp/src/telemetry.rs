//! The log: one subscriber, set up once by the binary.

use daemon::command_line::log_args::LogArgs;
use tracing_subscriber::{
    Layer, filter::LevelFilter, layer::SubscriberExt, util::SubscriberInitExt,
};

use crate::recent_warnings::RecentWarnings;

/// Sends the log to standard error as `log` specifies. Warnings and errors are stored whatever the
/// log level is.
pub fn init(log: &LogArgs) -> RecentWarnings {
    let recent_warnings = RecentWarnings::default();
    let remembered = recent_warnings.clone().with_filter(LevelFilter::WARN);
    let registry = tracing_subscriber::registry().with(remembered);
    let done = registry
        .with(log.lines().with_filter(log.filter()))
        .try_init();
    if done.is_err() {
        tracing::debug!("a log subscriber was already there");
    }
    recent_warnings
}
