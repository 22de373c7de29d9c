//! `files/flags.txt`: the keys that `config.extra` may have, which are the flags of both programs.

use std::{collections::BTreeSet, fs};

use anyhow::Result;

use super::{Derived, chart, settings};

const FILE: &str = "files/flags.txt";
/// Flags that are no settings.
const NO_SETTINGS: [&str; 3] = ["config-dir", "help", "version"];

/// Writes the file, or reports that it is out of date.
pub(super) fn problems(derived: Derived) -> Result<Option<String>> {
    let mut flags = BTreeSet::new();
    for help in settings::helps()? {
        flags.extend(flags_in(&help));
    }
    let text: String = flags.iter().map(|flag| format!("{flag}\n")).collect();
    let path = chart("holdfast").join(FILE);
    if fs::read_to_string(&path).is_ok_and(|found| found == text) {
        return Ok(None);
    }
    match derived {
        Derived::Write => {
            fs::write(path, text)?;
            Ok(None)
        }
        Derived::Check => Ok(Some(format!(
            "charts/holdfast/{FILE} differs from the flags of the programs: run `cargo xtask charts \
             --write`"
        ))),
    }
}

/// Flags that a help text describes. The descriptions are indented further than the flags.
fn flags_in(help: &str) -> Vec<String> {
    let flags = help.lines().filter_map(|line| {
        let long = match line.strip_prefix("      --") {
            Some(long) => long,
            None => line.strip_prefix("  -")?.split_once(", --")?.1,
        };
        let end = long.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        Some(long.get(..end.unwrap_or(long.len()))?.to_owned())
    });
    flags
        .filter(|flag| !NO_SETTINGS.contains(&flag.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_from_a_help_text() {
        let help = "Usage: x\n\nOptions:\n      --bpf-root <DIR>\n          as --state-dir\n      \
                    --kubernetes[=<KUBERNETES>]\n  -l, --log <FILTER>\n  -h, --help\n";
        assert_eq!(flags_in(help), ["bpf-root", "kubernetes", "log"]);
    }
}
