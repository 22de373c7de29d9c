//! Checks of an image's list of components, against other sources than the list was made from.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{
    crates::Crate,
    debian::{self, GENERATED, STATUS, SUMS},
    inventory::{Kind, PROGRAMS},
    licences, records, sbom, scanner,
};
use crate::{process, repository, workspace};

/// Crate that the compiler makes up for each program.
const COMPILER: &str = "__rustc";
/// Settings of the C library, written by this build.
const SETTINGS: &str = "etc/nsswitch.conf";

/// Checks the list of an image whose programs were built as `programs`. If there is an archive, the
/// scanner checks it, too.
pub(super) fn check(
    root: &Path,
    image: &str,
    programs: &[PathBuf],
    archive: Option<&Path>,
) -> Result<Vec<String>> {
    let path = root.join(sbom::PLACE).join(sbom::name(image));
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let list: Value = serde_json::from_str(&text)?;
    let mut passed = vec![
        check_crates(&list, programs)?,
        check_debian(root, &list)?,
        check_files(root, image, &list)?,
    ];
    if let Some(archive) = archive {
        let debian = debian::packages(root)?.into_iter();
        let debian = debian.map(|package| (package.name, package.version));
        let crates = crates(&list).into_iter();
        let crates = crates.filter_map(|(one, checksum)| checksum.map(|_| one));
        passed.push(scanner::check(
            archive,
            &debian.collect(),
            &crates.collect(),
        )?);
    }
    records::write(image, root, Kind::Image)?;
    let again = fs::read_to_string(&path)?;
    ensure!(again == text, "{} differs when made again", path.display());
    Ok(passed)
}

fn check_crates(list: &Value, programs: &[PathBuf]) -> Result<String> {
    let metadata = workspace::metadata(true)?;
    let lock = fs::read_to_string(repository::root().join("Cargo.lock"))?;
    let listed = crates(list);
    let mut allowed = dependencies(&metadata, workspace::BPF)?;
    let mut code = BTreeSet::new();
    for program in programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        allowed.extend(dependencies(&metadata, &name)?);
        let mut symbols = process::command("nm", &["--demangle"]);
        symbols.arg(program);
        code.extend(crates_in(&process::output(symbols)?));
    }
    let mut known = standard_library()?;
    known.insert(COMPILER.to_owned());
    for ((name, version), checksum) in &listed {
        let of =
            |entry: &&str| entry.contains(&format!("name = \"{name}\"\nversion = \"{version}\"\n"));
        let entry = lock.split("[[package]]").find(of);
        let entry = entry.with_context(|| format!("Cargo.lock has no {name} {version}"))?;
        ensure!(
            entry.contains("checksum = ") == checksum.is_some()
                && entry.contains(checksum.as_deref().unwrap_or_default()),
            "{name} {version} has another checksum in Cargo.lock"
        );
    }
    for one in listed.keys() {
        let library = allowed.get(one);
        let library = library.with_context(|| format!("{one:?} is no dependency of a program"))?;
        known.insert(library.clone());
    }
    let missing: Vec<&String> = code.difference(&known).collect();
    ensure!(missing.is_empty(), "code of unlisted crates: {missing:?}");
    Ok(format!(
        "{} crates are listed, and their code found",
        listed.len()
    ))
}

/// Crates in the list, with their checksums.
fn crates(list: &Value) -> BTreeMap<Crate, Option<String>> {
    let of = |package: &Value| {
        package["SPDXID"].as_str()?.strip_prefix("SPDXRef-Crate-")?;
        let field = |name: &str| package[name].as_str().map(ToOwned::to_owned);
        let checksum = package["checksums"][0]["checksumValue"].as_str();
        let one = (field("name")?, field("versionInfo")?);
        Some((one, checksum.map(ToOwned::to_owned)))
    };
    packages(list).filter_map(of).collect()
}

fn packages(list: &Value) -> impl Iterator<Item = &Value> {
    list["packages"].as_array().into_iter().flatten()
}

/// Crates that a program may link, with the names of their libraries. They include crates for
/// features of any workspace member, so the program may link fewer.
fn dependencies(metadata: &Value, program: &str) -> Result<BTreeMap<Crate, String>> {
    let packages: HashMap<&str, &Value> = workspace::packages(metadata)
        .filter_map(|package| Some((package["id"].as_str()?, package)))
        .collect();
    let nodes = metadata["resolve"]["nodes"].as_array();
    let nodes: HashMap<&str, &Value> = nodes
        .context("`cargo metadata` resolves no dependencies")?
        .iter()
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let first = packages
        .iter()
        .find(|(_, package)| package["name"] == *program);
    let mut waiting = vec![*first.with_context(|| program.to_owned())?.0];
    let mut found = BTreeMap::new();
    while let Some(id) = waiting.pop() {
        let Some(package) = packages.get(id) else {
            continue;
        };
        let field = |name: &str| package[name].as_str().unwrap_or_default().to_owned();
        let library = package["targets"][0]["name"].as_str().unwrap_or_default();
        let library = library.replace('-', "_");
        if found
            .insert((field("name"), field("version")), library)
            .is_some()
        {
            continue;
        }
        for dep in nodes
            .get(id)
            .and_then(|node| node["deps"].as_array())
            .into_iter()
            .flatten()
        {
            let kinds = dep["dep_kinds"].as_array().into_iter().flatten();
            if kinds.into_iter().any(|kind| kind["kind"].is_null()) {
                waiting.extend(dep["pkg"].as_str());
            }
        }
    }
    Ok(found)
}

