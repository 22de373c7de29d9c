//! `cargo xtask image`: the two container images, made without a container engine and run once.
//!
//! ```text
//!  cargo build ─► binaries ─┐
//!  Debian packages ─► libc ─┼─► root file system ─ umoci ─► OCI layout ─ skopeo ─► archive
//!  licences, components ────┘                                                        │
//!                                         checks ◄─ ctr run ◄─ containerd ◄─ import ─┘
//! ```

mod base;
mod container;
mod contents;
mod crates;
mod debian;
pub(crate) mod inventory;
mod layout;
mod licences;
pub(crate) mod records;
mod sbom;
mod scanner;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::{process, workspace};
pub(crate) use container::Containerd;

/// Largest image of release builds, unpacked.
const LARGEST_MIB: u64 = 40;
/// Target of the programs. For the CNI plugin cargo gets it as an argument, so that only the plugin
/// is static: the plugin runs on the node itself, which may have another C library.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A container image and the programs in it.
#[derive(Clone, Copy, Debug)]
struct Image {
    /// Name of the package, of the program and of the entry point.
    program: &'static str,
    /// Packages of other programs in the image.
    also: &'static [&'static str],
}

const IMAGES: [Image; 2] = [
    Image {
        program: "holdfast-agent",
        also: &["holdfast-cni"],
    },
    Image {
        program: "holdfast-sdp",
        also: &[],
    },
];

/// Which build of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Profile {
    /// For use
    Release,
    /// For tests: built already, and larger
    Debug,
}

impl Profile {
    fn directory(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Debug => "debug",
        }
    }
}

/// Names of the images, which equal the names of their programs.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    IMAGES.into_iter().map(|image| image.program)
}

/// Names of the programs in the image of a program.
fn programs_of(program: &str) -> impl Iterator<Item = &'static str> {
    let image = IMAGES.into_iter().find(|image| image.program == program);
    image
        .into_iter()
        .flat_map(|image| image.also.iter().copied().chain([image.program]))
}

/// Builds the images and runs them. Returns the checks that they passed.
pub(crate) fn run(profile: Profile) -> Result<Vec<String>> {
    process::require_root("`cargo xtask image`")?;
    crate::setup::image()?;
    let home = workspace::target_dir()?.join("image");
    fs::create_dir_all(&home)?;
    let programs = build(profile)?;
    let base = base::root(&home, profile)?;
    let mut archives = Vec::new();
    for image in IMAGES {
        let archive = make(&home, &base, &programs, image)
            .with_context(|| format!("image {}", image.program))?;
        println!("  {}: {}", layout::name(image.program), archive.display());
        archives.push((image, archive));
    }
    let containerd = Containerd::start(&home.join("containerd"))?;
    let mut passed = Vec::new();
    for (image, archive) in archives {
        // Only tests need the registry that has the scanner.
        let scanned = (profile == Profile::Debug).then_some(&*archive);
        let checks = check(&containerd, &home, image, &archive, profile).and_then(|passed| {
            let contents = check_contents(&home, image, &programs, scanned)?;
            Ok([passed, contents].concat())
        });
        passed.extend(checks.with_context(|| format!("image {}", image.program))?);
    }
    Ok(passed)
}

/// Builds the programs. Returns the directories of the dynamic and of the static programs.
pub(crate) fn build(profile: Profile) -> Result<[PathBuf; 2]> {
    let members = workspace::metadata(false)?;
    let is_member = |name: &&&str| workspace::packages(&members).any(|one| one["name"] == ***name);
    let cargo = |packages: Vec<&str>, target: Option<&str>| {
        let mut build = process::command("cargo", &["build", "--locked", "--bins"]);
        build.args(packages.iter().flat_map(|package| ["-p", package]));
        if profile == Profile::Release {
            build.arg("--release");
        }
        if let Some(target) = target {
            build.args(["--target", target]);
            build.env("RUSTFLAGS", "-C target-feature=+crt-static");
        }
        process::run(build)
    };
    match profile {
        Profile::Release => cargo(IMAGES.iter().map(|image| image.program).collect(), None)?,
        Profile::Debug => process::run(workspace::build())?,
    }
    let also: Vec<&str> = IMAGES
        .iter()
        .flat_map(|image| image.also)
        .filter(is_member)
        .copied()
        .collect();
    if !also.is_empty() {
        cargo(also, Some(TARGET))?;
    }
    let target = workspace::target_dir()?;
    Ok([
        target.join(profile.directory()),
        target.join(TARGET).join(profile.directory()),
    ])
}

/// Directory with the root file system of the image.
fn root(home: &Path, image: Image) -> PathBuf {
    home.join(format!("{}.root", image.program))
}

