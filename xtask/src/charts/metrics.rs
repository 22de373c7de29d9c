//! Checks metrics in alerts and dashboards against docs/src/metrics.md.

use std::{collections::BTreeSet, fs};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{chart, read};
use crate::repository;

/// Endings of the names of series of a histogram and of an info metric.
const ENDINGS: [&str; 4] = ["_bucket", "_sum", "_count", ""];

/// Each metric in alerts or dashboards that the programs do not have.
pub(super) fn problems() -> Result<Vec<String>> {
    let page = read(&repository::root().join("docs/src/metrics.md"))?;
    let known: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name)
        .collect();
    let files = chart("holdfast").join("files");
    let mut problems = unknown(&known, "alerts.yaml", &read(&files.join("alerts.yaml"))?);
    let mut dashboards = 0;
    for entry in fs::read_dir(files.join("dashboards"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let dashboard: Value =
            serde_json::from_str(&read(&path)?).with_context(|| name.to_string())?;
        let mut queries = Vec::new();
        collect(&dashboard, &mut queries);
        if queries.is_empty() {
            problems.push(format!("dashboards/{name}: has no query"));
        }
        for query in queries {
            problems.extend(unknown(&known, &format!("dashboards/{name}"), &query));
        }
        dashboards += 1;
    }
    if dashboards == 0 {
        problems.push("files/dashboards: empty".to_owned());
    }
    Ok(problems)
}

/// Texts of all fields `expr` and `query`.
fn collect(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field {
                    Value::String(text) if name == "expr" || name == "query" => {
                        into.push(text.clone());
                    }
                    other => collect(other, into),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, into)),
        _ => {}
    }
}

fn unknown(known: &BTreeSet<&str>, file: &str, text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("holdfast_"))
        .filter(|word| {
            !ENDINGS.iter().any(|ending| {
                word.strip_suffix(ending)
                    .is_some_and(|name| known.contains(name))
            })
        })
        .map(|word| format!("charts/holdfast/files/{file}: {word} is not in docs/src/metrics.md"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_metrics_are_named() {
        let known = BTreeSet::from(["holdfast_a_total", "holdfast_b_seconds"]);
        let find = |text| unknown(&known, "f", text);
        assert!(find("rate(holdfast_a_total[5m]) > 0").is_empty());
        assert!(find("sum by (le) (holdfast_b_seconds_bucket{x=\"holdfast\"})").is_empty());
        assert!(find("holdfast_c > 1")[0].contains("holdfast_c"));
        assert_eq!(find("holdfast_a").len(), 1);
    }

    #[test]
    fn queries_are_found_at_any_depth() {
        let mut found = Vec::new();
        let dashboard = serde_json::json!({"panels": [{"targets": [{"expr": "a"}]}], "query": "b"});
        collect(&dashboard, &mut found);
        found.sort();
        assert_eq!(found, ["a", "b"]);
    }
}
