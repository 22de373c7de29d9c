//! The alerts: promtool's checks, a test for each, and the table of docs/src/operating.md.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{chart, read, render, tools, tools::Tools};
use crate::{process, repository};

const PAGE: &str = "docs/src/operating.md";
const HEAD: &str = "| Alert | Expression | For | Meaning |";

/// Everything that is wrong with the alerts.
pub(super) fn problems(tools: &Tools) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let (alerts, tests) = (
        chart("holdfast").join("files/alerts.yaml"),
        chart("holdfast").join("tests/alerts.yaml"),
    );
    for (verb, file) in [("check", &alerts), ("test", &tests)] {
        let args = [verb, "rules", &tools::text(file)?];
        let command = process::command(&tools::text(&tools.promtool)?, &args);
        if let Err(error) = process::output(command) {
            problems.push(format!("{error:#}"));
        }
    }
    let [alerts, tests] = [one(&read(&alerts)?)?, one(&read(&tests)?)?];
    let rules: Vec<&Value> = list(&alerts["groups"])
        .flat_map(|g| list(&g["rules"]))
        .collect();
    let tested: BTreeSet<&str> = list(&tests["tests"])
        .flat_map(|test| list(&test["alert_rule_test"]))
        .filter(|case| list(&case["exp_alerts"]).next().is_some())
        .filter_map(|case| case["alertname"].as_str())
        .collect();
    for rule in &rules {
        let name = rule["alert"].as_str().context("a rule without alert")?;
        if !tested.contains(name) {
            problems.push(format!(
                "charts/holdfast/tests/alerts.yaml: {name} never fires in it"
            ));
        }
    }
    let page = read(&repository::root().join(PAGE))?;
    let (expected, found) = (rules.iter().map(|rule| row(rule)), rows(&page));
    let expected: Vec<String> = expected.collect();
    for row in expected.iter().filter(|row| !found.contains(row)) {
        problems.push(format!("{PAGE}: the table of alerts lacks the row {row}"));
    }
    for row in found.iter().filter(|row| !expected.contains(row)) {
        problems.push(format!(
            "{PAGE}: files/alerts.yaml has no alert for the row {row}"
        ));
    }
    Ok(problems)
}

fn one(text: &str) -> Result<Value> {
    render::documents(text)?
        .into_iter()
        .next()
        .context("no document")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn row(rule: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (name, expr) = (text(&rule["alert"]), text(&rule["expr"]));
    let (wait, meaning) = (text(&rule["for"]), text(&rule["annotations"]["summary"]));
    format!("| {name} | `{expr}` | {wait} | {meaning} |")
}

fn rows(page: &str) -> Vec<String> {
    let table = page.lines().skip_while(|line| *line != HEAD).skip(2);
    table
        .take_while(|line| line.starts_with('|'))
        .map(ToOwned::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_the_table_has_the_rules_fields() {
        let rule = serde_json::json!({
            "alert": "A", "expr": "a > 0", "annotations": {"summary": "bad"},
        });
        assert_eq!(row(&rule), "| A | `a > 0` |  | bad |");
        let page = format!("x\n{HEAD}\n|---|---|---|---|\n{}\n\ny", row(&rule));
        assert_eq!(rows(&page), [row(&rule)]);
    }
}
