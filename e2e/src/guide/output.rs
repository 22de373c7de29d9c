//! Compares the output on a page with the output of a command.
//!
//! Both texts are normalised first: runs of spaces become one space, durations such as `1.2s` or `3
//! s` become equal, and so do process ids after `pid ` or `sdp-`. On the page, a line `…` stands
//! for any lines, and `…` within a line for any characters.

use std::sync::LazyLock;

use regex::Regex;

static PATTERNS: LazyLock<[(Regex, &str); 3]> = LazyLock::new(|| {
    [
        (r"\b(pid |sdp-)\d+\b", "${1}PID"),
        (r"\b\d+(\.\d+)? ?(ns|µs|us|ms|s|min|m|h|d)\b", "DURATION"),
        (r"[ \t]+", " "),
    ]
    .map(|(pattern, by)| (Regex::new(pattern).expect("a constant pattern"), by))
});

/// Returns `Ok` if `printed` matches `expected`.
pub(super) fn matches(expected: &str, printed: &str) -> Result<(), String> {
    let (expected, printed) = (lines(expected), lines(printed));
    let mut pattern = String::from(r"(?s)\A");
    for line in &expected {
        if line == "…" {
            pattern.push_str(r"(?:[^\n]*\n)*?");
            continue;
        }
        let parts: Vec<String> = line.split('…').map(regex::escape).collect();
        pattern.push_str(&parts.join(r"[^\n]*"));
        pattern.push_str(r"\n");
    }
    pattern.push_str(r"\z");
    let text: String = printed.iter().map(|line| format!("{line}\n")).collect();
    let pattern = Regex::new(&pattern).map_err(|error| format!("the page's output: {error}"))?;
    if pattern.is_match(&text) {
        return Ok(());
    }
    let strange = printed.iter().find(|line| !expected.contains(line));
    Err(match strange {
        Some(line) => format!("the output differs, first perhaps at `{line}`"),
        None => "the output lacks a line of the page".to_owned(),
    })
}

/// Normalised lines, without empty ones at the end.
fn lines(text: &str) -> Vec<String> {
    text.trim_end()
        .lines()
        .map(|line| {
            let line = line.trim_end().to_owned();
            PATTERNS.iter().fold(line, |line, (pattern, by)| {
                pattern.replace_all(&line, *by).into_owned()
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_output_matches_and_other_output_does_not() {
        assert_eq!(matches("a  b\nc\n", "a b \nc\n"), Ok(()));
        for printed in ["a b\n", "a b\nd\n", "a b\nc\nd\n", "", "c\na b\n"] {
            assert!(matches("a b\nc\n", printed).is_err(), "{printed:?}");
        }
    }

    #[test]
    fn dots_stand_for_anything_within_their_bounds() {
        assert_eq!(matches("a\n…\nz\n", "a\nb\nc\nz\n"), Ok(()));
        assert_eq!(matches("a\n…\nz\n", "a\nz\n"), Ok(()));
        assert!(matches("a\n…\nz\n", "a\nb\n").is_err());
        assert_eq!(matches("id … is (x)\n", "id 7 9 is (x)\n"), Ok(()));
        assert!(matches("id … is\n", "id 7\nis\n").is_err());
    }

    #[test]
    fn times_and_process_ids_may_differ_but_numbers_may_not() {
        assert_eq!(matches("sdp-1 up 3s", "sdp-4711 up 1.5s"), Ok(()));
        assert_eq!(matches("pid 1, 20 ms", "pid 22, 3 ms"), Ok(()));
        assert!(matches("port 53", "port 54").is_err());
        assert!(matches("10.0.0.1/32", "10.0.0.2/32").is_err());
    }
}
