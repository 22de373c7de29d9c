//! Crates in a program, as cargo resolves them for the build of the images.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
};

use anyhow::{Context as _, Result};

use super::{IMAGES, TARGET};
use crate::{process, repository, workspace};

/// Target of the eBPF programs.
const BPF_TARGET: &str = "bpfel-unknown-none";

/// Name and version of a crate.
pub(super) type Crate = (String, String);

/// Each crate, with the crates that it uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Graph(pub(super) BTreeMap<Crate, BTreeSet<Crate>>);

impl Graph {
    /// The crates that a program links, and the crates of the eBPF programs inside it. Crates that
    /// only the build runs, which are build scripts and procedural macros, are not in the program.
    pub(super) fn of(program: &str) -> Result<Self> {
        let bpf = IMAGES.iter().any(|image| image.program == program);
        let mut graph = Self::resolve(&built_with(program), TARGET)?.below(program)?;
        if bpf {
            let inside = Self::resolve(&[workspace::BPF], BPF_TARGET)?.below(workspace::BPF)?;
            let roots = [graph.root(program)?, inside.root(workspace::BPF)?];
            let [root, bpf] = roots.map(Clone::clone);
            graph.0.entry(root).or_default().insert(bpf);
            for (one, uses) in inside.0 {
                graph.0.entry(one).or_default().extend(uses);
            }
        }
        Ok(graph)
    }

    fn resolve(packages: &[&str], target: &str) -> Result<Self> {
        let edges = "normal,no-proc-macro";
        Ok(Self::parse(&tree(packages, edges, "depth", target)?))
    }

    /// Reads `cargo tree --prefix depth`, which lists the dependencies of a crate only once.
    fn parse(tree: &str) -> Self {
        let mut graph = Self::default();
        let mut path: Vec<Crate> = Vec::new();
        for line in tree.lines() {
            let name = line.trim_start_matches(|c: char| c.is_ascii_digit());
            let depth = line.len() - name.len();
            let (Ok(depth), Some(found)) = (line[..depth].parse(), crate_of(name)) else {
                continue;
            };
            path.truncate(depth);
            if let Some(user) = path.last() {
                let uses = graph.0.entry(user.clone()).or_default();
                uses.insert(found.clone());
            }
            graph.0.entry(found.clone()).or_default();
            path.push(found);
        }
        graph
    }

    /// The part that `program` uses.
    fn below(&self, program: &str) -> Result<Self> {
        let mut part = Self::default();
        let mut waiting = vec![self.root(program)?];
        while let Some(one) = waiting.pop() {
            if let Some(uses) = self.0.get(one)
                && part.0.insert(one.clone(), uses.clone()).is_none()
            {
                waiting.extend(uses);
            }
        }
        Ok(part)
    }

    pub(super) fn root(&self, program: &str) -> Result<&Crate> {
        let found = self.0.keys().find(|(name, _)| name == program);
        found.with_context(|| format!("the workspace has no package `{program}`"))
    }
}

/// Procedural macros that write code of the program.
pub(super) fn macros(program: &str) -> Result<BTreeSet<Crate>> {
    let tree = tree(&[program], "normal", "none", TARGET)?;
    let macros = tree.lines().filter(|line| line.contains("(proc-macro)"));
    Ok(macros.filter_map(crate_of).collect())
}

/// Checksums of crates in Cargo.lock, as SHA-256 of the registry's archive.
pub(super) fn checksums() -> Result<HashMap<Crate, String>> {
    let lock = fs::read_to_string(repository::root().join("Cargo.lock"))?;
    let mut checksums = HashMap::new();
    for package in lock.split("[[package]]") {
        let field = |name: &str| {
            let mut lines = package.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
            value.map(|value| value.trim_matches('"').to_owned())
        };
        if let (Some(name), Some(version), Some(checksum)) =
            (field("name"), field("version"), field("checksum"))
        {
            checksums.insert((name, version), checksum);
        }
    }
    Ok(checksums)
}

/// Programs that one command of cargo builds together with `program`. A feature that one program
/// needs is enabled in all of them.
fn built_with(program: &str) -> Vec<&'static str> {
    let together = IMAGES.iter().map(|image| image.program).collect::<Vec<_>>();
    if together.contains(&program) {
        return together;
    }
    IMAGES
        .iter()
        .flat_map(|image| image.also)
        .copied()
        .collect()
}

fn tree(packages: &[&str], edges: &str, prefix: &str, target: &str) -> Result<String> {
    let mut tree = process::command("cargo", &["tree", "--locked", "--color=never"]);
    tree.args(["--edges", edges, "--prefix", prefix, "--target", target]);
    tree.args(packages.iter().flat_map(|package| ["--package", package]));
    process::output(tree)
}

/// Reads `name v1.2.3 (more)`.
fn crate_of(line: &str) -> Option<Crate> {
    let mut words = line.split_whitespace();
    let (name, version) = (words.next()?, words.next()?.strip_prefix('v')?);
    Some((name.to_owned(), version.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_has_the_crates_below_it() {
        let graph = Graph::parse(
            "0agent v0.1.0 (/src/agent)\n1sdp v0.1.0 (/src/sdp)\n2libc v0.2.1\n1tls v1.0.0\n\
             2libc v0.2.1\n\n0sdp v0.1.0 (/src/sdp) (*)\n",
        );
        let names = |program: &str| {
            let part = graph.below(program).unwrap();
            part.0.into_keys().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names("agent"), ["agent", "libc", "sdp", "tls"]);
        assert_eq!(names("sdp"), ["libc", "sdp"]);
        assert!(graph.below("cni").is_err());
    }
}
