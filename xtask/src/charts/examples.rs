//! Checks documents in the guide against the CustomResourceDefinitions of the chart.

use std::fs;

use anyhow::Result;
use serde_json::{Value, json};

use super::{chart, read, render, tools, tools::Tools};
use crate::{process, repository, workspace};

/// Checks objects against definitions, both in one JSON file.
const CHECK: &str = include_str!("check_objects.py");

/// Groups of the kinds that the chart defines.
const GROUPS: [&str; 3] = ["cilium.io/", "k8s.ovn.org/", "network.openshift.io/"];

/// Documents that the definitions refuse.
pub(super) fn problems(tools: &Tools) -> Result<Vec<String>> {
    let mut definitions = Vec::new();
    for entry in fs::read_dir(chart("holdfast").join("files/crds"))? {
        definitions.extend(render::documents(&read(&entry?.path())?)?);
    }
    let (mut objects, mut unread) = (Vec::new(), Vec::new());
    for file in workspace::files()? {
        if file.extension().is_none_or(|ext| ext != "md") {
            continue;
        }
        for block in blocks(&read(&repository::root().join(&file))?) {
            let found = match render::documents(&block) {
                Ok(found) => found,
                // Excerpts and templates are not documents.
                Err(_) if !names_a_group(&block) => continue,
                Err(error) => {
                    unread.push(format!("{}: an example: {error:#}", file.display()));
                    continue;
                }
            };
            for object in found {
                let version = object["apiVersion"].as_str().unwrap_or_default();
                if GROUPS.iter().any(|group| version.starts_with(group)) {
                    objects.push(json!({"file": file, "object": object}));
                }
            }
        }
    }
    if objects.is_empty() {
        return Ok(vec!["the guide has no example of a policy".to_owned()]);
    }
    let input: Value = json!({"definitions": definitions, "objects": objects});
    let file = tools.scratch.join("objects.json");
    fs::write(&file, input.to_string())?;
    let args = ["-c", CHECK, &tools::text(&file)?];
    let output = process::output(process::command(&tools::text(&tools.python)?, &args))?;
    unread.extend(output.lines().map(ToOwned::to_owned));
    Ok(unread)
}

/// Whether a text has an object of one of the [`GROUPS`].
fn names_a_group(block: &str) -> bool {
    let mut groups = GROUPS.iter();
    groups.any(|group| block.contains(&format!("apiVersion: {group}")))
}

/// Blocks of YAML in Markdown.
fn blocks(page: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut inside: Option<String> = None;
    for line in page.lines() {
        match &mut inside {
            Some(_) if line.trim() == "```" => blocks.extend(inside.take()),
            Some(block) => {
                block.push_str(line);
                block.push('\n');
            }
            None if line.trim() == "```yaml" => inside = Some(String::new()),
            None => {}
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_yaml_are_found() {
        let page = "a\n```yaml\nkind: X\n```\n```sh\nkind: Y\n```\n";
        assert_eq!(blocks(page), ["kind: X\n"]);
    }
}
