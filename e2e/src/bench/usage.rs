//! CPU time and memory that a process has used.

use std::time::Duration;

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};

/// CPU time of a process, all its threads, user and system.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("process {pid}"))?;
    // The name, in parentheses, may contain anything, so fields count from the last parenthesis.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    let per_second = sysconf(SysconfVar::CLK_TCK)?
        .and_then(|ticks| u64::try_from(ticks).ok())
        .context("clock ticks per second")?;
    Ok(Duration::from_millis(ticks * 1000 / per_second))
}

/// Memory of a process that is in RAM, bytes.
pub fn resident(pid: u32) -> Result<u64> {
    memory(pid, "VmRSS:")
}

/// Highest resident memory of a process so far, bytes.
pub fn peak_resident(pid: u32) -> Result<u64> {
    memory(pid, "VmHWM:")
}

/// A field of `/proc/<pid>/status` in bytes.
fn memory(pid: u32, field: &'static str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .context(field)?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_this_process() {
        let pid = std::process::id();
        let before = cpu_time(pid).unwrap();
        while cpu_time(pid).unwrap() == before {
            std::hint::spin_loop();
        }
        assert!(resident(pid).unwrap() > 100 * 1024);
        assert!(peak_resident(pid).unwrap() > 100 * 1024);
    }
}
