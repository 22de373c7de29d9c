//! The list of an image's components, as SPDX 2.3 in JSON.
//!
//! ```text
//!  image ─ CONTAINS ─► Debian ─ CONTAINS ─► package ─ CONTAINS ─► file
//!    ├──── CONTAINS ─► file of ours
//!    └──── CONTAINS ─► program ─ CONTAINS ─► file
//!                         ├ DEPENDS_ON ──► crate ─ DEPENDS_ON ─► crate
//!                         └ STATIC_LINK ─► Rust's library, the C library
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    crates::Crate,
    debian,
    inventory::{self, Inventory, Kind},
    layout,
};
use crate::{process, workspace};

/// Directory of the document in an image.
pub(super) const PLACE: &str = "usr/share/sbom";
const ROOT: &str = "SPDXRef-DOCUMENT";
const IMAGE: &str = "SPDXRef-Image";
const SYSTEM: &str = "SPDXRef-Debian";
const UNKNOWN: &str = "NOASSERTION";
const LIBRARY: &str = "rust-std";
const BPF_LIBRARY: &str = "rust-core-bpf";
const RUST_LICENCE: &str = "MIT OR Apache-2.0";
const RUST_SOURCE: &str = "https://github.com/rust-lang/rust";
const COMMENT: &str = "Crates that only the build runs (build scripts, procedural macros) are not in \
                       the image and not in this list.";

/// Name of the document of an image.
pub(super) fn name(image: &str) -> String {
    format!("{image}.spdx.json")
}

/// Writes the document into the root file system.
pub(super) fn write(root: &Path, image: &str, inventory: &Inventory, date: &str) -> Result<()> {
    let place = root.join(PLACE);
    if place.exists() {
        fs::remove_dir_all(&place)?;
    }
    let files = files(root)?;
    let document = document(image, inventory, &files, date)?;
    fs::create_dir_all(&place)?;
    let text = serde_json::to_string_pretty(&document)? + "\n";
    Ok(fs::write(place.join(name(image)), text)?)
}

/// Sums of a file.
#[derive(Debug)]
struct Sums {
    sha1: String,
    sha256: String,
}

/// The files of the image, relative to its root.
fn files(root: &Path) -> Result<BTreeMap<String, Sums>> {
    let files = debian::files(root)?;
    let sums = |program: &str| -> Result<Vec<String>> {
        let mut command = process::command(program, &["--"]);
        command.args(&files).current_dir(root);
        let sums = process::output(command)?;
        let sums = sums.lines().filter_map(|line| line.split(' ').next());
        Ok(sums.map(ToOwned::to_owned).collect())
    };
    let both = sums("sha1sum")?.into_iter().zip(sums("sha256sum")?);
    let both = both.map(|(sha1, sha256)| Sums { sha1, sha256 });
    Ok(files.iter().cloned().zip(both).collect())
}

/// The document while it is made.
#[derive(Debug)]
struct Document<'a> {
    sums: &'a BTreeMap<String, Sums>,
    /// Files that belong to no component so far.
    rest: BTreeSet<String>,
    packages: Vec<Value>,
    relationships: Vec<Value>,
    licences: Vec<Value>,
}

fn document(
    image: &str,
    inventory: &Inventory,
    sums: &BTreeMap<String, Sums>,
    date: &str,
) -> Result<Value> {
    let mut document = Document {
        sums,
        rest: sums.keys().cloned().collect(),
        packages: Vec::new(),
        relationships: Vec::new(),
        licences: Vec::new(),
    };
    if inventory.kind == Kind::Image {
        document.system(inventory)?;
    }
    document.libraries(inventory)?;
    document.crates(inventory)?;
    let version = env!("CARGO_PKG_VERSION");
    let code = document.image(image, version, inventory.kind)?;
    Ok(json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": ROOT,
        "name": format!("{image}-{version}"),
        "documentNamespace": format!("https://spdx.org/spdxdocs/{image}-{version}-{code}"),
        "creationInfo": {"created": date, "creators": ["Tool: cargo-xtask-image"]},
        "comment": COMMENT,
        "packages": document.packages,
        "files": sums.iter().map(file).collect::<Vec<_>>(),
        "hasExtractedLicensingInfos": document.licences,
        "relationships": document.relationships,
    }))
}

