//! The file system that a guest starts from.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use super::package::Unpacked;
use crate::process;

const INIT: &str = include_str!("init.sh");
/// Modules that the guest needs before it has its root.
const MODULES: &[&str] = &["virtio_pci", "9pnet_virtio", "9p", "overlay"];

/// Writes the initramfs to `run`. Returns its path.
pub(super) fn write(unpacked: &Unpacked, start: &str, script: &str, run: &Path) -> Result<PathBuf> {
    let tree = run.join("initramfs");
    for dir in ["bin", "dev", "lower", "memory", "system", "modules"] {
        let dir = tree.join(dir);
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    }
    fs::copy("/bin/busybox", tree.join("bin/busybox")).context("copying /bin/busybox")?;
    let mut order = String::new();
    for path in modules(unpacked)? {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .context("a module without a name")?;
        let copy = tree.join("modules").join(name);
        fs::copy(&path, &copy).with_context(|| format!("copying {}", path.display()))?;
        // busybox may not read this compression.
        if name.ends_with(".xz") {
            process::output(process::command("xz", &["-d", &copy.to_string_lossy()]))?;
        }
        order.push_str(name.trim_end_matches(".xz"));
        order.push('\n');
    }
    for (name, text) in [
        ("modules/order", order.as_str()),
        ("start", start),
        ("script", script),
        ("init", INIT),
    ] {
        fs::write(tree.join(name), text).with_context(|| format!("writing {name}"))?;
    }
    fs::set_permissions(tree.join("init"), fs::Permissions::from_mode(0o755))
        .context("making init executable")?;
    let archive = run.join("initramfs.cpio");
    let mut command = process::command(
        "sh",
        &[
            "-c",
            "find . | cpio --create --format=newc --quiet > \"$0\"",
        ],
    );
    command.arg(&archive).current_dir(&tree);
    process::output(command)?;
    Ok(archive)
}

/// Paths of [`MODULES`] and of the modules that they need, in the order in which to load them.
fn modules(unpacked: &Unpacked) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for module in MODULES {
        let shown = process::output(process::command(
            "modprobe",
            &[
                "--dirname",
                &unpacked.root.to_string_lossy(),
                "--set-version",
                &unpacked.version,
                "--show-depends",
                module,
            ],
        ))?;
        for path in shown
            .lines()
            .filter_map(|line| line.strip_prefix("insmod "))
        {
            let path = PathBuf::from(path.trim());
            ensure!(path.is_absolute(), "modprobe printed {}", path.display());
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
    }
    Ok(paths)
}
