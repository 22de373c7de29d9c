//! `cargo xtask bpf`: builds the eBPF programs into the committed objects.
//!
//! The agent and the proxy embed `bpf/prebuilt/*.o`, so that building and testing them needs no
//! eBPF toolchain. Next to the objects lies a stamp: a hash of the sources that they were built
//! from, and the compilers that built them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{process, repository, toolchain::Toolchain, workspace};

/// The objects: the programs of an endpoint, and steering.
const OBJECTS: [&str; 2] = ["holdfast-bpf", "holdfast-steer"];
const PREBUILT: &str = "bpf/prebuilt";
const STAMP: &str = "bpf/prebuilt/holdfast-bpf.stamp";
const BUILT: &str = "target/bpf/bpfel-unknown-none/release";
/// Sources of the objects, in addition to the pinned dependencies.
const SOURCES: [&str; 3] = ["bpf/Cargo.toml", "bpf/src", "shared-maps/src"];
/// Files below [`SOURCES`] that are not compiled into the objects.
const NOT_SOURCES: [&str; 2] = ["shared-maps/src/user.rs", "shared-maps/src/user"];

/// Builds the objects and their stamp. With `check`, compares them with the committed files
/// instead.
///
/// A check needs no toolchain to notice sources newer than the objects; the bytes are compared only
/// where exactly the toolchain of the stamp is installed.
pub(crate) fn build(check: bool) -> Result<()> {
    let root = repository::root();
    let sources = hash_sources(root)?;
    if check {
        return compare(root, sources);
    }
    let Some(toolchain) = Toolchain::find() else {
        bail!("no eBPF toolchain: run `cargo xtask setup --only bpf`");
    };
    compile(root, toolchain)?;
    let stamp = format!("sources {sources:016x}\n{}", versions(toolchain)?);
    fs::create_dir_all(root.join(PREBUILT))?;
    for object in OBJECTS {
        let to = committed(root, object);
        fs::copy(stripped(root, object), &to).with_context(|| to.display().to_string())?;
    }
    fs::write(root.join(STAMP), stamp).with_context(|| STAMP.to_owned())?;
    println!("wrote {} to {PREBUILT}", OBJECTS.join(" and "));
    Ok(())
}

fn compare(root: &Path, sources: u64) -> Result<()> {
    let stamp = fs::read_to_string(root.join(STAMP)).with_context(|| STAMP.to_owned())?;
    if !stamp.starts_with(&format!("sources {sources:016x}\n")) {
        bail!("{PREBUILT} is older than its sources: run `cargo xtask bpf` and commit the result");
    }
    let same =
        |toolchain: &Toolchain| versions(*toolchain).is_ok_and(|text| stamp.ends_with(&text));
    let Some(toolchain) = Toolchain::usable().find(same) else {
        println!(
            "the stamp's eBPF toolchain is not installed: only the sources' hash was compared"
        );
        return Ok(());
    };
    compile(root, toolchain)?;
    for object in OBJECTS {
        let (committed, built) = (committed(root, object), stripped(root, object));
        let same_length = fs::metadata(&committed)?.len() == fs::metadata(&built)?.len();
        if !same_length
            || without_types(root, toolchain, &committed)?
                != without_types(root, toolchain, &built)?
        {
            bail!(
                "{} is not what its sources build: run `cargo xtask bpf` and commit the result",
                committed.display()
            );
        }
    }
    Ok(())
}

fn committed(root: &Path, object: &str) -> PathBuf {
    root.join(PREBUILT).join(object).with_extension("o")
}

/// Path of an object of [`compile`].
fn stripped(root: &Path, object: &str) -> PathBuf {
    root.join("target/bpf").join(object).with_extension("o")
}

