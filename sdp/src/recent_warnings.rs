//! Recent warnings and errors of the log, each once with its count. `status` shows them.

use std::{
    fmt::{self, Write as _},
    sync::Arc,
};

use dns_policy::wall_time;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::layer::{Context, Layer};

/// Maximum number of different warnings that are stored. Above it, the warning that was not seen
/// for longest is dropped.
const MOST: usize = 16;
/// Length at which the text of a warning is cut, bytes.
const MAX_LENGTH: usize = 400;

/// Resolution of reported times (one millisecond), in nanoseconds.
const MILLISECOND: u64 = 1_000_000;

/// One warning or error of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentWarning {
    /// `error` or `warn`.
    pub level: String,
    /// The log line, with its fields.
    pub text: String,
    /// Number of times that it was logged.
    pub count: u64,
    /// Time of the first occurrence, RFC 3339.
    pub first: String,
    /// Time of the latest occurrence, RFC 3339.
    pub last: String,
}

/// A layer of the log that keeps recent warnings. All clones share one state.
#[derive(Clone, Debug, Default)]
pub struct RecentWarnings(Arc<Mutex<Vec<Seen>>>);

/// A warning or error. Its times are in nanoseconds of Unix time.
#[derive(Debug)]
struct Seen {
    level: Level,
    text: String,
    count: u64,
    first: u64,
    last: u64,
}

impl RecentWarnings {
    /// All stored warnings and errors, the latest first.
    pub fn list(&self) -> Vec<RecentWarning> {
        let time = |at: u64| wall_time::render(at / MILLISECOND * MILLISECOND);
        let seen = self.0.lock();
        let latest_first = seen.iter().rev();
        latest_first
            .map(|seen| RecentWarning {
                level: seen.level.as_str().to_ascii_lowercase(),
                text: seen.text.clone(),
                count: seen.count,
                first: time(seen.first),
                last: time(seen.last),
            })
            .collect()
    }

    /// Removes the warnings whose text begins with `beginning`, because their cause is gone.
    pub fn forget(&self, beginning: &str) {
        self.0
            .lock()
            .retain(|seen| !seen.text.starts_with(beginning));
    }

    fn note(&self, level: Level, text: String, now: u64) {
        let mut all = self.0.lock();
        let known = all
            .iter()
            .position(|seen| seen.level == level && seen.text == text);
        let seen = match known {
            Some(at) => {
                let mut seen = all.remove(at);
                seen.count += 1;
                seen.last = now;
                seen
            }
            None => Seen {
                level,
                text,
                count: 1,
                first: now,
                last: now,
            },
        };
        if all.len() >= MOST {
            all.remove(0);
        }
        all.push(seen);
    }
}

impl<S: Subscriber> Layer<S> for RecentWarnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut words = Words::default();
        event.record(&mut words);
        self.note(*event.metadata().level(), words.text(), wall_time::now());
    }
}

/// Message and fields of an event.
#[derive(Default)]
struct Words {
    message: String,
    fields: String,
}

impl Words {
    fn text(self) -> String {
        let all = match self.fields.is_empty() {
            true => self.message,
            false => format!("{} ({})", self.message, self.fields),
        };
        // The text goes to terminals, so it must not contain control characters that a peer sent.
        let mut text = String::new();
        for c in all.chars() {
            if text.len() >= MAX_LENGTH {
                text.push('…');
                break;
            }
            match c.is_control() {
                true => text.extend(c.escape_default()),
                false => text.push(c),
            }
        }
        text
    }
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            let comma = if self.fields.is_empty() { "" } else { ", " };
            write!(self.fields, "{comma}{}={value:?}", field.name())
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::{filter::LevelFilter, layer::SubscriberExt};

    use super::*;

    #[test]
    fn repeated_lines_are_counted_and_the_oldest_is_removed() {
        let warnings = RecentWarnings::default();
        let at = |second: u64| second * 1_000_000_000;
        warnings.note(Level::WARN, "twice".to_owned(), at(1));
        for second in 2..=u64::try_from(MOST).expect("few") {
            warnings.note(Level::ERROR, format!("other {second}"), at(second));
        }
        warnings.note(Level::WARN, "twice".to_owned(), at(100));
        warnings.note(Level::ERROR, "one more".to_owned(), at(101));
        let all = warnings.list();
        assert_eq!(all.len(), MOST);
        assert_eq!(all[0].text, "one more");
        let twice = RecentWarning {
            level: "warn".to_owned(),
            text: "twice".to_owned(),
            count: 2,
            first: "1970-01-01T00:00:01Z".to_owned(),
            last: "1970-01-01T00:01:40Z".to_owned(),
        };
        assert_eq!(all[1], twice);
        assert!(all.iter().all(|warning| warning.text != "other 2"));
        warnings.forget("one");
        warnings.forget("ther 3");
        assert_eq!(warnings.list(), all[1..]);
    }

    #[test]
    fn warnings_and_errors_of_the_log_are_stored() {
        let warnings = RecentWarnings::default();
        let layer = warnings.clone().with_filter(LevelFilter::WARN);
        let registry = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(registry, || {
            tracing::info!("nothing wrong");
            tracing::warn!(port = 53, error = %"a\u{1b}[2Jb", "odd");
            tracing::error!(why = "because", "{}", "x".repeat(2 * MAX_LENGTH));
        });
        let all = warnings.list();
        assert_eq!(all.len(), 2);
        assert_eq!(all[1].text, r"odd (port=53, error=a\u{1b}[2Jb)");
        assert_eq!(
            (all[1].level.as_str(), all[0].level.as_str()),
            ("warn", "error")
        );
        assert!(all[0].text.len() < MAX_LENGTH + 8, "{}", all[0].text.len());
    }
}
