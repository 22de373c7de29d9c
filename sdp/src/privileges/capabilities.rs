//! User, group and capabilities of a thread (capabilities(7)).

use std::collections::HashSet;

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

/// What is kept, and what for:
/// - raw sockets, transparent sockets and marks of upstream and reply sockets;
/// - reply sockets bound to the server's port, 53 mostly;
/// - files and pins that only root may read, such as a Cilium agent's; Landlock
///   narrows this to the directories it is for.
const KEPT: [Capability; 3] = [
    Capability::CAP_NET_RAW,
    Capability::CAP_NET_BIND_SERVICE,
    Capability::CAP_DAC_READ_SEARCH,
];

/// Whether [`become_user`] must keep CAP_BPF as well: this kernel opens pinned maps for nobody
/// without it. False where the calling thread cannot open them either.
pub(super) fn needs_bpf() -> bool {
    if !caps::has_cap(None, CapSet::Effective, Capability::CAP_BPF).unwrap_or(false) {
        return false;
    }
    // Capabilities belong to a thread; this one ends with what it gave up.
    let without = std::thread::spawn(|| {
        caps::clear(None, CapSet::Effective).is_ok() && !shared_maps::user::may_open_pins()
    });
    shared_maps::user::may_open_pins() && without.join().unwrap_or(false)
}

/// Why the user could not be changed.
#[derive(Debug, thiserror::Error)]
pub(super) enum UserError {
    #[error("{call}: {source}")]
    Call {
        call: &'static str,
        source: nix::Error,
    },
    #[error(transparent)]
    Capabilities(#[from] CapsError),
}

/// Gives up root, except [`KEPT`] and, if `bpf`, CAP_BPF. A root that may not change its user, as in
/// a container, stays root with what it has of these.
pub(super) fn become_user(user: Uid, group: Gid, bpf: bool) -> Result<(), UserError> {
    let failed = |call| move |source| UserError::Call { call, source };
    let had = caps::read(None, CapSet::Permitted)?;
    let kept: CapsHashSet = KEPT
        .into_iter()
        .chain(bpf.then_some(Capability::CAP_BPF))
        .filter(|c| had.contains(c))
        .collect();
    if had.contains(&Capability::CAP_SETPCAP) {
        for capability in caps::read(None, CapSet::Bounding)? {
            caps::drop(None, CapSet::Bounding, capability)?;
        }
    }
    if had.contains(&Capability::CAP_SETUID) && had.contains(&Capability::CAP_SETGID) {
        nix::sys::prctl::set_keepcaps(true).map_err(failed("keeping capabilities"))?;
        setgroups(&[]).map_err(failed("setgroups"))?;
        setresgid(group, group, group).map_err(failed("setresgid"))?;
        setresuid(user, user, user).map_err(failed("setresuid"))?;
        nix::sys::prctl::set_keepcaps(false).map_err(failed("keeping capabilities"))?;
    } else {
        tracing::warn!("the proxy remains root: CAP_SETUID and CAP_SETGID are missing");
    }
    caps::set(None, CapSet::Inheritable, &HashSet::new())?;
    // Effective first: it must never hold more than permitted does.
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)?;
    Ok(())
}

/// Names of the capabilities in effect.
pub(super) fn effective() -> Vec<String> {
    let mut names: Vec<String> = caps::read(None, CapSet::Effective)
        .unwrap_or_default()
        .into_iter()
        .map(|capability| capability.to_string())
        .collect();
    names.sort_unstable();
    names
}
