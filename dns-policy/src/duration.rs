//! Durations in flags and settings: one grammar for both programs.

use std::time::Duration;

/// A text that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a duration; write seconds (60) or units: 100ms, 10s, 1.5s, 5m, 1h30m")]
pub struct DurationError {
    text: String,
}

/// Reads `100ms`, `1.5s`, `5m`, `1h30m`; a number without a unit is in seconds.
///
/// Digits beyond nanoseconds are cut off.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    read(text.trim()).ok_or_else(|| DurationError {
        text: text.to_owned(),
    })
}

fn read(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let number_len = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .filter(|len| *len > 0)?;
        let (number, tail) = rest.split_at(number_len);
        let unit_len = tail
            .find(|c: char| !c.is_alphabetic())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_len);
        let nanos = match unit {
            "ns" => 1,
            "us" | "µs" => 1_000,
            "ms" => 1_000_000,
            "s" => NANOS_PER_SECOND,
            "m" => 60 * NANOS_PER_SECOND,
            "h" => 3_600 * NANOS_PER_SECOND,
            _ => return None,
        };
        total = total.checked_add(multiple(number, nanos)?)?;
        rest = tail;
    }
    (!text.is_empty()).then_some(total)
}

const NANOS_PER_SECOND: u128 = 1_000_000_000;

/// `number` (digits with at most one point) times `unit` nanoseconds.
fn multiple(number: &str, unit: u128) -> Option<Duration> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let whole: u128 = match whole {
        "" => 0,
        digits => digits.parse().ok()?,
    };
    let mut nanos = whole.checked_mul(unit)?;
    let mut place = unit;
    for digit in fraction.bytes() {
        place /= 10;
        nanos = nanos.checked_add(place * u128::from(digit - b'0'))?;
    }
    let seconds = u64::try_from(nanos / NANOS_PER_SECOND).ok()?;
    let rest = u32::try_from(nanos % NANOS_PER_SECOND).ok()?;
    Some(Duration::new(seconds, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_units_sums_and_bare_seconds() {
        for (text, millis) in [
            ("100ms", 100),
            ("1.5s", 1500),
            (".5s", 500),
            ("5.s", 5000),
            ("10s", 10_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1.5h", 5_400_000),
            ("0", 0),
            ("60", 60_000),
            (" 2s ", 2000),
            ("1000us", 1),
            ("1000000ns", 1),
            ("10000000h", 36_000_000_000_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text:?}");
        }
    }

    #[test]
    fn refuses_other_texts_with_the_remedy() {
        for text in [
            "",
            "s",
            "10x",
            "-1s",
            "1..s",
            ".s",
            "1.5",
            "1s5",
            "1 s",
            "99999999999999999h",
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{text:?}")) && error.contains("1h30m"),
                "{error}"
            );
        }
    }
}
