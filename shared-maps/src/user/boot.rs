//! The boot id. Identity numbers and monotonic times are valid only within one boot.

use std::{fs, io};

/// The kernel's file with the boot id (random(4)).
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The boot id of the machine.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}