impl Document<'_> {
    /// Adds the image, with the files that belong to no component. Returns a sum of all files.
    fn image(&mut self, image: &str, version: &str, kind: Kind) -> Result<String> {
        let tagged = layout::name(image);
        let (name, purpose) = match kind {
            Kind::Image => (tagged.split(':').next().unwrap_or_default(), "CONTAINER"),
            Kind::Package => (image, "INSTALL"),
        };
        let mut package = package(IMAGE, name, version, UNKNOWN);
        package["primaryPackagePurpose"] = purpose.into();
        let rest = self.rest.clone();
        self.add(package, &rest)?;
        self.relate(ROOT, "DESCRIBES", IMAGE);
        if kind == Kind::Image {
            self.relate(IMAGE, "CONTAINS", SYSTEM);
        }
        verification(self.sums.values())
    }

    /// Adds Debian and its packages.
    fn system(&mut self, inventory: &Inventory) -> Result<()> {
        let mut system = package(SYSTEM, "debian", &inventory.system, UNKNOWN);
        system["primaryPackagePurpose"] = "OPERATING-SYSTEM".into();
        self.add(system, &BTreeSet::new())?;
        for one in &inventory.debian {
            let id = self.debian(one, &inventory.system)?;
            self.relate(SYSTEM, "CONTAINS", &id);
        }
        Ok(())
    }

    /// Adds the libraries in programs, except crates.
    fn libraries(&mut self, inventory: &Inventory) -> Result<()> {
        for one in &inventory.linked {
            self.debian(one, &inventory.system)?;
        }
        for (name, release) in [
            (LIBRARY, &inventory.library),
            (BPF_LIBRARY, &inventory.bpf_library),
        ] {
            let mut library = package(&id("Rust", name), name, release, RUST_LICENCE);
            library["downloadLocation"] = RUST_SOURCE.into();
            library["externalRefs"] = purl(&format!("pkg:github/rust-lang/rust@{release}"));
            self.add(library, &BTreeSet::new())?;
        }
        Ok(())
    }

    /// Adds a package of Debian. Its licence is the text of its copyright file.
    fn debian(&mut self, one: &debian::Package, system: &str) -> Result<String> {
        let id = id("Debian", &one.name);
        let mut licence = UNKNOWN.to_owned();
        if let Some(text) = &one.copyright {
            licence = format!("LicenseRef-Debian-{}", safe(&one.name));
            self.licences.push(json!({
                "licenseId": licence,
                "name": format!("Copyright file of Debian's package {}", one.name),
                "extractedText": text,
            }));
        }
        let mut package = package(&id, &one.name, &one.version, &licence);
        package["externalRefs"] = purl(&format!(
            "pkg:deb/debian/{}@{}?arch={}&distro=debian-{system}&upstream={}",
            encoded(&one.name),
            encoded(&one.version),
            one.architecture,
            encoded(&one.source)
        ));
        package["sourceInfo"] = format!("source package {}", one.source).into();
        let common: Vec<&str> = one.common_licences().into_iter().collect();
        if !common.is_empty() {
            let named = format!("The text names {}.", common.join(", "));
            package["licenseComments"] = named.into();
        }
        self.add(package, &one.files)?;
        Ok(id)
    }

    fn crates(&mut self, inventory: &Inventory) -> Result<()> {
        let mut edges = BTreeSet::new();
        for (program, graph) in &inventory.programs {
            let root = crate_id(graph.root(program)?);
            self.relate(IMAGE, "CONTAINS", &root);
            self.relate(&root, "STATIC_LINK", &id("Rust", LIBRARY));
            if inventory::is_static(program) {
                for library in &inventory.linked {
                    self.relate(&root, "STATIC_LINK", &id("Debian", &library.name));
                }
            }
            if let Ok(bpf) = graph.root(workspace::BPF) {
                self.relate(&crate_id(bpf), "STATIC_LINK", &id("Rust", BPF_LIBRARY));
            }
            let uses = graph.0.iter();
            edges.extend(uses.flat_map(|(one, uses)| uses.iter().map(move |used| (one, used))));
        }
        for (one, used) in edges {
            self.relate(&crate_id(one), "DEPENDS_ON", &crate_id(used));
        }
        for one in inventory.crates() {
            let files = if inventory.programs.contains_key(&one.0) {
                BTreeSet::from([format!("{}/{}", inventory.kind.programs(), one.0)])
            } else {
                BTreeSet::new()
            };
            self.add(of_crate(one, inventory)?, &files)?;
        }
        Ok(())
    }

    /// Adds a package with its files.
    fn add(&mut self, mut package: Value, files: &BTreeSet<String>) -> Result<()> {
        let id = package["SPDXID"].as_str().unwrap_or_default().to_owned();
        let mut sums = Vec::new();
        for file in files {
            if let Some(found) = self.sums.get(file)
                && self.rest.remove(file)
            {
                sums.push(found);
                self.relate(&id, "CONTAINS", &file_id(file));
            }
        }
        if !sums.is_empty() {
            let code = verification(sums)?;
            package["filesAnalyzed"] = true.into();
            package["packageVerificationCode"] = json!({"packageVerificationCodeValue": code});
        }
        self.packages.push(package);
        Ok(())
    }

    fn relate(&mut self, one: &str, relation: &str, other: &str) {
        self.relationships.push(json!({
            "spdxElementId": one,
            "relationshipType": relation,
            "relatedSpdxElement": other,
        }));
    }
}

