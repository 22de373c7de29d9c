//! `cargo xtask`: set up, check, test, show and measure Holdfast.
//!
//! ```text
//!  setup ──► demo | bench          the lab's tools (packages, bpffs)
//!        ──► lint ──► test         as .ci/run does
//!        ──► bpf                   the eBPF toolchain
//! ```

mod archive;
mod bpf;
mod charts;
mod doc_comments;
mod docs;
mod fuzz;
mod image;
mod kernels;
mod linker;
mod lint;
mod packages;
mod packaging;
mod play;
mod previous;
mod process;
mod progress;
mod python;
mod release;
mod repository;
mod setup;
mod style;
mod test;
mod toolchain;
mod workspace;

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Set up, check, test, show and measure Holdfast"
)]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what is missing on this machine; safe to repeat
    Setup {
        /// Only this part
        #[arg(long, value_enum)]
        only: Option<setup::Part>,
    },
    /// Formatting, lints, documentation, dependencies, layout rules, eBPF object
    Lint {
        /// Only this check
        #[arg(long, value_enum)]
        only: Option<lint::Check>,
    },
    /// Print figures about the shape of the production code, with their limits
    Style,
    /// Run the tests; without --tier: unit, kernel, netns, image, packages, cri and guest, as CI does
    Test {
        /// Only this tier
        #[arg(long, value_enum)]
        tier: Option<test::Tier>,
        /// Only tests whose name, `file::test`, contains this
        filter: Option<String>,
        /// Runs the tier `kernels` on this kernel only, without the change from one to another
        #[arg(long, value_enum)]
        kernel: Option<kernels::Kernel>,
    },
    /// Play the whole story in a lab of network namespaces
    Demo {
        /// Leave the lab up and say how to enter it
        #[arg(long)]
        keep: bool,
    },
    /// Run a benchmark
    Bench {
        #[arg(value_enum)]
        benchmark: play::Benchmark,
        /// Passed on to the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Feed random input to every reader of bytes that others write (needs a nightly compiler)
    Fuzz {
        /// Only this fuzzer
        target: Option<String>,
        /// For so long each
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Write the files that are generated from code: docs/src/metrics.md, and the settings files in packaging/
    Docs,
    /// Check the Helm charts; part of lint
    Charts {
        /// Write the files that are made from others: copies of templates, tables of values
        #[arg(long)]
        write: bool,
    },
    /// Build the two container images into target/image, and run them in containerd; needs root
    Image {
        /// Which build of the programs
        #[arg(long, value_enum, default_value_t = image::Profile::Release)]
        profile: image::Profile,
    },
    /// Make the Debian packages and the tarball, into target/packages
    Package {
        /// Which build of the programs
        #[arg(long, value_enum, default_value_t = image::Profile::Release)]
        profile: image::Profile,
    },
    /// Make every artefact of a release, into target/release-artifacts: packages, tarball, images, charts,
    /// and their sums. The same commit gives the same bytes; needs root
    Release {
        /// Which build of the programs
        #[arg(long, value_enum, default_value_t = image::Profile::Release)]
        profile: image::Profile,
    },
    /// Boot older and newer kernels in qemu and run a script on each; needs root
    Kernels(kernels::Args),
    /// Write the licences and the list of components (SBOM) into the root directory of an image
    Inventory {
        /// Name of the image
        image: String,
        /// The directory, which has the programs and Debian's packages already
        root: std::path::PathBuf,
    },
    /// Build the committed eBPF objects
    Bpf {
        /// Build and compare with the committed object, change nothing
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    let outcome = run(Args::parse().task);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    match task {
        Task::Setup { only } => setup::run(only),
        Task::Lint { only } => lint::run(only),
        Task::Style => style::run(),
        Task::Test {
            tier,
            filter,
            kernel,
        } => test::run(tier, filter.as_deref(), kernel),
        Task::Demo { keep } => play::demo(keep),
        Task::Bench { benchmark, args } => play::bench(benchmark, &args),
        Task::Fuzz { target, seconds } => {
            let failed = fuzz::run(target.as_deref(), Duration::from_secs(seconds))?.failed;
            anyhow::ensure!(failed.is_empty(), "found something: {}", failed.join(", "));
            Ok(())
        }
        Task::Docs => docs::write(),
        Task::Charts { write: true } => charts::run(charts::Derived::Write),
        Task::Charts { write: false } => charts::run(charts::Derived::Check),
        Task::Inventory { image, root } => {
            image::records::write(&image, &root, image::inventory::Kind::Image)
        }
        Task::Image { profile } => {
            for check in image::run(profile)? {
                println!("  ok: {check}");
            }
            Ok(())
        }
        Task::Package { profile } => {
            for file in packaging::run(profile)? {
                println!("  {}", file.display());
            }
            Ok(())
        }
        Task::Release { profile } => release::run(profile),
        Task::Kernels(args) => kernels::run(&args),
        Task::Bpf { check } => bpf::build(check),
    }
}