/// Names of the crates that Rust's standard library is made of.
fn standard_library() -> Result<BTreeSet<String>> {
    let args = ["--print", "target-libdir"];
    let dir = process::output(process::command("rustc", &args))?;
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir.trim())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let name = name
            .strip_prefix("lib")
            .and_then(|name| name.split_once('-'));
        names.extend(name.map(|(name, _)| name.to_owned()));
    }
    Ok(names)
}

/// Names of the crates in demangled symbols: the first part of each path.
fn crates_in(symbols: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = BTreeSet::new();
    for line in symbols.lines() {
        for (at, _) in line.match_indices("::") {
            let path = &line[..at];
            let before = path.trim_end_matches(is_name);
            let name = &path[before.len()..];
            let follows = before.ends_with([':', '>', ']', '}']);
            if !follows && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
                found.insert(name.to_owned());
            }
        }
    }
    found
}

fn check_debian(root: &Path, list: &Value) -> Result<String> {
    let listed: BTreeMap<&str, &Value> = packages(list)
        .filter(|package| {
            let id = package["SPDXID"].as_str().unwrap_or_default();
            id.starts_with("SPDXRef-Debian-")
        })
        .filter_map(|package| Some((package["name"].as_str()?, package)))
        .collect();
    for (name, package) in &listed {
        let licence = package["licenseDeclared"].as_str().unwrap_or_default();
        ensure!(licence.starts_with("LicenseRef-"), "{name} has no licence");
    }
    let recorded = debian::packages(root)?;
    for package in &recorded {
        let version = listed.get(&*package.name).map(|one| &one["versionInfo"]);
        let version = version.with_context(|| format!("{} is not listed", package.name))?;
        ensure!(
            *version == package.version,
            "{}: version {version}",
            package.name
        );
    }
    // This machine's package database shows to which package each library belongs.
    for library in debian::files(&root.join("lib"))? {
        let owner = debian::owner(&Path::new("/lib").join(&library))?;
        ensure!(
            recorded.iter().any(|package| package.name == owner),
            "{library} is of {owner}, which is not recorded in {STATUS}"
        );
    }
    let names: Vec<&str> = listed.into_keys().collect();
    Ok(format!("packages are listed: {}", names.join(" ")))
}

fn check_files(root: &Path, image: &str, list: &Value) -> Result<String> {
    let mut files = debian::files(root)?;
    let document = format!("{}/{}", sbom::PLACE, sbom::name(image));
    ensure!(files.remove(&document), "no {document}");
    let names = list["files"].as_array().into_iter().flatten();
    let names = names.filter_map(|file| file["fileName"].as_str()?.strip_prefix("./"));
    let listed: BTreeSet<String> = names.map(ToOwned::to_owned).collect();
    ensure!(listed == files, "other files are listed: {listed:?}");
    let explained = explained(root, image)?;
    let unexplained: Vec<&String> = files.difference(&explained).collect();
    ensure!(
        unexplained.is_empty(),
        "of no package, no crate and not ours: {unexplained:?}"
    );
    Ok(format!("the origin of {} files is known", files.len()))
}

/// Files with a known origin, whose content equals the origin's content.
fn explained(root: &Path, image: &str) -> Result<BTreeSet<String>> {
    let place = Kind::Image.licences(image);
    let ours = licences::FILES.map(|file| format!("{place}/{file}"));
    let mut explained = BTreeSet::from(ours);
    explained.insert(SETTINGS.to_owned());
    explained.extend(GENERATED.map(|(file, _)| file.to_owned()));
    for program in super::programs_of(image) {
        explained.insert(format!("{PROGRAMS}/{program}"));
    }
    for package in debian::packages(root)? {
        let control = format!("{STATUS}/{}", package.name);
        let sums = format!("{control}{SUMS}");
        let check = ["--check", "--quiet", "--strict", &sums];
        let mut check = process::command("md5sum", &check);
        check.current_dir(root);
        process::output(check)?;
        explained.extend([control, sums]);
        explained.extend(package.files);
    }
    Ok(explained)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_are_found_in_symbols() {
        let symbols = "0000 T core::slice::copy\n\
                       0001 t <alloc::vec::Vec<T> as tokio::io::AsyncRead>::poll\n\
                       0002 t <[u8]>::concat\n0003 t std::sync::{closure#0}::call\n0004 T main\n";
        let found = crates_in(symbols);
        assert!(
            found.iter().eq(["alloc", "core", "std", "tokio"]),
            "{found:?}"
        );
    }

    #[test]
    fn crates_of_the_build_are_no_part() {
        let targets = serde_json::json!([{"name": "it"}]);
        let metadata = serde_json::json!({
            "packages": [
                {"id": "a", "name": "a", "version": "1", "targets": targets},
                {"id": "b", "name": "b", "version": "1", "targets": targets},
                {"id": "c", "name": "c", "version": "1", "targets": targets},
            ],
            "resolve": {"nodes": [
                {"id": "a", "deps": [
                    {"pkg": "b", "dep_kinds": [{"kind": null}]},
                    {"pkg": "c", "dep_kinds": [{"kind": "build"}]},
                ]},
                {"id": "b", "deps": []},
            ]},
        });
        let found = dependencies(&metadata, "a").unwrap();
        assert!(found.into_keys().map(|(name, _)| name).eq(["a", "b"]));
    }
}
