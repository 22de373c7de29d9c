//! A guest in qemu: its console goes to a file, and the output of its script comes line by line.

use std::{
    io::{BufRead as _, BufReader, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use super::package::Unpacked;
use crate::process;

/// Beginning of the last line of a guest's output.
const STATUS: &str = "guest: status ";

/// Reason for the end of a guest.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The script ended with this status.
    Status(i32),
    /// The guest ended before its script did.
    WithoutStatus { console: PathBuf },
    /// The guest exceeded the limit, and was ended.
    Late { console: PathBuf },
}

/// Boots the kernel and waits for the end of the guest, for `limit` at most.
pub(super) fn boot(
    unpacked: &Unpacked,
    initramfs: &Path,
    (run, disk): (&Path, &Path),
    limit: Duration,
    line: impl FnMut(&str),
) -> Result<Ended> {
    let console = run.join("console");
    let mut command = qemu(unpacked, initramfs, &console, disk);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", process::line(&command)))?;
    let output = child.stdout.take().context("the output is piped")?;
    let (lines, received) = mpsc::channel();
    let reader = thread::spawn(move || read_lines(output, &lines));
    let (status, late) = follow(&received, limit, line);
    // This has no effect on a guest that has ended.
    let _ = child.kill();
    child.wait().context("waiting for qemu")?;
    let _ = reader.join();
    Ok(match status {
        Some(status) => Ended::Status(status),
        None if late => Ended::Late { console },
        None => Ended::WithoutStatus { console },
    })
}

/// The command that starts the guest, which can read the root of this machine and write to `disk`.
fn qemu(unpacked: &Unpacked, initramfs: &Path, console: &Path, disk: &Path) -> Command {
    let mut command = process::command(
        "qemu-system-x86_64",
        &[
            "-machine",
            "q35",
            "-cpu",
            "max",
            "-accel",
            "tcg,thread=multi",
            "-smp",
            "2",
            "-m",
            "4096",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
        ],
    );
    command
        .arg("-kernel")
        .arg(&unpacked.image)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", "console=ttyS0 panic=-1 quiet"])
        .args(["-serial", &format!("file:{}", console.display())])
        .args(["-serial", "stdio"])
        .args([
            "-fsdev",
            "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
        ])
        .args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"])
        .arg("-fsdev")
        .arg(format!(
            "local,id=disk,path={},security_model=passthrough",
            disk.display()
        ))
        .args(["-device", "virtio-9p-pci,fsdev=disk,mount_tag=disk"]);
    command
}

fn read_lines(output: impl Read, lines: &mpsc::Sender<String>) {
    let mut reader = BufReader::new(output);
    let mut bytes = Vec::new();
    while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
        let text = String::from_utf8_lossy(&bytes);
        if lines.send(text.trim_end().to_owned()).is_err() {
            return;
        }
        bytes.clear();
    }
}

/// Gives each line to `line` until the output ends, for `limit` at most. Returns the status of the
/// script, if the guest printed it, and whether the guest exceeded the limit.
fn follow(
    received: &mpsc::Receiver<String>,
    limit: Duration,
    mut line: impl FnMut(&str),
) -> (Option<i32>, bool) {
    let start = Instant::now();
    let mut status = None;
    let late = loop {
        let Some(left) = limit.checked_sub(start.elapsed()) else {
            break true;
        };
        match received.recv_timeout(left) {
            Ok(text) => match text.strip_prefix(STATUS).and_then(|n| n.parse().ok()) {
                Some(number) => status = Some(number),
                None => line(&text),
            },
            Err(mpsc::RecvTimeoutError::Timeout) => break true,
            Err(mpsc::RecvTimeoutError::Disconnected) => break false,
        }
    };
    (status, late)
}
