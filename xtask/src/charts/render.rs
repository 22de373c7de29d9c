//! Rendering: `helm lint` and `helm template` of every value set, by both helms, for two versions
//! of Kubernetes, and the validation of the objects by Kubernetes' schemas.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{CHARTS, chart, tools, tools::Tools};
use crate::process;

/// The oldest version with every object that the agent reads, and the newest version that is
/// checked.
const KUBERNETES: [&str; 2] = ["1.33.0", "1.36.0"];
/// Kinds whose schemas belong to other projects.
const FOREIGN: [&str; 2] = ["PrometheusRule", "ServiceMonitor"];

/// Objects of a value set.
#[derive(Debug)]
pub(super) struct Rendered {
    /// Chart and file of the value set, as `chart/file`.
    pub(super) name: String,
    pub(super) objects: Vec<Value>,
}

impl Rendered {
    pub(super) fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.objects.iter().filter(move |one| one["kind"] == kind)
    }
}

/// Renders and validates all value sets. Returns the objects for the newest version.
pub(super) fn all(tools: &Tools, problems: &mut Vec<String>) -> Result<Vec<Rendered>> {
    for name in CHARTS {
        for helm in &tools.helms {
            let args = ["lint", "--strict", &tools::text(&chart(name))?];
            if let Err(error) = process::output(process::command(&tools::text(helm)?, &args)) {
                problems.push(format!("charts/{name}: {error:#}"));
            }
        }
    }
    let mut rendered = Vec::new();
    for version in KUBERNETES {
        rendered.clear();
        let mut files = Vec::new();
        for name in CHARTS {
            for values in value_sets(name)? {
                let file = values.file_name().unwrap_or_default().to_string_lossy();
                let set = format!("{name}/{file}");
                let mut texts = Vec::new();
                for helm in &tools.helms {
                    match template(&tools::text(helm)?, name, version, &values) {
                        Ok(text) => texts.push(text),
                        Err(error) => problems.push(format!("charts/{set}: {error:#}")),
                    }
                }
                let Some(text) = texts.pop() else { continue };
                let objects = documents(&text).with_context(|| set.clone())?;
                for other in texts {
                    if comparable(documents(&other)?) != comparable(objects.clone()) {
                        problems.push(format!("charts/{set}: helm 3 and 4 render it differently"));
                    }
                }
                let out = tools.scratch.join(set.replace('/', "-"));
                fs::write(&out, text)?;
                files.push(tools::text(&out)?);
                rendered.push(Rendered { name: set, objects });
            }
        }
        problems.extend(validate(tools, version, &files)?);
    }
    Ok(rendered)
}

/// The objects without the content of Secrets, because each rendering makes new certificates.
fn comparable(mut objects: Vec<Value>) -> Vec<Value> {
    for object in &mut objects {
        if object["kind"] == "Secret" {
            object["data"].take();
        }
    }
    objects
}

fn value_sets(name: &str) -> Result<Vec<PathBuf>> {
    let mut sets = Vec::new();
    for entry in fs::read_dir(chart(name).join("ci"))? {
        sets.push(entry?.path());
    }
    sets.sort();
    Ok(sets)
}

fn template(helm: &str, name: &str, version: &str, values: &std::path::Path) -> Result<String> {
    let (chart, values) = (tools::text(&chart(name))?, tools::text(values)?);
    let args = ["template", name, &chart, "-n", "kube-system"];
    let mut command = process::command(helm, &args);
    command.args(["--kube-version", version, "-f", &values]);
    process::output(command)
}

/// The objects of a stream of documents.
pub(super) fn documents(text: &str) -> Result<Vec<Value>> {
    use serde::Deserialize as _;
    let mut objects = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value = Value::deserialize(document)?;
        if !value.is_null() {
            objects.push(value);
        }
    }
    Ok(objects)
}

fn validate(tools: &Tools, version: &str, files: &[String]) -> Result<Vec<String>> {
    let module = ["-m", "kubernetes_validate", "--strict", "-k", version];
    let mut command = process::command(&tools::text(&tools.python)?, &module);
    let output = command
        .args(files)
        .output()
        .context("kubernetes-validate")?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let mut problems = Vec::new();
    for line in text.lines() {
        let is_foreign = line.contains("Couldn't find schema")
            && FOREIGN
                .iter()
                .any(|kind| line.contains(&format!("kind {kind} ")));
        if !line.starts_with("INFO") && !is_foreign && !line.trim().is_empty() {
            problems.push(format!("Kubernetes {version}: {line}"));
        }
    }
    if !output.status.success() && problems.is_empty() {
        problems.push(format!("kubernetes-validate failed ({})", output.status));
    }
    Ok(problems)
}
