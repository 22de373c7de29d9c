//! The table of values in the charts' READMEs, written from values.yaml.

use std::fs;

use anyhow::Result;

use super::{CHARTS, Derived, chart, read};

const BEGIN: &str = "<!-- Written by `cargo xtask charts --write` from values.yaml. -->";

/// READMEs that are out of date.
pub(super) fn problems(derived: Derived) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for name in CHARTS {
        let (page, values) = (
            chart(name).join("README.md"),
            chart(name).join("values.yaml"),
        );
        let found = read(&page)?;
        let kept = found
            .split_once(BEGIN)
            .map_or(found.as_str(), |(kept, _)| kept);
        let wanted = format!(
            "{}\n\n{BEGIN}\n\n{}",
            kept.trim_end(),
            table(&read(&values)?)
        );
        if found == wanted {
            continue;
        }
        match derived {
            Derived::Write => fs::write(page, wanted)?,
            Derived::Check => problems.push(format!(
                "charts/{name}/README.md: out of date; write it with `cargo xtask charts --write`"
            )),
        }
    }
    Ok(problems)
}

/// Keys with their defaults and the comments above them.
fn table(values: &str) -> String {
    let mut rows = String::from("| Value | Default | Meaning |\n|---|---|---|\n");
    let mut path: Vec<&str> = Vec::new();
    let mut comment = String::new();
    // Comments above the first empty line are about the file.
    let body = values.split_once("\n\n").map_or(values, |(_, body)| body);
    for line in body.lines() {
        let text = line.trim_start();
        let depth = (line.len() - text.len()) / 2;
        if let Some(words) = text.strip_prefix("# ") {
            comment = format!("{comment} {words}").trim().to_owned();
            continue;
        }
        let Some((key, value)) = text.split_once(':').filter(|_| !text.starts_with("- ")) else {
            if text.is_empty() {
                comment.clear();
            }
            continue;
        };
        path.truncate(depth);
        path.push(key);
        let meaning = std::mem::take(&mut comment).replace('|', "\\|");
        let value = value.split(" #").next().unwrap_or_default().trim();
        if !(value.is_empty() && meaning.is_empty()) {
            let default = if value.is_empty() {
                String::new()
            } else {
                format!("`{value}`")
            };
            rows.push_str(&format!(
                "| `{}` | {default} | {meaning} |\n",
                path.join(".")
            ));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_a_row() {
        let values = "# File.\n\n# A thing\n# of two lines.\na:\n  # Its port.\n  port: 1 # x\n  caps:\n    - X\nb: {}\n";
        let rows = table(values);
        assert!(
            rows.contains("| `a` |  | A thing of two lines. |\n"),
            "{rows}"
        );
        assert!(rows.contains("| `a.port` | `1` | Its port. |\n"), "{rows}");
        assert!(rows.contains("| `b` | `{}` |  |\n"), "{rows}");
        assert!(!rows.contains("caps"), "{rows}");
    }
}
