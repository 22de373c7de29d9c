//! `cargo xtask charts`: the Helm charts, checked without a cluster.
//!
//! ```text
//!  ci/*.yaml ──► helm 3 and 4, two Kubernetes versions ──► objects ──► schemas of Kubernetes
//!                                                              ├─► flags of the programs
//!                                                              └─► alerts, dashboards: metrics, docs
//! ```

mod alerts;
mod examples;
mod flags;
mod metrics;
mod owners;
mod readme;
mod refused;
mod render;
mod rights;
mod settings;
mod tools;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use crate::repository;
pub(crate) use tools::Tools;

/// The charts, below `charts/`. The first is the source of the files that both have.
const CHARTS: [&str; 2] = ["holdfast", "holdfast-sdp"];
/// Templates that both charts have.
const SHARED: [&str; 2] = ["templates/_names.tpl", "templates/_sdp-pod.tpl"];

/// The template expression that begins the names of objects.
const NAME: &str = "{{ include \"holdfast.fullname\" $ }}";

/// What to do with files that are made from other files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Derived {
    /// Report files that are out of date.
    Check,
    /// Write files that are out of date.
    Write,
}

/// Directory of the chart `name`.
fn chart(name: &str) -> PathBuf {
    repository::root().join("charts").join(name)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// Runs all checks; reports all problems before it fails.
pub(crate) fn run(derived: Derived) -> Result<()> {
    let mut problems = copies(derived)?;
    problems.extend(readme::problems(derived)?);
    problems.extend(metrics::problems()?);
    problems.extend(flags::problems(derived)?);
    let tools = Tools::install()?;
    let rendered = render::all(&tools, &mut problems)?;
    problems.extend(refused::problems(&tools)?);
    problems.extend(owners::problems(&tools)?);
    problems.extend(settings::problems(&rendered)?);
    problems.extend(rights::problems(&rendered)?);
    problems.extend(alerts::problems(&tools)?);
    problems.extend(examples::problems(&tools)?);
    for problem in &problems {
        eprintln!("  {problem}");
    }
    if !problems.is_empty() {
        bail!("{} problems in charts", problems.len());
    }
    Ok(())
}

/// Checks the files that both charts have, and the roles that tests read without helm.
fn copies(derived: Derived) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let [source, copy] = CHARTS.map(chart);
    for file in SHARED {
        let (from, to) = (source.join(file), copy.join(file));
        let text = read(&from)?;
        if fs::read_to_string(&to).is_ok_and(|found| found == text) {
            continue;
        }
        match derived {
            Derived::Write => fs::write(&to, text)?,
            Derived::Check => problems.push(format!(
                "charts/{}/{file} differs from that of {}: change the latter, then `cargo xtask \
                 charts --write`",
                CHARTS[1], CHARTS[0]
            )),
        }
    }
    // The rules of a role that is rendered only under a condition end before the condition does.
    let before_end = |rules: &str| rules.trim_end().trim_end_matches("{{- end }}").to_owned();
    for role in [
        "agent-clusterrole.yaml",
        "agent-role.yaml",
        "node-clusterrole.yaml",
        "reader-clusterrole.yaml",
        "reader-role.yaml",
        "resolver-clusterrole.yaml",
    ] {
        let text = read(&source.join("templates").join(role))?;
        let rules = text.split_once("\nrules:\n");
        let rules = rules.map(|(_, rules)| before_end(rules));
        let is_plain = |rules: &String| !rules.replace(NAME, "").contains("{{");
        if !rules.as_ref().is_some_and(is_plain) {
            problems.push(format!(
                "charts/holdfast/templates/{role}: the rules must be last and without template \
                 expressions except {NAME}: tests read them"
            ));
        }
    }
    Ok(problems)
}
