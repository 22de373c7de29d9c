//! `cargo xtask lint`: every rule that a program can check.

mod arrows;
mod book;
mod dependencies;
mod documents;
mod files;
mod guide;
mod modules;
mod tree;
mod words;

use anyhow::{Result, bail};
pub(crate) use book::install as install_mdbook;
use clap::ValueEnum;

use crate::{bpf, charts, doc_comments, process, style, workspace};

/// One check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Check {
    /// rustfmt
    Format,
    /// Lints inherited, file sizes, module layout, where `unsafe` may be
    Tree,
    /// Arrows between crates, circles between modules and files, and where the agent uses the proxy's crate
    Modules,
    /// Links and code references in Markdown; the guide's contents, headings and runbook; words that CONTRIBUTING.md replaces; doc comments that repeat a name
    Documents,
    /// mdBook builds the guide without a warning
    Guide,
    /// Licences, sources and bans of dependencies (deny.toml)
    Dependencies,
    /// clippy without warnings
    Clippy,
    /// rustdoc without warnings
    Doc,
    /// The committed eBPF object is what `bpf/` builds
    Bpf,
    /// The Helm charts: rendered, validated, compared with the programs and the guide
    Charts,
    /// Figures of `cargo xtask style`; printed, never a failure
    Style,
}

/// Runs `only`, or all checks. It reports all problems before it fails.
pub(crate) fn run(only: Option<Check>) -> Result<()> {
    let mut failed = Vec::new();
    for check in Check::value_variants() {
        if only.is_some_and(|only| only != *check) {
            continue;
        }
        println!("lint: {check:?}");
        if let Err(error) = one(*check) {
            eprintln!("lint: {check:?}: {error:#}");
            failed.push(format!("{check:?}"));
        }
    }
    if !failed.is_empty() {
        bail!("lint failed: {}", failed.join(", "));
    }
    Ok(())
}

fn one(check: Check) -> Result<()> {
    match check {
        Check::Format => process::run(process::command("cargo", &["fmt", "--all", "--check"])),
        Check::Tree => report(&tree::problems()?),
        Check::Modules => {
            let mut problems = arrows::problems()?;
            problems.extend(modules::problems()?);
            problems.extend(files::problems()?);
            report(&problems)
        }
        Check::Documents => {
            let mut problems = documents::problems()?;
            problems.extend(guide::problems()?);
            problems.extend(words::problems()?);
            problems.extend(doc_comments::read()?.repeated);
            report(&problems)
        }
        Check::Guide => book::build(),
        Check::Dependencies => dependencies::check(),
        Check::Clippy => {
            // bpf/ is built for another target by another compiler.
            let args = [
                "clippy",
                "--locked",
                "--workspace",
                "--exclude",
                workspace::BPF,
            ];
            let mut command = process::command("cargo", &args);
            command.args(["--all-targets", "--", "-D", "warnings"]);
            process::run(command)?;
            // The agent as built without its feature `kubernetes`.
            let mut command = process::command("cargo", &["clippy", "--locked"]);
            for package in ["", "-lib", "-cluster"] {
                command.arg(format!("--package=holdfast-agent{package}"));
            }
            command.args(["--no-default-features", "--lib", "--bins"]);
            command.args(["--", "-D", "warnings"]);
            process::run(command)
        }
        Check::Doc => {
            let mut command = process::command("cargo", &["doc", "--locked", "--no-deps"]);
            command.env("RUSTDOCFLAGS", "-D warnings");
            process::run(command)
        }
        Check::Bpf => bpf::build(true),
        Check::Charts => charts::run(charts::Derived::Check),
        Check::Style => style::run(),
    }
}

fn report(problems: &[String]) -> Result<()> {
    for problem in problems {
        eprintln!("  {problem}");
    }
    if !problems.is_empty() {
        bail!("{} problems", problems.len());
    }
    Ok(())
}