fn of_crate(one: &Crate, inventory: &Inventory) -> Result<Value> {
    let (name, version) = one;
    let found = inventory.package(one)?;
    // Old crates separate alternatives with a slash.
    let licence = found["license"]
        .as_str()
        .unwrap_or(UNKNOWN)
        .replace('/', " OR ");
    let mut package = package(&crate_id(one), name, version, &licence);
    if let Some(checksum) = inventory.checksums.get(one) {
        let archive = format!("https://static.crates.io/crates/{name}/{name}-{version}.crate");
        package["downloadLocation"] = archive.into();
        package["checksums"] = json!([{"algorithm": "SHA256", "checksumValue": checksum}]);
        package["externalRefs"] = purl(&format!("pkg:cargo/{name}@{}", encoded(version)));
    }
    if inventory.programs.contains_key(name) {
        package["primaryPackagePurpose"] = "APPLICATION".into();
    }
    Ok(package)
}

fn package(id: &str, name: &str, version: &str, licence: &str) -> Value {
    json!({
        "SPDXID": id,
        "name": name,
        "versionInfo": version,
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": licence,
        "copyrightText": UNKNOWN,
    })
}

fn file((path, sums): (&String, &Sums)) -> Value {
    json!({
        "SPDXID": file_id(path),
        "fileName": format!("./{path}"),
        "checksums": [
            {"algorithm": "SHA1", "checksumValue": sums.sha1},
            {"algorithm": "SHA256", "checksumValue": sums.sha256},
        ],
        "licenseConcluded": UNKNOWN,
        "copyrightText": UNKNOWN,
    })
}

/// SPDX's verification code of a package: a sum over the sorted sums of its files.
fn verification<'s>(sums: impl IntoIterator<Item = &'s Sums>) -> Result<String> {
    let mut sums: Vec<&str> = sums.into_iter().map(|one| one.sha1.as_str()).collect();
    sums.sort_unstable();
    let script = r#"printf %s "$1" | sha1sum"#;
    let sum = process::command("sh", &["-c", script, "sh", &sums.concat()]);
    let sum = process::output(sum)?;
    Ok(sum.split(' ').next().unwrap_or_default().to_owned())
}

fn purl(locator: &str) -> Value {
    json!([{
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": locator,
    }])
}

fn crate_id((name, version): &Crate) -> String {
    id("Crate", &format!("{name}-{version}"))
}

/// Identifier of a file. Paths that differ only in characters that identifiers cannot have get
/// different identifiers.
fn file_id(path: &str) -> String {
    let mut name = String::new();
    for c in path.chars() {
        match c {
            '/' => name.push('-'),
            '.' => name.push('.'),
            c if c.is_ascii_alphanumeric() => name.push(c),
            c => name += &format!("-{:x}-", u32::from(c)),
        }
    }
    id("File", &name)
}

fn id(kind: &str, name: &str) -> String {
    format!("SPDXRef-{kind}-{}", safe(name))
}

/// The name with only those characters that SPDX allows in identifiers.
fn safe(name: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    name.replace(|c| !allowed(c), "-")
}

/// The text percent-encoded, for a package URL.
fn encoded(text: &str) -> String {
    text.replace('+', "%2B").replace(':', "%3A")
}
