//! Checks flags, keys, variables and probes of the rendered pods against the programs themselves.

use std::{collections::BTreeSet, process::Command};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::render::Rendered;
use crate::{process, workspace};

/// Container and package of a program, and the arguments before its flags.
const PROGRAMS: [(&str, &[&str]); 2] = [("holdfast-agent", &["run"]), ("holdfast-sdp", &[])];
/// Further commands of the agent, whose containers have names of their own.
const COMMANDS: [(&str, &[&str]); 2] = [
    ("holdfast-relay", &["relay"]),
    ("holdfast-netpol", &["netpol", "run"]),
];
/// Variables of the programs' libraries.
const OTHERS: [&str; 1] = ["RUST_BACKTRACE"];

/// Builds the programs. Returns their help texts.
pub(super) fn helps() -> Result<Vec<String>> {
    let mut build = workspace::build();
    build.arg("--quiet");
    process::run(build)?;
    let helps = PROGRAMS.iter();
    let helps = helps.map(|(name, before)| process::output(program(name, before, &["--help"])?));
    helps.collect()
}

/// Each setting that a program does not take. The programs are those that [`helps`] built.
pub(super) fn problems(rendered: &[Rendered]) -> Result<Vec<String>> {
    let mut problems = BTreeSet::new();
    for set in rendered {
        for workload in set.of_kind("DaemonSet").chain(set.of_kind("Deployment")) {
            container(set, workload, &mut problems)?;
        }
        // A pod of "helm test".
        for pod in set.of_kind("Pod") {
            let args: Vec<&str> = texts(&pod["spec"]["containers"][0]["args"]).collect();
            if let Err(reason) = accepts(PROGRAMS[0].0, &args)? {
                problems.insert(format!("charts/{}: test: {reason}", set.name));
            }
        }
        for map in set.of_kind("ConfigMap") {
            if map["metadata"]["name"] == "holdfast-config" {
                keys(set, map, &mut problems)?;
            }
        }
    }
    Ok(problems.into_iter().collect())
}

fn container(set: &Rendered, object: &Value, problems: &mut BTreeSet<String>) -> Result<()> {
    let container = &object["spec"]["template"]["spec"]["containers"][0];
    let name = container["name"].as_str().context("a container's name")?;
    let args: Vec<&str> = texts(&container["args"]).collect();
    let commands = COMMANDS.map(|(container, before)| (container, PROGRAMS[0].0, before));
    let programs = PROGRAMS.map(|(program, before)| (program, program, before));
    let mut all = programs.into_iter().chain(commands);
    let found = all.find(|(container, ..)| *container == name);
    let (_, name, before) = found.with_context(|| format!("{name} is no program"))?;
    // Every value is parsed before the help is printed.
    if let Err(reason) = accepts(name, &args)? {
        problems.insert(format!("charts/{}: {name}: {reason}", set.name));
    }
    let help = process::output(program(name, before, &["--help"])?)?;
    // Help text is wrapped, also within `[env: NAME=]`.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for variable in container["env"].as_array().into_iter().flatten() {
        let variable = variable["name"].as_str().unwrap_or_default();
        if !help.contains(&format!("[env: {variable}=")) && !OTHERS.contains(&variable) {
            problems.insert(format!(
                "charts/{}: {name} does not read {variable}",
                set.name
            ));
        }
    }
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        let command: Vec<&str> = texts(&container[probe]["exec"]["command"]).collect();
        if let [program, arguments @ ..] = command.as_slice()
            && let Err(reason) = accepts(program, arguments)?
        {
            problems.insert(format!("charts/{}: {probe}: {reason}", set.name));
        }
    }
    Ok(())
}

/// A key must be a flag of one program, and its value valid for each program that has the flag.
fn keys(set: &Rendered, map: &Value, problems: &mut BTreeSet<String>) -> Result<()> {
    for (key, value) in map["data"].as_object().into_iter().flatten() {
        let flag = format!("--{key}={}", value.as_str().unwrap_or_default());
        let mut known = false;
        for (name, before) in PROGRAMS {
            let arguments: Vec<&str> = before.iter().copied().chain([flag.as_str()]).collect();
            match accepts(name, &arguments)? {
                Err(reason) if reason.contains("unexpected argument") => {}
                Err(reason) => {
                    known = true;
                    problems.insert(format!("charts/{}: {name}: {reason}", set.name));
                }
                Ok(()) => known = true,
            }
        }
        if !known {
            problems.insert(format!("charts/{}: no program has the key {key}", set.name));
        }
    }
    Ok(())
}

/// Whether the program accepts these arguments; if not, the first line of its error.
fn accepts(name: &str, arguments: &[&str]) -> Result<Result<(), String>> {
    let output = program(name, arguments, &["--help"])?.output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    let first = error.lines().next().unwrap_or_default().to_owned();
    Ok(if output.status.success() {
        Ok(())
    } else {
        Err(first)
    })
}

fn program(name: &str, before: &[&str], after: &[&str]) -> Result<Command> {
    let path = workspace::target_dir()?.join("debug").join(name);
    let mut command = Command::new(path);
    command.args(before).args(after);
    Ok(command)
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}
