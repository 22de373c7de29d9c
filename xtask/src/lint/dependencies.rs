//! Licences, sources and bans of dependencies, as `deny.toml` has them.
//!
//! cargo-deny does it where it is installed. Building it takes longer than
//! all of our own crates together, so `setup` does not; without it the same
//! lists of `deny.toml` are held against `cargo metadata` here. Duplicate
//! versions and advisories are cargo-deny's alone.

use std::fs;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::report;
use crate::{process, workspace};

/// The registry, as `cargo metadata` spells it.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Checks with cargo-deny if there is one, else with what `cargo metadata` says.
pub(super) fn check() -> Result<()> {
    if process::succeeds(process::command("cargo", &["deny", "--version"])) {
        return process::run(process::command(
            "cargo",
            &["deny", "check", "licenses", "bans", "sources"],
        ));
    }
    println!(
        "  cargo-deny is not installed: checking licences, sources and bans by `cargo metadata`"
    );
    let deny =
        fs::read_to_string(workspace::root().join("deny.toml")).context("reading deny.toml")?;
    let allowed = strings(&deny, "[licenses]", "allow");
    let banned = strings(&deny, "[bans]", "deny");
    if allowed.is_empty() {
        bail!("deny.toml: [licenses] has no `allow`");
    }
    let metadata = workspace::metadata(true)?;
    let problems: Vec<String> = workspace::packages(&metadata)
        .filter_map(|package| problem(package, &allowed, &banned))
        .collect();
    report(&problems)
}

fn problem(package: &Value, allowed: &[String], banned: &[String]) -> Option<String> {
    let name = package["name"].as_str()?;
    let version = package["version"].as_str()?;
    if let Some(source) = package["source"].as_str()
        && source != REGISTRY
    {
        return Some(format!("{name} {version}: comes from {source}"));
    }
    if banned.iter().any(|banned| banned == name) {
        return Some(format!("{name} {version}: banned by deny.toml"));
    }
    match package["license"].as_str() {
        Some(license) if licence_ok(license, allowed) => None,
        Some(license) => Some(format!(
            "{name} {version}: licence {license} is not allowed by deny.toml"
        )),
        None => Some(format!("{name} {version}: names no licence")),
    }
}

/// Whether an SPDX expression can be satisfied with the allowed licences.
fn licence_ok(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    any_of(&mut words, allowed)
}

type Words<'w> = std::iter::Peekable<std::str::SplitWhitespace<'w>>;

fn any_of(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut ok = all_of(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        ok |= all_of(words, allowed);
    }
    ok
}

fn all_of(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut ok = single(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        ok &= single(words, allowed);
    }
    ok
}

fn single(words: &mut Words<'_>, allowed: &[String]) -> bool {
    match words.next() {
        Some("(") => {
            let ok = any_of(words, allowed);
            words.next();
            ok
        }
        Some(licence) => {
            let mut full = licence.to_owned();
            if words.next_if_eq(&"WITH").is_some() {
                full = format!("{licence} WITH {}", words.next().unwrap_or_default());
            }
            allowed.contains(&full)
        }
        None => false,
    }
}

/// The strings of the array `key` in the table `table` of deny.toml.
fn strings(toml: &str, table: &str, key: &str) -> Vec<String> {
    let assignment = format!("{key} = [");
    toml.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .skip_while(|line| *line != table)
        .skip(1)
        .take_while(|line| !(line.starts_with('[') && line.ends_with(']')))
        .skip_while(|line| !line.starts_with(&assignment))
        .take_while({
            let mut open = true;
            move |line| std::mem::replace(&mut open, !line.ends_with(']'))
        })
        .flat_map(|line| line.split('"').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_understood() {
        let allowed = [
            "MIT".to_owned(),
            "Apache-2.0".to_owned(),
            "Apache-2.0 WITH LLVM-exception".to_owned(),
        ];
        for ok in [
            "MIT",
            "MIT/GPL-3.0",
            "GPL-2.0 OR MIT",
            "(MIT OR GPL-2.0) AND Apache-2.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0",
        ] {
            assert!(licence_ok(ok, &allowed), "{ok}");
        }
        for bad in [
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "GPL-2.0 WITH LLVM-exception",
            "",
        ] {
            assert!(!licence_ok(bad, &allowed), "{bad}");
        }
    }

    #[test]
    fn lists_are_read_from_their_own_table() {
        let toml = "[bans]\nallow = [\"x\"]\n[licenses]\nother = 1\nallow = [\n  \"MIT\", # why\n  \"ISC\",\n]\nend = [\"y\"]\n";
        assert_eq!(strings(toml, "[licenses]", "allow"), ["MIT", "ISC"]);
        assert_eq!(
            strings("[bans]\ndeny = [\"a\", \"b\"]\n", "[bans]", "deny"),
            ["a", "b"]
        );
    }
}