/// An object's bytes except the section `.BTF`: the compiler orders forward
/// declarations in it differently from build to build.
fn without_types(root: &Path, toolchain: Toolchain, object: &Path) -> Result<Vec<u8>> {
    let rest = root.join("target/bpf/without-types.o");
    let mut objcopy = Command::new(objcopy(toolchain)?);
    objcopy.arg("--remove-section=.BTF").arg(object).arg(&rest);
    process::run(objcopy)?;
    fs::read(&rest).with_context(|| rest.display().to_string())
}

fn objcopy(toolchain: Toolchain) -> Result<PathBuf> {
    let llvm = PathBuf::from(format!("/usr/lib/llvm-{}/bin", toolchain.llvm_major()?));
    let tool = llvm.join("llvm-objcopy");
    Ok(if tool.exists() {
        tool
    } else {
        "llvm-objcopy".into()
    })
}

/// Builds and strips the objects.
fn compile(root: &Path, toolchain: Toolchain) -> Result<()> {
    let mut cargo = toolchain.cargo();
    cargo.current_dir(root).args([
        "build",
        "--release",
        "--locked",
        "--target=bpfel-unknown-none",
        "-Zbuild-std=core",
        "--target-dir=target/bpf",
        "--package",
        workspace::BPF,
    ]);
    let mut flags = vec!["-Cdebuginfo=2".to_owned(), "-Clink-arg=--btf".to_owned()];
    flags.extend(remaps(root, toolchain)?);
    cargo
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", "bpf-linker")
        // The workspace's release profile is for programs of the host.
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort");
    process::run(cargo)?;

    // BTF stays. DWARF is removed: it is four fifths of the file, and nothing reads it.
    for object in OBJECTS {
        let mut objcopy = Command::new(objcopy(toolchain)?);
        objcopy
            .arg("--strip-debug")
            .arg(root.join(BUILT).join(object))
            .arg(stripped(root, object));
        process::run(objcopy)?;
    }
    Ok(())
}

/// Keeps this machine's paths out of the object.
fn remaps(root: &Path, toolchain: Toolchain) -> Result<Vec<String>> {
    let mut remaps = vec![format!("--remap-path-prefix={}=.", root.display())];
    let library = toolchain.sysroot()?.join("lib/rustlib/src/rust");
    remaps.push(format!("--remap-path-prefix={}=rust", library.display()));
    #[expect(clippy::disallowed_methods, reason = "where cargo keeps its registry")]
    let home = env::var_os("CARGO_HOME").map_or_else(
        || PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(".cargo"),
        PathBuf::from,
    );
    let mut registries: Vec<PathBuf> = fs::read_dir(home.join("registry/src"))
        .map(|dir| dir.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    registries.sort();
    for registry in registries {
        remaps.push(format!(
            "--remap-path-prefix={}=registry",
            registry.display()
        ));
    }
    Ok(remaps)
}

/// Versions of the tools on which the bytes depend.
fn versions(toolchain: Toolchain) -> Result<String> {
    let linker = process::output(process::command("bpf-linker", &["--version"]))?;
    let compiler = toolchain.version()?;
    let lines = compiler.lines().filter(|line| {
        ["release: ", "commit-hash: ", "LLVM version: "]
            .iter()
            .any(|key| line.starts_with(key))
    });
    let mut text = String::new();
    for line in lines.chain(linker.lines().take(1)) {
        text.push_str(line.trim());
        text.push('\n');
    }
    Ok(text)
}

/// FNV-1a over names and contents, in order of names: it shows changes, and is no defence against
/// forgers.
fn hash_sources(root: &Path) -> Result<u64> {
    let mut files = Vec::new();
    for source in SOURCES {
        collect(&root.join(source), &mut files)?;
    }
    let skipped: Vec<PathBuf> = NOT_SOURCES.iter().map(|path| root.join(path)).collect();
    files.retain(|file| !skipped.iter().any(|skip| file.starts_with(skip)));
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy();
        let content = fs::read(&file).with_context(|| file.display().to_string())?;
        for byte in name.bytes().chain([0]).chain(content).chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    Ok(hash)
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if path.is_file() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| path.display().to_string())? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}