/// The archive of an image.
fn make(home: &Path, base: &Path, programs: &[PathBuf; 2], image: Image) -> Result<PathBuf> {
    let root = root(home, image);
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    let copy = ["-a", &text(base)?, &text(&root)?];
    process::output(process::command("cp", &copy))?;
    let [dynamic, static_] = programs;
    strip(&dynamic.join(image.program), &root)?;
    for program in image.also {
        let path = static_.join(program);
        if path.exists() {
            strip(&path, &root)?;
        }
    }
    records::write(image.program, &root, inventory::Kind::Image)?;
    let list = sbom::name(image.program);
    fs::copy(root.join(sbom::PLACE).join(&list), home.join(&list))?;
    layout::archive(home, &root, image.program)
}

fn strip(program: &Path, root: &Path) -> Result<()> {
    let name = program.file_name().context("a program's name")?;
    let to = text(&root.join("usr/local/bin").join(name))?;
    process::output(process::command("strip", &["-o", &to, &text(program)?])).map(drop)
}

/// Checks an image. Returns the checks that it passed.
fn check(
    containerd: &Containerd,
    home: &Path,
    image: Image,
    archive: &Path,
    profile: Profile,
) -> Result<Vec<String>> {
    let Image { program, also } = image;
    let name = layout::name(program);
    containerd.import(archive)?;
    let root = root(home, image);
    let mut passed = vec![
        check_version(containerd, &name, program)?,
        check_no_shell(containerd, &name)?,
        check_config(home, program)?,
        check_licences(&root)?,
    ];
    for other in also {
        let path = root.join("usr/local/bin").join(other);
        if path.exists() {
            passed.push(check_static(other, &path)?);
        }
    }
    passed.push(check_size(&root, profile)?);
    let passed = passed.into_iter();
    Ok(passed.map(|check| format!("{name}: {check}")).collect())
}

/// Checks the list of the image's components.
fn check_contents(
    home: &Path,
    image: Image,
    programs: &[PathBuf; 2],
    scanned: Option<&Path>,
) -> Result<Vec<String>> {
    let [dynamic, static_] = programs;
    let mut built = vec![dynamic.join(image.program)];
    built.extend(image.also.iter().map(|program| static_.join(program)));
    let root = root(home, image);
    let passed = contents::check(&root, image.program, &built, scanned)?.into_iter();
    let name = layout::name(image.program);
    Ok(passed.map(|check| format!("{name}: {check}")).collect())
}

fn check_version(containerd: &Containerd, name: &str, program: &str) -> Result<String> {
    let version = containerd.run(name, &[program, "--version"])?;
    ensure!(
        version.trim() == format!("{program} {}", env!("CARGO_PKG_VERSION")),
        "--version prints {version:?}"
    );
    Ok(format!("{program} --version prints {}", version.trim()))
}

fn check_no_shell(containerd: &Containerd, name: &str) -> Result<String> {
    for shell in ["sh", "bash", "/bin/sh", "busybox"] {
        ensure!(
            containerd.run(name, &[shell, "-c", "true"]).is_err(),
            "the image has a shell: {shell}"
        );
    }
    Ok("no shell".to_owned())
}

fn check_config(home: &Path, program: &str) -> Result<String> {
    let config = layout::config(home, program)?;
    let user = config["config"]["User"].as_str().unwrap_or_default();
    ensure!(user == "0:0", "user {user:?}: the programs start as root");
    let entry = &config["config"]["Entrypoint"];
    ensure!(
        entry == &serde_json::json!([format!("/usr/local/bin/{program}")]),
        "entry point {entry}"
    );
    Ok("user 0:0, entry point is the program".to_owned())
}

fn check_licences(root: &Path) -> Result<String> {
    for file in licences::FILES {
        let path = root.join(inventory::Kind::Image.licences("")).join(file);
        ensure!(
            fs::metadata(&path)?.len() > 1000,
            "{file} is missing or short"
        );
    }
    ensure!(
        root.join("usr/share/doc/libc6/copyright").exists(),
        "no licence of libc"
    );
    Ok("licence texts are inside".to_owned())
}

fn check_static(program: &str, path: &Path) -> Result<String> {
    let kind = process::output(process::command("readelf", &["-d", &text(path)?]))?;
    ensure!(
        !kind.contains("(NEEDED)"),
        "{program} needs libraries of the node: {kind}"
    );
    Ok(format!("{program} is static"))
}

fn check_size(root: &Path, profile: Profile) -> Result<String> {
    let size = process::output(process::command("du", &["-sm", &text(root)?]))?;
    let size: u64 = size.split_whitespace().next().unwrap_or_default().parse()?;
    if profile == Profile::Release {
        ensure!(size <= LARGEST_MIB, "{size} MiB, more than {LARGEST_MIB}");
    }
    Ok(format!("{size} MiB unpacked"))
}

fn text(path: &Path) -> Result<String> {
    let text = path.to_str().map(ToOwned::to_owned);
    text.with_context(|| format!("{}: not UTF-8", path.display()))
}
