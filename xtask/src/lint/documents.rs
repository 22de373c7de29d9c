//! Links and references in Markdown must lead to something that exists.
//!
//! Checked are links to files of this repository, code references in the form `` `sdp/src/proxy.rs`
//! `` or `` `sdp/src/proxy.rs::Proxy::answer` ``, and cases of scenarios, `` `tcp.txt::name of the
//! case` ``. README.md must name every command that `.ci/run` calls, docs/src/rfc.md a test for
//! every duty that is met, and docs/src/security.md a test for every limit.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use anyhow::Result;

use crate::{repository, workspace};

/// Pages of the guide, which mdBook renders.
const BOOK: &str = "docs/src";

/// Directory of scenarios: what proxy, client and server say in each case.
const SCENARIOS: &str = "sdp/tests/scenarios";
/// Duties by standard, and the tests that show that they are met.
const DUTIES: &str = "docs/src/rfc.md";
/// Limits on each party, and the tests that show them.
const LIMITS: &str = "docs/src/security.md";
/// Last heading of a table whose rows name tests.
const SHOWN_BY: &str = "Shown by";

/// Everything that points nowhere, one line each.
pub(super) fn problems() -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in workspace::files()? {
        if file.extension().is_none_or(|ext| ext != "md") {
            continue;
        }
        let text = fs::read_to_string(repository::root().join(&file))?;
        let mut tests_wanted = false;
        for (number, line) in (1..).zip(text.lines()) {
            let mut report =
                |what: String| problems.push(format!("{}:{number}: {what}", file.display()));
            for target in link_targets(line) {
                let Some(path) = local(&file, target) else {
                    continue;
                };
                if !repository::root().join(&path).exists() {
                    report(format!("link to {}, which is not there", path.display()));
                } else if leaves_the_book(&file, &path) {
                    report(format!(
                        "link to {}, which the rendered book does not have: name it without a link",
                        path.display()
                    ));
                }
            }
            for span in code_spans(line) {
                if let Some(problem) = code_reference(span).or_else(|| scenario(span)) {
                    report(problem);
                }
            }
            if file == Path::new(DUTIES)
                && let Some(problem) = duty(line)
            {
                report(problem);
            }
            if file == Path::new(LIMITS) {
                let cells = cells(line);
                let heading = cells.last() == Some(&SHOWN_BY);
                tests_wanted = heading || (tests_wanted && !cells.is_empty());
                if tests_wanted && !heading && !names_a_test(&cells) {
                    report("a limit, and no test shows it".to_owned());
                }
            }
        }
    }
    let readme = fs::read_to_string(repository::root().join("README.md"))?;
    let ci = fs::read_to_string(repository::root().join(".ci/run"))?;
    problems.extend(
        missing_commands(&readme, &ci)
            .map(|command| format!("README.md does not name `{command}`, which .ci/run calls")),
    );
    Ok(problems)
}

/// Pages of the guide are rendered without the rest of the repository.
fn leaves_the_book(document: &Path, target: &Path) -> bool {
    document.starts_with(BOOK) && !target.starts_with(BOOK)
}

/// Commands of the script that are no line of the document.
fn missing_commands<'a>(readme: &'a str, ci: &'a str) -> impl Iterator<Item = &'a str> {
    let named = |command: &str| {
        readme
            .lines()
            .any(|line| line.split('#').next().unwrap_or_default().trim() == command)
    };
    ci.lines()
        .map(str::trim)
        .filter(|line| line.starts_with("cargo "))
        .filter(move |command| !named(command))
}

/// Targets of the links `[text](target)` in a line.
pub(super) fn link_targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
}

/// Contents of `` `…` ``.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The file that a link in `document` means, relative to the root; `None` for the web.
pub(super) fn local(document: &Path, target: &str) -> Option<PathBuf> {
    let target = target.split('#').next().unwrap_or_default();
    if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let mut path = document.parent()?.to_path_buf();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    Some(path)
}

/// Error in a span that names a source file. `None` if it names none.
fn code_reference(span: &str) -> Option<String> {
    let (file, item) = match span.split_once(".rs::") {
        Some((stem, item)) => (format!("{stem}.rs"), Some(item)),
        None if span.ends_with(".rs") => (span.to_owned(), None),
        None => return None,
    };
    if !file.contains('/') || file.contains(['*', '{', '<', ' ']) {
        return None;
    }
    let Ok(text) = fs::read_to_string(repository::root().join(&file)) else {
        return Some(format!("`{file}` is not there"));
    };
    let name = item?.rsplit("::").next()?.trim_end_matches("()");
    if defines(&text, name) {
        None
    } else {
        Some(format!("`{file}` defines no `{name}`"))
    }
}

/// Error in a span that names a case of a scenario. `None` if it names none.
fn scenario(span: &str) -> Option<String> {
    let (stem, case) = span.split_once(".txt::")?;
    let file = format!("{SCENARIOS}/{stem}.txt");
    let Ok(text) = fs::read_to_string(repository::root().join(&file)) else {
        return Some(format!("`{file}` is not there"));
    };
    let is_there = text
        .lines()
        .any(|line| line.strip_prefix("case ").map(str::trim) == Some(case));
    (!is_there).then(|| format!("`{file}` has no case `{case}`"))
}

