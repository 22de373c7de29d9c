//! Rules about files: see CONTRIBUTING.md.

use std::{fs, path::Path};

use anyhow::Result;

use crate::{repository, workspace};

/// Maximum number of lines of a source file.
const MAX_LINES: usize = 600;
/// Code that a generator wrote.
const GENERATED: &str = "fqdn-proto/src/gen";
/// The only places for `unsafe`: system calls, map access, the eBPF programs.
const UNSAFE_ALLOWED: [&str; 5] = [
    "shared-maps/src/user",
    "sdp/src/socket/sys.rs",
    "daemon/src/link_stream/register.rs",
    "e2e/src/bench/perf_event.rs",
    "bpf/src",
];
/// Paths of one machine; written in pieces so that this file passes.
const MACHINE_PATHS: [&str; 3] = [
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/wo", "rk/"),
];

/// Everything that breaks a rule, one line each.
pub(super) fn problems() -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for dir in workspace::member_dirs(&workspace::metadata(false)?) {
        let manifest = dir.join("Cargo.toml");
        if !inherits_lints(&fs::read_to_string(repository::root().join(&manifest))?) {
            problems.push(format!(
                "{}: lacks `[lints]` with `workspace = true`",
                manifest.display()
            ));
        }
    }
    for file in workspace::files()? {
        let Ok(text) = fs::read_to_string(repository::root().join(&file)) else {
            continue; // not text
        };
        for path in MACHINE_PATHS {
            if text.contains(path) {
                problems.push(format!(
                    "{}: names a path of one machine ({path}…)",
                    file.display()
                ));
            }
        }
        if file.extension().is_some_and(|ext| ext == "rs") && !file.starts_with(GENERATED) {
            source(&file, &text, &mut problems);
        }
    }
    Ok(problems)
}

fn source(file: &Path, text: &str, problems: &mut Vec<String>) {
    let name = file.display();
    let lines = text.lines().count();
    if lines > MAX_LINES {
        problems.push(format!(
            "{name}: {lines} lines; split it (at most {MAX_LINES})"
        ));
    }
    if file.file_name().is_some_and(|name| name == "mod.rs") {
        problems.push(format!("{name}: write `foo.rs` beside `foo/` instead"));
    }
    let first = text
        .lines()
        .find(|line| !line.starts_with("#![") && !line.trim().is_empty());
    if !first.is_some_and(|line| line.starts_with("//!")) {
        problems.push(format!(
            "{name}: begins without a `//!` line that says what it is"
        ));
    }
    if !UNSAFE_ALLOWED
        .iter()
        .any(|allowed| file.starts_with(allowed))
    {
        for (number, line) in (1..).zip(text.lines()) {
            if is_unsafe(line) {
                problems.push(format!(
                    "{name}:{number}: `unsafe` outside {}",
                    UNSAFE_ALLOWED.join(", ")
                ));
            }
        }
    }
}

fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    ["{", "impl", "fn", "extern"]
        .iter()
        .any(|what| code.contains(&["unsafe", what].join(" ")))
}

fn inherits_lints(manifest: &str) -> bool {
    let mut lines = manifest
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    while let Some(line) = lines.next() {
        if line == "lints.workspace = true" {
            return true;
        }
        if line == "[lints]" {
            return lines.next() == Some("workspace = true");
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inherited_lints_are_seen() {
        assert!(inherits_lints(
            "[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n"
        ));
        assert!(!inherits_lints("[package]\nname = \"a\"\n"));
        assert!(!inherits_lints("[lints]\n[lints.rust]\n"));
    }

    #[test]
    fn each_rule_is_reported() {
        let rule = |file: &str, text: &str| {
            let mut problems = Vec::new();
            source(Path::new(file), text, &mut problems);
            problems.join("\n")
        };
        assert_eq!(rule("a/src/b.rs", "//! B.\nfn b() {}\n"), "");
        assert!(rule("a/src/b.rs", "fn b() {}\n").contains("begins without"));
        assert!(rule("a/src/mod.rs", "//! B.\n").contains("foo.rs"));
        assert!(rule("a/src/b.rs", &"//! B.\n".repeat(601)).contains("601 lines"));
        let code = concat!("//! B.\nfn b() { unsa", "fe { c() } }\n");
        assert!(rule("a/src/b.rs", code).contains("b.rs:2"));
        assert_eq!(rule("bpf/src/b.rs", code), "");
    }
}
