//! Words that CONTRIBUTING.md ("Language") replaces, in Markdown and in Rust.
//!
//! Only prose is checked: Markdown outside of code, comments, and string literals with a space.
//! The list has the replaced words that come back most often. The rule itself is in CONTRIBUTING.md.

use std::{fs, path::Path};

use anyhow::Result;

use crate::{repository, workspace};

/// Rust files and folders that are not checked: generated code and this list.
const NOT_CHECKED: &[&str] = &["fqdn-proto/src/gen", "xtask/src/lint/words.rs"];

/// The section that quotes the words.
const RULES: (&str, &str) = ("CONTRIBUTING.md", "## Language");

/// Word or phrase, and what to write instead.
const WORDS: &[(&str, &str)] = &[
    ("anew", "again"),
    ("as ever", "as before"),
    ("but for", "except"),
    ("by now", "now; already"),
    ("whomever", "every … that"),
    ("whoever", "the process/endpoint/server that …"),
    (
        "somebody",
        "a person; another process; the name of the actor",
    ),
    ("nobody", "no process / no endpoint / no rule …"),
    ("for whom", "for which endpoint/client"),
    ("of whom", "of which"),
    ("to whom", "to which"),
    ("beneath", "under; below"),
    ("mend", "repair; fix"),
    ("mends", "repairs"),
    ("mended", "repaired; fixed"),
    ("mending", "repair"),
    ("let go", "release"),
    ("lets go", "releases"),
    ("take back", "revoke; roll back"),
    ("takes back", "revokes; rolls back"),
    ("took back", "revoked; rolled back"),
    ("taken back", "revoked; rolled back"),
    ("takes up", "adopts; continues"),
    ("taken up", "adopted; handled"),
    ("is told", "receives; is reported"),
    ("are told", "receive; are reported"),
    ("was told", "received"),
    ("is no known", "unknown"),
    ("behindhand", "pending; not yet written"),
    ("is heard", "is handled; is received"),
    ("are heard", "are handled"),
    ("hears", "receives; handles"),
    ("owned up", "reported"),
    ("makes no sense", "is malformed; cannot be parsed"),
    ("makes no sense of", "cannot parse"),
    ("gives way", "is displaced"),
    ("come and go", "are added and removed; start and stop"),
    ("comes and goes", "is added and removed"),
    ("and its like", "and the other …"),
    ("what went", "the removed …"),
    ("what was cleaned", "cleaned names"),
    ("what was learned", "learned names; mappings"),
    ("what is known", "the known …"),
    ("what it knows", "its data; its mappings"),
    ("what it had", "its queries; its …"),
    ("what is in force", "the policy in force; entries in force"),
    ("what is left of", "the rest of; the remaining …"),
    ("what nobody", "… that no source/selector/endpoint …"),
    ("what cannot be", "a … that cannot be"),
    ("who asks", "the client"),
    ("whom it asks", "the server"),
    ("who and whom", "client and server"),
    ("is asked for", "is looked up; is requested"),
    ("asked for again", "looked up again; requested again"),
    ("believes", "accepts; assumes"),
    ("believed", "accepted"),
    ("shall have", "must have; intended …"),
];

/// Every use of a listed word, one line each.
pub(super) fn problems() -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in workspace::files()? {
        let markdown = file.extension().is_some_and(|ending| ending == "md");
        if !markdown && !is_checked(&file) {
            continue;
        }
        let text = fs::read_to_string(repository::root().join(&file))?;
        let prose: Vec<String> = if markdown {
            markdown_prose(&file, &text)
        } else {
            text.lines().map(rust_prose).collect()
        };
        for (number, line) in (1..).zip(prose) {
            problems.extend(relapses(&line).map(|(word, instead)| {
                format!("{}:{number}: \"{word}\": write {instead}", file.display())
            }));
        }
    }
    Ok(problems)
}

fn is_checked(file: &Path) -> bool {
    let is_in = |paths: &[&str]| paths.iter().any(|path| file.starts_with(path));
    file.extension().is_some_and(|ending| ending == "rs") && !is_in(NOT_CHECKED)
}

/// Listed words in a line of prose.
fn relapses(line: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let line = line.to_lowercase();
    WORDS
        .iter()
        .copied()
        .filter(move |(word, _)| has_word(&line, word))
}

/// Whether `line` has `word` with no letter, digit, `-` or `_` next to it.
fn has_word(line: &str, word: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(joins) && !line[at + word.len()..].starts_with(joins))
}

/// Lines of a document without code and link targets; code blocks and [`RULES`] are empty lines.
fn markdown_prose(file: &Path, text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut in_rules = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        if fence {
            in_code = !in_code;
        }
        if !in_code && line.starts_with("## ") {
            in_rules = file == Path::new(RULES.0) && line == RULES.1;
        }
        lines.push(if fence || in_code || in_rules {
            String::new()
        } else {
            without_targets(&without_code(line))
        });
    }
    lines
}

/// Comment and string literals of a line. A literal without a space is not prose.
fn rust_prose(line: &str) -> String {
    let mut prose = String::new();
    let mut literal: Option<String> = None;
    let mut rest = line.char_indices().peekable();
    while let Some((at, c)) = rest.next() {
        match (&mut literal, c) {
            (Some(text), '"') => {
                if text.contains(' ') {
                    prose.push_str(text);
                    prose.push('\n');
                }
                literal = None;
            }
            (Some(_), '\\') => {
                rest.next();
            }
            (Some(text), c) => text.push(c),
            // A quotation mark as a character.
            (None, '"') if line[..at].ends_with('\'') => {}
            (None, '"') => literal = Some(String::new()),
            (None, '/') if line[at..].starts_with("//") => {
                prose.push_str(&without_code(&line[at..]));
                break;
            }
            (None, _) => {}
        }
    }
    prose
}

/// The text without parts in backquotes.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// Text without the targets of links.
fn without_targets(line: &str) -> String {
    let mut parts = line.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str("] ");
        text.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(prose: &str) -> Vec<&'static str> {
        relapses(prose).map(|(word, _)| word).collect()
    }

    #[test]
    fn whole_words_are_found_in_any_case() {
        assert_eq!(found("Nobody reads it"), ["nobody"]);
        assert_eq!(found("the row nobody_asks, renewed anew-style"), [""; 0]);
        assert_eq!(found("All but for one"), ["but for"]);
    }

    #[test]
    fn comments_and_literals_with_a_space_are_prose() {
        let line = r#"let user = "nobody"; fail("it is written anew"); // for `nobody`, whoever"#;
        assert_eq!(found(&rust_prose(line)), ["anew", "whoever"]);
        assert_eq!(found(&rust_prose("fn whoever_asks() {}")), [""; 0]);
    }

    #[test]
    fn code_and_targets_of_markdown_are_not_prose() {
        let text = "see [it](anew.md) and `anew`\n```\nanew\n```\n## Language\nanew\n## Next\nanew";
        let prose = |file: &str| markdown_prose(Path::new(file), text).join("\n");
        assert_eq!(prose("README.md").matches("anew").count(), 2);
        assert_eq!(prose(RULES.0).matches("anew").count(), 1);
    }
}