/// Error in a row of duties: section, duty, whether it is held, tests.
fn duty(line: &str) -> Option<String> {
    let cells: Vec<&str> = line.strip_prefix("| ")?.split(" | ").collect();
    let [_, _, held, tests] = cells[..] else {
        return Some("a row has not four cells".to_owned());
    };
    let is_test = tests.contains("::");
    match held {
        "Status" => None,
        _ if held.starts_with("not met: ") || held.starts_with("not ours: ") => None,
        _ if !held.starts_with("met") => Some(format!(
            "`{held}` is neither met, nor not met or not ours: why"
        )),
        _ if !is_test => Some("met, and no test shows it".to_owned()),
        _ => None,
    }
}

/// Cells of a row of a table; empty for any other line.
fn cells(line: &str) -> Vec<&str> {
    let row = line.strip_prefix('|').and_then(|row| row.strip_suffix('|'));
    row.map(|row| row.split('|').map(str::trim).collect())
        .unwrap_or_default()
}

/// Whether the last cell names a test, or the row is the line below the headings.
fn names_a_test(cells: &[&str]) -> bool {
    let last = cells.last().copied().unwrap_or_default();
    last.trim_matches('-').is_empty() && !last.is_empty()
        || code_spans(last).any(|span| span.contains(".rs::") || span.contains(".txt::"))
}

/// Whether Rust source defines an item, field-like variant or macro of that name.
fn defines(text: &str, name: &str) -> bool {
    [
        "fn",
        "struct",
        "enum",
        "trait",
        "const",
        "type",
        "mod",
        "static",
        "macro_rules!",
    ]
    .iter()
    .any(|keyword| {
        let pattern = format!("{keyword} {name}");
        text.match_indices(&pattern).any(|(at, found)| {
            text.get(at + found.len()..)
                .and_then(|rest| rest.chars().next())
                .is_none_or(|next| !(next.is_alphanumeric() || next == '_'))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_resolve_from_the_document() {
        let path = |target| local(Path::new("docs/src/maps.md"), target);
        assert_eq!(path("grpc.md#x"), Some("docs/src/grpc.md".into()));
        assert_eq!(path("../../README.md"), Some("README.md".into()));
        assert_eq!(path("https://example.org/"), None);
        assert_eq!(path("#here"), None);
    }

    #[test]
    fn the_guide_links_to_itself_only() {
        let page = Path::new("docs/src/maps.md");
        assert!(!leaves_the_book(page, Path::new("docs/src/grpc.md")));
        assert!(leaves_the_book(page, Path::new("docs/design/README.md")));
        assert!(!leaves_the_book(
            Path::new("README.md"),
            Path::new("docs/src/maps.md")
        ));
    }

    #[test]
    fn commands_of_ci_are_lines_of_the_readme() {
        let readme = "```sh\ncargo xtask setup   # why\n```\n`cargo xtask lint`\n";
        let ci = "set -e\ncargo xtask setup\ncargo xtask lint\n";
        let missing: Vec<_> = missing_commands(readme, ci).collect();
        assert_eq!(missing, ["cargo xtask lint"]);
    }

    #[test]
    fn cases_are_checked_by_name() {
        assert_eq!(
            scenario("edns.txt::an unknown version is the server's to answer"),
            None
        );
        assert!(scenario("edns.txt::an unknown").is_some());
        assert!(scenario("gone.txt::a").is_some());
        assert_eq!(scenario("notes.txt"), None);
    }

    #[test]
    fn a_duty_that_is_met_has_a_test() {
        assert_eq!(duty("| Section | Duty | Status | Shown by |"), None);
        assert_eq!(duty("| 1 | a | met: b | `x.txt::y` |"), None);
        assert_eq!(duty("| 1 | a | not met: b | |"), None);
        assert_eq!(duty("Text."), None);
        assert!(duty("| 1 | a | met | |").is_some());
        assert!(duty("| 1 | a | not met | |").is_some());
        assert!(duty("| 1 | a | perhaps | `x.txt::y` |").is_some());
        assert!(duty("| 1 | a | met |").is_some());
    }

    #[test]
    fn a_limit_has_a_test() {
        assert!(cells("Text.").is_empty());
        assert!(names_a_test(&cells("|---|---|")));
        assert!(names_a_test(&cells("| a | b | `x/y.rs::z` |")));
        assert!(names_a_test(&cells("| a | b | `answers.txt::z` |")));
        assert!(!names_a_test(&cells("| a | `x/y.rs::z` | `x/y.rs` |")));
        assert!(!names_a_test(&cells("| a | b | |")));
    }

    #[test]
    fn references_are_checked_to_the_item() {
        assert_eq!(code_reference("xtask/src/lint.rs"), None);
        assert_eq!(code_reference("xtask/src/lint.rs::Check"), None);
        assert_eq!(code_reference("xtask/src/lint.rs::run()"), None);
        assert!(code_reference("xtask/src/lint.rs::nothing").is_some());
        assert!(code_reference("xtask/src/gone.rs").is_some());
        assert_eq!(code_reference("cargo xtask lint"), None);
    }
}
