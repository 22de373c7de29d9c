//! Checks which crates use which others, and that pure crates stay pure.

use anyhow::Result;
use serde_json::Value;

use crate::{process, workspace};

/// The crates that users run, each with the workspace's crates that it may use. A new arrow is a
/// decision (ARCHITECTURE.md, "Crates").
const ARROWS: [(&str, &[&str]); 15] = [
    ("shared-maps", &[]),
    ("fqdn-proto", &[]),
    ("nearest", &[]),
    ("netpol", &["nearest"]),
    ("holdfast-cni", &[]),
    ("dns-policy", &["shared-maps"]),
    ("dns-wire", &["dns-policy"]),
    ("limits", &["dns-policy", "shared-maps"]),
    ("daemon", &["limits", "nearest", "shared-maps"]),
    (
        "holdfast-sdp",
        &[
            "daemon",
            "dns-policy",
            "dns-wire",
            "fqdn-proto",
            "limits",
            "shared-maps",
        ],
    ),
    (
        "holdfast-agent-core",
        &["dns-policy", "limits", "nearest", "netpol", "shared-maps"],
    ),
    (
        "holdfast-agent-datapath",
        &["daemon", "holdfast-agent-core", "netpol", "shared-maps"],
    ),
    (
        "holdfast-agent-cluster",
        &[
            "daemon",
            "dns-policy",
            "fqdn-proto",
            "holdfast-agent-core",
            "limits",
            "shared-maps",
        ],
    ),
    (
        "holdfast-agent-lib",
        &[
            "daemon",
            "dns-policy",
            "dns-wire",
            "fqdn-proto",
            "holdfast-agent-cluster",
            "holdfast-agent-core",
            "holdfast-agent-datapath",
            "holdfast-sdp",
            "limits",
            "nearest",
            "netpol",
            "shared-maps",
        ],
    ),
    (
        "holdfast-agent",
        &[
            "daemon",
            "dns-policy",
            "holdfast-agent-cluster",
            "holdfast-agent-core",
            "holdfast-agent-datapath",
            "holdfast-agent-lib",
            "netpol",
            "shared-maps",
        ],
    ),
];

/// Crates without input and output.
const PURE: [&str; 6] = [
    "dns-policy",
    "dns-wire",
    "holdfast-agent-core",
    "limits",
    "nearest",
    "netpol",
];
/// Crates on which no pure crate and none of their tests may depend, even indirectly: runtimes,
/// sockets, maps, netlink.
const IMPURE: [&str; 7] = ["aya", "hyper", "kube", "nix", "rtnetlink", "tokio", "tonic"];

/// Everything that breaks a rule, one line each.
pub(super) fn problems() -> Result<Vec<String>> {
    let metadata = workspace::metadata(false)?;
    let members: Vec<&str> = workspace::packages(&metadata)
        .filter_map(|package| package["name"].as_str())
        .collect();
    let mut problems = Vec::new();
    for package in workspace::packages(&metadata) {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = ARROWS.iter().find(|(from, _)| *from == name) else {
            continue;
        };
        let uses = package["dependencies"].as_array().into_iter().flatten();
        let uses: Vec<&Value> = uses
            .filter(|dependency| dependency["kind"].is_null())
            .collect();
        if uses.iter().any(|dependency| is_for_tests(dependency)) {
            problems.push(format!(
                "{name} enables the feature `testing` of holdfast-agent-core, which only dev-dependencies may"
            ));
        }
        let uses = uses.iter();
        let uses: Vec<&str> = uses.filter_map(|to| to["name"].as_str()).collect();
        for to in uses.iter().filter(|to| members.contains(to)) {
            if !allowed.contains(to) {
                problems.push(format!(
                    "{name} uses {to}: xtask/src/lint/arrows.rs does not allow it"
                ));
            }
        }
        for to in allowed.iter().filter(|to| !uses.contains(to)) {
            problems.push(format!(
                "{name} does not use {to} any more; remove it from xtask/src/lint/arrows.rs"
            ));
        }
    }
    for (name, _) in ARROWS {
        if !members.contains(&name) {
            problems.push(format!(
                "xtask/src/lint/arrows.rs names {name}, which is no crate of the workspace"
            ));
        }
    }
    for name in PURE {
        let args = [
            "tree",
            "--locked",
            "--package",
            name,
            "--edges",
            "normal,dev",
            "--prefix",
            "none",
        ];
        let tree = process::output(process::command("cargo", &args))?;
        problems.extend(impure(name, &tree));
    }
    Ok(problems)
}

/// Whether a dependency is the core with its features for tests.
fn is_for_tests(dependency: &Value) -> bool {
    let mut features = dependency["features"].as_array().into_iter().flatten();
    dependency["name"] == "holdfast-agent-core" && features.any(|feature| feature == "testing")
}

/// The packages in `tree`, one in each line, on which the pure crate `name` must not depend.
fn impure(name: &str, tree: &str) -> Vec<String> {
    let has = |found: &&str| {
        tree.lines()
            .any(|line| line.split(' ').next() == Some(*found))
    };
    let found = IMPURE.iter().copied().filter(has);
    found
        .map(|found| format!("{name} is pure, and depends on {found}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_below_a_pure_crate_is_named() {
        let tree = "core v0.1.0 (/x)\nserde v1.0.0\ntokio-util v0.7.0\ntokio v1.50.0 (*)\n";
        assert_eq!(impure("core", tree), ["core is pure, and depends on tokio"]);
        assert!(impure("core", "core v0.1.0\ntokio-util v0.7.0\n").is_empty());
    }

    #[test]
    fn only_the_core_has_a_feature_for_tests() {
        let dependency = |name, features| serde_json::json!({"name": name, "features": features});
        assert!(is_for_tests(&dependency(
            "holdfast-agent-core",
            ["testing"]
        )));
        assert!(!is_for_tests(&dependency("holdfast-agent-core", ["other"])));
        assert!(!is_for_tests(&dependency("kube", ["testing"])));
    }
}
