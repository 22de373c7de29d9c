//! Wall time in files and for people: nanoseconds of Unix time as RFC 3339 text, and back.

use std::time::{SystemTime, UNIX_EPOCH};

const SECOND: u64 = 1_000_000_000;
const DAY: u64 = 86_400;

/// Now, nanoseconds of Unix time; before 1970 it is 0. For people and files only: it jumps.
#[expect(clippy::disallowed_methods, reason = "the edge at which it is taken")]
pub fn now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// `2024-02-29T12:00:00.000000001Z` (RFC 3339, 5.6).
pub fn render(unix_ns: u64) -> String {
    Text::of(unix_ns).as_str().to_owned()
}

/// An instant as [`render`] spells it, made without allocating: files have thousands.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    bytes: [u8; 30],
    len: usize,
}

impl Text {
    /// Spells an instant.
    pub fn of(unix_ns: u64) -> Self {
        let (seconds, nanos) = (unix_ns / SECOND, unix_ns % SECOND);
        let (days, rest) = (seconds / DAY, seconds % DAY);
        let (year, month, day) = civil(days);
        let mut bytes = *b"0000-00-00T00:00:00.000000000Z";
        for (range, value) in [
            (0..4, year),
            (5..7, month),
            (8..10, day),
            (11..13, rest / 3600),
            (14..16, rest / 60 % 60),
            (17..19, rest % 60),
            (20..29, nanos),
        ] {
            digits(&mut bytes[range], value);
        }
        if nanos > 0 {
            Self { bytes, len: 30 }
        } else {
            bytes[19] = b'Z';
            Self { bytes, len: 20 }
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).expect("only ASCII is put in")
    }
}

/// Fills a field with a number, zeros in front.
fn digits(field: &mut [u8], mut value: u64) {
    for byte in field.iter_mut().rev() {
        *byte = b'0' + u8::try_from(value % 10).expect("one digit");
        value /= 10;
    }
}

/// Reads RFC 3339; instants before 1970 (Go's zero time among them) are 0.
pub fn parse(text: &str) -> Option<u64> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let separator = |at: usize, allowed: &[u8]| {
        text.as_bytes()
            .get(at)
            .is_some_and(|byte| allowed.contains(byte))
            .then_some(())
    };
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    for (at, allowed) in [(4, "-"), (7, "-"), (10, "Tt "), (13, ":"), (16, ":")] {
        separator(at, allowed.as_bytes())?;
    }
    if !(1..=12).contains(&month)
        || !(1..=31).contains(&day)
        || hour > 23
        || minute > 59
        || second > 60
    {
        return None;
    }
    let mut rest = text.get(19..)?;
    let mut nanos = 0;
    if let Some(fraction) = rest.strip_prefix('.') {
        let digits = fraction.bytes().take_while(u8::is_ascii_digit).count();
        let (value, tail) = fraction.split_at_checked(digits)?;
        let padded: String = value.chars().chain("000000000".chars()).take(9).collect();
        nanos = padded.parse::<u64>().ok()?;
        rest = tail;
    }
    let offset = match rest {
        "Z" | "z" => 0,
        _ => {
            let sign = match rest.get(..1)? {
                "+" => -1,
                "-" => 1,
                _ => return None,
            };
            let (hours, minutes) = rest.get(1..)?.split_once(':')?;
            sign * (hours.parse::<i64>().ok()? * 3600 + minutes.parse::<i64>().ok()? * 60)
        }
    };
    let seconds = i64::try_from(hour * 3600 + minute * 60 + second).ok()? + offset;
    let days = days_since_epoch(
        i64::try_from(year).ok()?,
        i64::try_from(month).ok()?,
        i64::try_from(day).ok()?,
    );
    let seconds = days.checked_mul(86_400)?.checked_add(seconds)?;
    let Ok(seconds) = u64::try_from(seconds) else {
        return Some(0);
    };
    seconds.checked_mul(SECOND)?.checked_add(nanos)
}

/// Days since 1970-01-01 of a date of the Gregorian calendar.
fn days_since_epoch(year: i64, month: i64, day: i64) -> i64 {
    // Years that start in March end with the leap day.
    let shifted = if month <= 2 { year - 1 } else { year };
    let era = shifted.div_euclid(400);
    let year_of_era = shifted.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Inverse of [`days_since_epoch`] for days from 1970 on.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day_of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(parse("yesterday"), None);
        assert_eq!(parse("2024-13-01T00:00:00Z"), None);
    }

    #[test]
    fn every_day_of_a_century_reads_back() {
        for day in 0..36_525 {
            assert_eq!(parse(&render(day * DAY * SECOND)), Some(day * DAY * SECOND));
        }
    }
}
