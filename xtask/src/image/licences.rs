//! Licences by component: our own, the licences of the crates, and the places of all others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{
    debian,
    inventory::{Inventory, Kind},
};
use crate::{process, repository};

/// Beginnings of the names of files with licence texts.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];
/// Copyright of the standard library and of the crates in it, below the compiler's directory.
const LIBRARY: &str = "share/doc/rust/COPYRIGHT-library.html";
/// Names of the files that [`write()`] writes.
pub(super) const FILES: [&str; 3] = ["LICENSE", "rust-library.html", "third-party.txt"];

/// Writes [`FILES`] into the directory `to`.
pub(super) fn write(to: &Path, inventory: &Inventory) -> Result<()> {
    fs::create_dir_all(to)?;
    fs::copy(repository::root().join("LICENSE"), to.join(FILES[0]))?;
    let compiler = process::output(process::command("rustc", &["--print", "sysroot"]))?;
    let library = Path::new(compiler.trim()).join(LIBRARY);
    fs::copy(&library, to.join(FILES[1])).with_context(|| library.display().to_string())?;
    Ok(fs::write(to.join(FILES[2]), third_party(inventory)?)?)
}

fn third_party(inventory: &Inventory) -> Result<String> {
    let mut text = match inventory.kind {
        Kind::Image => "Components of this image, with their licences.\n\n",
        Kind::Package => "Components of this package, with their licences.\n\n",
    }
    .to_owned();
    for debian::Package { name, version, .. } in &inventory.debian {
        writeln!(text, "{name} {version}: /usr/share/doc/{name}/copyright")?;
    }
    for debian::Package { name, version, .. } in &inventory.linked {
        writeln!(text, "{name} {version}, in holdfast-cni: texts below")?;
    }
    let library = &inventory.library;
    writeln!(text, "Rust standard library {library}: rust-library.html\n")?;
    // Many crates have the same text.
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in &inventory.linked {
        let of = texts.entry(package.copyright.clone().unwrap_or_default());
        of.or_default().insert(package.name.clone());
    }
    let mut crates = inventory.crates();
    crates.extend(&inventory.macros);
    for one in crates {
        let package = inventory.package(one)?;
        let name = format!("{} {}", one.0, one.1);
        let licence = package["license"].as_str().unwrap_or("?");
        writeln!(text, "{name}: {licence}")?;
        if package["source"].is_null() {
            continue;
        }
        for found in licence_texts(package)? {
            texts.entry(found).or_default().insert(name.clone());
        }
    }
    for (found, of) in texts {
        let of: Vec<String> = of.into_iter().collect();
        write!(text, "\n---- {} ----\n\n{}\n", of.join(", "), found.trim())?;
    }
    Ok(text)
}

fn licence_texts(package: &Value) -> Result<Vec<String>> {
    let manifest = package["manifest_path"].as_str().unwrap_or_default();
    let dir = Path::new(manifest).parent();
    let mut texts = Vec::new();
    for entry in fs::read_dir(dir.context("a crate's directory")?)? {
        let entry = entry?;
        let file = entry.file_name().to_string_lossy().to_uppercase();
        if NAMES.iter().any(|beginning| file.starts_with(beginning)) && entry.path().is_file() {
            texts.push(String::from_utf8_lossy(&fs::read(entry.path())?).into_owned());
        }
    }
    Ok(texts)
}
