//! Work of the kernel for a process, counted by perf events (`perf_event_open(2)`): system calls,
//! context switches, and woken threads.
//!
//! Counting makes each system call slower on the whole machine, so nothing else is measured while a
//! [`Counting`] exists.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::{FromRawFd as _, RawFd};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    SystemCall,
    Receive,
    Send,
    Yield,
    Switch,
    Wake,
}

/// Tracepoints of [`Event`]s, below `events/` of tracefs.
const TRACEPOINTS: [(Event, &str); 9] = [
    (Event::SystemCall, "raw_syscalls/sys_enter"),
    (Event::Receive, "syscalls/sys_enter_recvmmsg"),
    (Event::Receive, "syscalls/sys_enter_recvmsg"),
    (Event::Receive, "syscalls/sys_enter_recvfrom"),
    (Event::Send, "syscalls/sys_enter_sendmmsg"),
    (Event::Send, "syscalls/sys_enter_sendmsg"),
    (Event::Send, "syscalls/sys_enter_sendto"),
    (Event::Yield, "syscalls/sys_enter_sched_yield"),
    (Event::Wake, "sched/sched_waking"),
];
/// `PERF_TYPE_SOFTWARE` and its `PERF_COUNT_SW_CONTEXT_SWITCHES`; `PERF_TYPE_TRACEPOINT`.
const SOFTWARE: u32 = 1;
const CONTEXT_SWITCHES: u64 = 3;
const TRACEPOINT: u32 = 2;

/// Numbers of the tracepoints on this kernel.
#[derive(Debug)]
pub struct Tracepoints(Vec<(Event, u64)>);

impl Tracepoints {
    /// Reads the numbers from a temporary mount of tracefs.
    pub fn read() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let none = None::<&str>;
        mount(
            Some("none"),
            directory.path(),
            Some("tracefs"),
            MsFlags::empty(),
            none,
        )
        .context("mount tracefs")?;
        let ids = TRACEPOINTS.iter().map(|(event, name)| {
            let path = directory.path().join("events").join(name).join("id");
            let id = fs::read_to_string(&path).with_context(|| format!("tracepoint {name}"))?;
            Ok((*event, id.trim().parse()?))
        });
        let ids: Result<_> = ids.collect();
        umount2(directory.path(), MntFlags::MNT_DETACH)?;
        Ok(Self(ids?))
    }
}

/// Counters of every thread that a process had at the beginning.
#[derive(Debug)]
pub struct Counting(Vec<(Event, File)>);

/// Counts of a process since the beginning of a [`Counting`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub system_calls: u64,
    /// Calls of `recvmmsg` and similar system calls, whatever they returned.
    pub receives: u64,
    /// Calls of `sendmmsg` and similar system calls.
    pub sends: u64,
    pub yields: u64,
    pub context_switches: u64,
    /// Threads that were woken while the process ran, including wake-ups by packets that it
    /// delivered.
    pub wakes: u64,
}

impl Counting {
    pub fn start(pid: u32, tracepoints: &Tracepoints) -> Result<Self> {
        let mut counters = Vec::new();
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let task: i32 = task?.file_name().to_string_lossy().parse()?;
            counters.push((Event::Switch, open(SOFTWARE, CONTEXT_SWITCHES, task)?));
            for (event, id) in &tracepoints.0 {
                counters.push((*event, open(TRACEPOINT, *id, task)?));
            }
        }
        Ok(Self(counters))
    }

    pub fn counts(&mut self) -> Result<Counts> {
        let mut counts = Counts::default();
        for (event, counter) in &mut self.0 {
            let mut count = [0; 8];
            counter.read_exact(&mut count)?;
            let sum = match event {
                Event::SystemCall => &mut counts.system_calls,
                Event::Receive => &mut counts.receives,
                Event::Send => &mut counts.sends,
                Event::Yield => &mut counts.yields,
                Event::Switch => &mut counts.context_switches,
                Event::Wake => &mut counts.wakes,
            };
            *sum += u64::from_ne_bytes(count);
        }
        Ok(counts)
    }
}

/// `struct perf_event_attr`, as long as in its first version (`PERF_ATTR_SIZE_VER0`).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    /// Fields and flags that are zero: counted at once, in user space and kernel, not sampled.
    zero: [u64; 6],
}

/// Counts an event of one thread, on any CPU.
fn open(kind: u32, config: u64, thread: i32) -> Result<File> {
    let size = u32::try_from(size_of::<Attributes>())?;
    let attributes = Attributes {
        kind,
        size,
        config,
        ..Attributes::default()
    };
    let (any_cpu, no_group, close_on_exec) = (-1, -1, 8);
    // SAFETY: perf_event_open reads `size` bytes of the attributes, which outlive the call.
    let fd = unsafe {
        let attributes = &raw const attributes;
        let call = libc::SYS_perf_event_open;
        libc::syscall(call, attributes, thread, any_cpu, no_group, close_on_exec)
    };
    let fd = Errno::result(fd).context("perf_event_open (root, and a kernel with perf events)")?;
    // SAFETY: the kernel made this descriptor for this caller only.
    Ok(unsafe { File::from_raw_fd(RawFd::try_from(fd)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_as_long_as_its_first_version() {
        assert_eq!(size_of::<Attributes>(), 64);
    }
}
