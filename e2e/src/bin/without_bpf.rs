//! Runs a program as a container's seccomp profile would: bpf() fails with EPERM.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let program = arguments
        .next()
        .context("without_bpf PROGRAM [ARGUMENT…]")?;
    let filter = SeccompFilter::new(
        [(libc::SYS_bpf, Vec::new())].into_iter().collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(u32::try_from(libc::EPERM)?),
        std::env::consts::ARCH.try_into()?,
    )?;
    let filter: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&filter)?;
    let error = Command::new(&program).args(arguments).exec();
    bail!("{}: {error}", program.to_string_lossy());
}
