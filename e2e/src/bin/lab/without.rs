//! Runs a program as a container's seccomp profile would: some system calls fail with EPERM.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Result, bail};
use clap::Args;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Numbers with commas between them.
#[derive(Clone, Debug)]
struct Numbers(Vec<i64>);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Numbers of the system calls
    #[arg(value_parser = numbers)]
    calls: Numbers,
    /// The program
    program: OsString,
    /// Its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let filter = SeccompFilter::new(
        options
            .calls
            .0
            .iter()
            .map(|call| (*call, Vec::new()))
            .collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(u32::try_from(libc::EPERM)?),
        std::env::consts::ARCH.try_into()?,
    )?;
    let filter: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&filter)?;
    let error = Command::new(&options.program)
        .args(&options.arguments)
        .exec();
    bail!("{}: {error}", options.program.to_string_lossy());
}

fn numbers(text: &str) -> Result<Numbers, std::num::ParseIntError> {
    text.split(',')
        .map(str::parse)
        .collect::<Result<_, _>>()
        .map(Numbers)
}
