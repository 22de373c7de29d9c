//! Licence texts of a program: our own, and those of the crates that are linked into it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
    fs,
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{repository, workspace};

/// Beginnings of the names of files with licence texts.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// Writes `LICENSE` and `third-party.txt` into `to`.
pub(crate) fn write(to: &Path, program: &str) -> Result<()> {
    fs::create_dir_all(to)?;
    fs::copy(repository::root().join("LICENSE"), to.join("LICENSE"))?;
    let metadata = workspace::metadata(true)?;
    let mut text = format!(
        "Crates in {program}, with their licences. The eBPF programs in it are under MIT OR \
         GPL-2.0-only.\n\n"
    );
    // Many crates have the same text.
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in linked(&metadata, program)? {
        let field = |name: &str| package[name].as_str().unwrap_or("?").to_owned();
        let name = format!("{} {}", field("name"), field("version"));
        writeln!(text, "{name}: {}", field("license"))?;
        let manifest = field("manifest_path");
        let dir = Path::new(&manifest)
            .parent()
            .context("a crate's directory")?;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let file = entry.file_name().to_string_lossy().to_uppercase();
            if NAMES.iter().any(|beginning| file.starts_with(beginning)) && entry.path().is_file() {
                let found = String::from_utf8_lossy(&fs::read(entry.path())?).into_owned();
                texts.entry(found).or_default().insert(name.clone());
            }
        }
    }
    for (found, crates) in texts {
        let crates: Vec<String> = crates.into_iter().collect();
        write!(
            text,
            "\n---- {} ----\n\n{}\n",
            crates.join(", "),
            found.trim()
        )?;
    }
    Ok(fs::write(to.join("third-party.txt"), text)?)
}

/// Packages of other authors on which the program depends, except for build and tests.
fn linked<'m>(metadata: &'m Value, program: &str) -> Result<Vec<&'m Value>> {
    let packages: HashMap<&str, &Value> = workspace::packages(metadata)
        .filter_map(|package| Some((package["id"].as_str()?, package)))
        .collect();
    let nodes: HashMap<&str, &Value> = metadata["resolve"]["nodes"]
        .as_array()
        .context("`cargo metadata` resolves no dependencies")?
        .iter()
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let first = packages
        .iter()
        .find(|(_, package)| package["name"] == *program);
    let mut waiting = vec![
        *first
            .with_context(|| format!("the workspace has no package `{program}`"))?
            .0,
    ];
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !seen.insert(id) {
            continue;
        }
        let deps = nodes.get(id).map(|node| &node["deps"]);
        for dep in deps.and_then(Value::as_array).into_iter().flatten() {
            let kinds = dep["dep_kinds"].as_array().into_iter().flatten();
            if kinds.into_iter().any(|kind| kind["kind"].is_null()) {
                waiting.extend(dep["pkg"].as_str());
            }
        }
    }
    let mut found: Vec<&Value> = seen
        .into_iter()
        .filter_map(|id| packages.get(id).copied())
        .filter(|package| !package["source"].is_null())
        .collect();
    found.sort_by_key(|package| package["name"].as_str());
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_the_build_are_left_out() {
        let metadata = serde_json::json!({
            "packages": [
                {"id": "a", "name": "a", "source": null},
                {"id": "b", "name": "b", "source": "registry"},
                {"id": "c", "name": "c", "source": "registry"},
            ],
            "resolve": {"nodes": [
                {"id": "a", "deps": [
                    {"pkg": "b", "dep_kinds": [{"kind": null}]},
                    {"pkg": "c", "dep_kinds": [{"kind": "build"}]},
                ]},
                {"id": "b", "deps": []},
            ]},
        });
        let names: Vec<_> = linked(&metadata, "a")
            .unwrap()
            .iter()
            .map(|p| &p["name"])
            .collect();
        assert_eq!(names, ["b"]);
    }
}
