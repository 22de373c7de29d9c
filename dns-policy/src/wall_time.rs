//! Wall time in files and for people: nanoseconds of Unix time as RFC 3339 text, and back.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::{
    Timestamp,
    fmt::{StdIoWrite, temporal::DateTimePrinter},
};

const SECOND: u64 = 1_000_000_000;
/// Maximum length of an instant's text, in bytes.
const LONGEST: usize = "2024-02-29T12:00:00.000000001Z".len();

/// The present time in nanoseconds of Unix time; 0 before 1970. For people and files only, because
/// this clock jumps.
pub fn now() -> u64 {
    let since = of_file().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The present time, to compare with the times of files.
#[expect(clippy::disallowed_methods, reason = "the edge at which it is taken")]
pub fn of_file() -> SystemTime {
    SystemTime::now()
}

/// Formats an instant as `2024-02-29T12:00:00.000000001Z` (RFC 3339, 5.6). A whole second has no
/// fraction.
pub fn render(unix_ns: u64) -> String {
    Text::of(unix_ns).as_str().to_owned()
}

/// An instant in the form of [`render`], made without allocating, because files have thousands.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Text {
    /// Spells an instant: without a fraction, or with nine digits of it.
    pub fn of(unix_ns: u64) -> Self {
        let instant = Timestamp::from_nanosecond(unix_ns.into()).expect("before the year 2555");
        let digits = if unix_ns.is_multiple_of(SECOND) { 0 } else { 9 };
        let mut bytes = [0; LONGEST];
        let mut rest = bytes.as_mut_slice();
        DateTimePrinter::new()
            .precision(Some(digits))
            .print_timestamp(&instant, StdIoWrite(&mut rest))
            .expect("it fits");
        let len = LONGEST - rest.len();
        Self { bytes, len }
    }

    /// The instant as RFC 3339 text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).expect("only ASCII is put in")
    }
}

/// Reads RFC 3339. Instants before 1970, such as Go's zero time, are 0.
pub fn parse(text: &str) -> Option<u64> {
    let instant: Timestamp = text.parse().ok()?;
    u64::try_from(instant.as_nanosecond().max(0)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400;

    #[test]
    fn known_instants() {
        for (ns, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400 * SECOND, "2000-02-29T00:00:00Z"),
            (1_709_208_000 * SECOND + 5, "2024-02-29T12:00:00.000000005Z"),
            (4_102_444_799 * SECOND, "2099-12-31T23:59:59Z"),
        ] {
            assert_eq!(render(ns), text);
            assert_eq!(parse(text), Some(ns));
        }
        assert_eq!(
            parse("2024-02-29T14:00:00.5+02:00"),
            Some(1_709_208_000 * SECOND + SECOND / 2)
        );
        assert_eq!(parse("0001-01-01T00:00:00Z"), Some(0));
        assert_eq!(render(u64::MAX), "2554-07-21T23:34:33.709551615Z");
        assert_eq!(parse("2554-07-21T23:34:33.709551615Z"), Some(u64::MAX));
        assert_eq!(parse("2554-07-21T23:34:33.709551616Z"), None);
        assert_eq!(parse("2024-02-29 12:00:00z"), Some(1_709_208_000 * SECOND));
        assert_eq!(parse("yesterday"), None);
        assert_eq!(parse("2024-02-29T12:00:00"), None, "which offset?");
        assert_eq!(parse("2024-13-01T00:00:00Z"), None);
    }

    #[test]
    fn every_day_of_a_century_reads_back() {
        for day in 0..36_525 {
            assert_eq!(parse(&render(day * DAY * SECOND)), Some(day * DAY * SECOND));
        }
    }
}
