//! Names of the programs at interfaces.
//!
//! The kernel tells a program's name only to a process with CAP_SYS_ADMIN. Without it the agent knows
//! the programs that a pin attaches: the pin's own name says which program its link has.

use std::{collections::BTreeMap, fs, io, path::Path};

use daemon::lookup::present;
use nix::errno::Errno;
use shared_maps::user::{Attached, Pinned, program_name};

use super::of_pin;

/// Names of programs by the numbers of the links that attach them.
pub(in super::super) struct PinnedNames(BTreeMap<u32, &'static str>);

impl PinnedNames {
    /// What the pins below `dir` attach, to all interfaces or to one.
    pub(in super::super) fn read(dir: &Path, interface: Option<u32>) -> io::Result<Self> {
        let mut found = BTreeMap::new();
        let mut directories = vec![dir.to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in present(fs::read_dir(&directory))?.into_iter().flatten() {
                let entry = entry?;
                let path = entry.path();
                if entry.file_type()?.is_dir() {
                    directories.push(path);
                } else if let Some((program, (ifindex, _))) = of_pin(&path)
                    && interface.is_none_or(|interface| interface == ifindex)
                    && let Some(Pinned::Link(link)) = Pinned::read(&path)?
                {
                    found.insert(link.id, program);
                }
            }
        }
        Ok(Self(found))
    }

    /// The program's name; `None` if neither a pin nor the kernel tells it.
    pub(in super::super) fn of(&self, attached: &Attached) -> io::Result<Option<String>> {
        match self.0.get(&attached.link) {
            Some(name) => Ok(Some((*name).to_owned())),
            None => told(attached.program),
        }
    }
}

/// The name of the program with this number; `None` if the kernel does not tell it.
pub(super) fn told(program: u32) -> io::Result<Option<String>> {
    match program_name(program) {
        Err(error) if error.raw_os_error() == Some(Errno::EPERM as i32) => Ok(None),
        name => name.map(Some),
    }
}
