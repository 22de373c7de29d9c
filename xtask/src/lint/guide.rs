//! The guide as a whole: each page has a place in SUMMARY.md, each link to a heading finds it, and
//! each alert has a section of the runbook.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

use super::documents;
use crate::{repository, workspace};

/// Pages of the guide.
const PAGES: &str = "docs/src";
/// The page that lists all others, in the order of the guide.
const SUMMARY: &str = "docs/src/SUMMARY.md";
const ALERTS: &str = "charts/holdfast/files/alerts.yaml";
const RUNBOOK: &str = "docs/src/runbook.md";
/// Parts of each section of the runbook.
const PARTS: [&str; 4] = ["**Meaning.**", "**Still works.**", "**Look.**", "**Do.**"];

/// One line for each problem.
pub(super) fn problems() -> Result<Vec<String>> {
    let read = |file: &Path| fs::read_to_string(repository::root().join(file));
    let mut texts = BTreeMap::new();
    for file in workspace::files()? {
        if file.extension().is_some_and(|ending| ending == "md") {
            texts.insert(file.clone(), read(&file)?);
        }
    }
    let mut problems = without_a_place(&texts);
    problems.extend(lost_anchors(&texts));
    let runbook = texts.get(Path::new(RUNBOOK)).map_or("", String::as_str);
    problems.extend(runbook_problems(&read(Path::new(ALERTS))?, runbook));
    Ok(problems)
}

/// Pages that SUMMARY.md does not name: mdBook does not render them.
fn without_a_place(texts: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let summary = Path::new(SUMMARY);
    let named: BTreeSet<PathBuf> = texts
        .get(summary)
        .into_iter()
        .flat_map(|text| text.lines())
        .flat_map(documents::link_targets)
        .filter_map(|target| documents::local(summary, target))
        .collect();
    texts
        .keys()
        .filter(|file| file.starts_with(PAGES) && *file != summary && !named.contains(*file))
        .map(|file| format!("{SUMMARY}: does not name {}", file.display()))
        .collect()
}

/// Links to headings that do not exist.
fn lost_anchors(texts: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let anchors: BTreeMap<&Path, BTreeSet<String>> = texts
        .iter()
        .map(|(file, text)| (file.as_path(), anchors(text)))
        .collect();
    let mut problems = Vec::new();
    for (file, text) in texts {
        for (number, line) in prose(text) {
            for target in documents::link_targets(line) {
                let Some((page, anchor)) = target.split_once('#') else {
                    continue;
                };
                let page = match documents::local(file, page) {
                    Some(page) => page,
                    None if page.is_empty() => file.clone(),
                    None => continue,
                };
                if anchors
                    .get(page.as_path())
                    .is_some_and(|known| !known.contains(anchor))
                {
                    problems.push(format!(
                        "{}:{number}: {} has no heading `#{anchor}`",
                        file.display(),
                        page.display()
                    ));
                }
            }
        }
    }
    problems
}

/// Lines outside of code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !fence && !in_code
    })
}

/// Names by which links reach the headings of a document, as mdBook and forges make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(text) {
        let Some(heading) = line.strip_prefix('#') else {
            continue;
        };
        let heading = heading.trim_start_matches('#').trim();
        let anchor: String = shown(heading)
            .chars()
            .filter_map(|c| match c {
                c if c.is_whitespace() => Some('-'),
                c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
                _ => None,
            })
            .collect();
        let further = (1..).map(|count| format!("{anchor}-{count}"));
        let mut names = std::iter::once(anchor.clone()).chain(further);
        anchors.extend(names.find(|name| !anchors.contains(name)));
    }
    anchors
}

/// Text of a heading without the targets of its links.
fn shown(heading: &str) -> String {
    let mut parts = heading.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
    }
    text
}

/// Differences between the alerts and the sections of the runbook.
fn runbook_problems(alerts: &str, runbook: &str) -> Vec<String> {
    let alerts: Vec<&str> = alerts
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    let sections: BTreeMap<&str, &str> = runbook
        .split("\n## ")
        .skip(1)
        .map(|section| section.split_once('\n').unwrap_or((section, "")))
        .filter(|(heading, _)| heading.starts_with("Holdfast"))
        .collect();
    let mut problems = Vec::new();
    for alert in &alerts {
        let Some(section) = sections.get(alert) else {
            problems.push(format!("{RUNBOOK}: no section `## {alert}`"));
            continue;
        };
        let missing = PARTS.iter().filter(|part| !section.contains(**part));
        problems.extend(missing.map(|part| format!("{RUNBOOK}: {alert} has no part `{part}`")));
    }
    let strange = sections.keys().filter(|heading| !alerts.contains(*heading));
    problems.extend(strange.map(|heading| format!("{RUNBOOK}: {ALERTS} has no alert {heading}")));
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)]) -> BTreeMap<PathBuf, String> {
        let owned = |(file, text): &(&str, &str)| (PathBuf::from(file), (*text).to_owned());
        files.iter().map(owned).collect()
    }

    #[test]
    fn a_page_without_a_place_is_named() {
        let book = texts(&[
            (SUMMARY, "- [A](a.md)\n"),
            ("docs/src/a.md", ""),
            ("docs/src/b.md", ""),
            ("README.md", ""),
        ]);
        assert_eq!(
            without_a_place(&book),
            ["docs/src/SUMMARY.md: does not name docs/src/b.md"]
        );
    }

    #[test]
    fn headings_have_the_names_that_links_use() {
        let text =
            "# Why?\n## `A b`: c_d-e\n## See [x](y.md) too\n```sh\n# not one\n```\n## Why?\n";
        let expected = ["a-b-c_d-e", "see-x-too", "why", "why-1"];
        assert!(
            anchors(text).iter().eq(expected.iter()),
            "{:?}",
            anchors(text)
        );
    }

    #[test]
    fn a_link_to_a_heading_that_is_not_there_is_named() {
        let book = texts(&[
            (
                "a.md",
                "# A\n[here](#a) [there](b.md#b) [lost](b.md#c) [own](#x)\n",
            ),
            ("b.md", "# B\n"),
        ]);
        assert_eq!(
            lost_anchors(&book),
            [
                "a.md:2: b.md has no heading `#c`",
                "a.md:2: a.md has no heading `#x`"
            ]
        );
    }

    #[test]
    fn each_alert_has_a_section_with_every_part() {
        let alerts = "rules:\n  - alert: HoldfastA\n    expr: a > 0\n  - alert: HoldfastB\n";
        let whole = "**Meaning.** a\n**Still works.** b\n**Look.** c\n**Do.** d\n";
        let right =
            format!("# Runbook\n\n## First\n\n## HoldfastA\n{whole}\n## HoldfastB\n{whole}");
        assert!(runbook_problems(alerts, &right).is_empty());
        let wrong =
            "# Runbook\n\n## HoldfastA\n**Meaning.** a\n**Look.** c\n**Do.** d\n\n## HoldfastC\n";
        assert_eq!(
            runbook_problems(alerts, wrong),
            [
                "docs/src/runbook.md: HoldfastA has no part `**Still works.**`",
                "docs/src/runbook.md: no section `## HoldfastB`",
                "docs/src/runbook.md: charts/holdfast/files/alerts.yaml has no alert HoldfastC"
            ]
        );
    }
}
