//! The files that the process can still open (Landlock, landlock(7)).

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

/// The newest set of rights that we know. An older kernel enforces the rights that it knows.
const RIGHTS: ABI = ABI::V6;

/// Files that libraries read: kernel settings, and the resolution of host names.
const SYSTEM: [&str; 9] = [
    "/proc/sys",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/gai.conf",
    "/etc/ld.so.cache",
    "/lib",
    "/usr/lib",
];

/// Restricts the thread. Returns `false` if the kernel has no Landlock.
pub(super) fn restrict(
    readable: &[PathBuf],
    writable: &[PathBuf],
    appendable: &[PathBuf],
) -> Result<bool, RulesetError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = read
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::RemoveFile;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(RIGHTS))?
        .scope(Scope::from_all(RIGHTS))?
        .create()?;
    for path in SYSTEM.iter().map(Path::new) {
        rules = allow(rules, path, read)?;
    }
    for path in readable {
        rules = allow(rules, path, read)?;
    }
    for path in writable {
        rules = allow(rules, path, write)?;
    }
    for path in appendable {
        rules = allow(rules, path, AccessFs::WriteFile | AccessFs::MakeReg)?;
    }
    let status = rules.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Adds a rule for a path. A path that does not exist now cannot be opened later either.
fn allow(
    rules: RulesetCreated,
    path: &Path,
    rights: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    let Ok(found) = PathFd::new(path) else {
        return Ok(rules);
    };
    let rights = if path.is_dir() {
        rights
    } else {
        rights & AccessFs::from_file(RIGHTS)
    };
    rules.add_rule(PathBeneath::new(found, rights))
}
