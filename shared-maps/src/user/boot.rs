//! Which boot this is: identity numbers and instants of another one mean nothing.

use std::{fs, io};

/// Where the kernel tells it (random(4)).
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The boot id of the machine.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}
