//! The cost of a wake-up on this host, measured with two threads that wake each other in turns.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::Pid;

use super::median;

const ROUNDS: u32 = 2_000;
const TIMES: u32 = 7;

/// Microseconds from the call that wakes a thread until that thread runs; medians.
#[derive(Clone, Copy, Debug)]
pub struct WakeUp {
    /// Both threads on one CPU.
    pub same_cpu_us: f64,
    /// Each thread on its own CPU; the CPU of the woken thread is idle. `None` on a machine with
    /// one CPU.
    pub other_cpu_us: Option<f64>,
}

impl WakeUp {
    pub fn measure() -> Result<Self> {
        let allowed = sched_getaffinity(Pid::from_raw(0))?;
        let mut cpus = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
        let first = cpus.next().unwrap_or(0);
        Ok(Self {
            same_cpu_us: between(first, first)?,
            other_cpu_us: cpus.next().map(|other| between(first, other)).transpose()?,
        })
    }
}

fn between(here: usize, there: usize) -> Result<f64> {
    let times: Result<Vec<f64>> = (0..TIMES).map(|_| ping_pong(here, there)).collect();
    Ok(median(times?))
}

/// Half of a round trip, microseconds.
fn ping_pong(here: usize, there: usize) -> Result<f64> {
    let event = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC).map(Arc::new);
    let (ping, pong) = (event()?, event()?);
    let (heard, said) = (ping.clone(), pong.clone());
    let echo = thread::spawn(move || -> Result<()> {
        pin(there)?;
        for _ in 0..ROUNDS {
            heard.read()?;
            said.write(1)?;
        }
        Ok(())
    });
    let timed = thread::spawn(move || -> Result<f64> {
        pin(here)?;
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            ping.write(1)?;
            pong.read()?;
        }
        Ok(begin.elapsed().as_secs_f64() * 1e6 / f64::from(2 * ROUNDS))
    });
    let joined = |_| anyhow!("a thread of the ping-pong panicked");
    echo.join().map_err(joined)??;
    timed.join().map_err(joined)?
}

fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}
