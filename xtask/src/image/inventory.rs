//! Components of an image or a package, gathered once for its licences and its list of components (SBOM).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::Path,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{
    IMAGES,
    crates::{self, Crate, Graph},
    debian,
};
use crate::{process, repository, workspace};

/// Directory of the programs in an image.
pub(super) const PROGRAMS: &str = "usr/local/bin";

/// What the components belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A container image, which has packages of Debian too.
    Image,
    /// A package, for a system that has everything else.
    Package,
}

impl Kind {
    /// Directory of the programs.
    pub(super) fn programs(self) -> &'static str {
        match self {
            Self::Image => PROGRAMS,
            Self::Package => "usr/bin",
        }
    }

    /// Directory of the licences; `program` is the name of the image or package.
    pub(super) fn licences(self, program: &str) -> String {
        match self {
            Self::Image => "usr/share/doc/holdfast".to_owned(),
            Self::Package => format!("usr/share/doc/{program}"),
        }
    }
}

/// The stamp, which names the compiler of the eBPF programs.
const BPF_STAMP: &str = "bpf/prebuilt/holdfast-bpf.stamp";

/// Components of an image or a package.
#[derive(Debug)]
pub(super) struct Inventory {
    pub(super) kind: Kind,
    pub(super) programs: BTreeMap<String, Graph>,
    /// Procedural macros that wrote code of the programs.
    pub(super) macros: BTreeSet<Crate>,
    /// Version of Debian in the image, or of the machine that built the package.
    pub(super) system: String,
    /// Packages with files in the image.
    pub(super) debian: Vec<debian::Package>,
    /// Packages with libraries inside the static programs.
    pub(super) linked: Vec<debian::Package>,
    /// Version of Rust's standard library in the programs.
    pub(super) library: String,
    /// Version of Rust's core library in the eBPF programs.
    pub(super) bpf_library: String,
    /// SHA-256 of the archives of crates.
    pub(super) checksums: HashMap<Crate, String>,
    /// Packages as `cargo metadata` lists them.
    packages: HashMap<Crate, Value>,
}

impl Inventory {
    pub(super) fn of(root: &Path, kind: Kind) -> Result<Self> {
        let mut programs = BTreeMap::new();
        let mut macros = BTreeSet::new();
        for entry in fs::read_dir(root.join(kind.programs()))? {
            let program = entry?.file_name().to_string_lossy().into_owned();
            macros.extend(crates::macros(&program)?);
            programs.insert(program.clone(), Graph::of(&program)?);
        }
        let linked = if programs.keys().any(|program| is_static(program)) {
            debian::in_static_programs()?
        } else {
            Vec::new()
        };
        let compiler = process::output(process::command("rustc", &["--version", "--verbose"]))?;
        let metadata = workspace::metadata(true)?;
        let packages = workspace::packages(&metadata).filter_map(|package| {
            let field = |name: &str| package[name].as_str().map(ToOwned::to_owned);
            Some(((field("name")?, field("version")?), package.clone()))
        });
        let (system, debian) = match kind {
            Kind::Image => (debian::version(root)?, debian::packages(root)?),
            Kind::Package => (debian::version(Path::new("/"))?, Vec::new()),
        };
        Ok(Self {
            kind,
            programs,
            macros,
            system,
            debian,
            linked,
            library: release(&compiler)?,
            bpf_library: release(&fs::read_to_string(repository::root().join(BPF_STAMP))?)?,
            checksums: crates::checksums()?,
            packages: packages.collect(),
        })
    }

    /// Crates in any of the programs.
    pub(super) fn crates(&self) -> BTreeSet<&Crate> {
        self.programs
            .values()
            .flat_map(|one| one.0.keys())
            .collect()
    }

    pub(super) fn package(&self, one: &Crate) -> Result<&Value> {
        let package = self.packages.get(one);
        package.with_context(|| format!("`cargo metadata` has no {} {}", one.0, one.1))
    }
}

/// Whether the program is linked statically with its C library.
pub(super) fn is_static(program: &str) -> bool {
    IMAGES.iter().any(|image| image.also.contains(&program))
}

/// The version in the text that a compiler prints about itself.
fn release(text: &str) -> Result<String> {
    let release = text.lines().find_map(|line| line.strip_prefix("release: "));
    Ok(release.context("a compiler's release")?.to_owned())
}
