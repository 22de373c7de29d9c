//! User, group and capabilities of a thread (capabilities(7)).

use std::collections::HashSet;

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use shared_maps::mark;
use socket2::{Domain, Socket, Type};

/// The capabilities that are kept, and their purposes:
/// - raw sockets, transparent sockets and marks of upstream and reply sockets;
/// - reply sockets bound to the server's port, 53 mostly;
/// - files and pins that only root may read, such as a Cilium agent's; Landlock
///   narrows this to the directories it is for.
const KEPT: [Capability; 3] = [
    Capability::CAP_NET_RAW,
    Capability::CAP_NET_BIND_SERVICE,
    Capability::CAP_DAC_READ_SEARCH,
];

/// The capabilities of the calling thread that older kernels require in addition: CAP_BPF to open a
/// pinned map (before Linux 5.19), CAP_NET_ADMIN to mark a socket (before 5.17).
pub(super) fn needed_by_kernel() -> Vec<Capability> {
    let with = Allowed::now();
    // Capabilities belong to a thread. The thread that gives them up here then ends.
    let without = std::thread::spawn(|| {
        let few: CapsHashSet = [Capability::CAP_NET_RAW].into();
        let had = caps::read(None, CapSet::Permitted)?;
        let few = few.intersection(&had).copied().collect();
        caps::set(None, CapSet::Effective, &few).map(|()| Allowed::now())
    });
    let Ok(Ok(without)) = without.join() else {
        return Vec::new();
    };
    let needed = [
        (Capability::CAP_BPF, with.pins && !without.pins),
        (Capability::CAP_NET_ADMIN, with.marks && !without.marks),
    ];
    let had = caps::read(None, CapSet::Effective).unwrap_or_default();
    needed
        .into_iter()
        .filter(|(capability, needed)| *needed && had.contains(capability))
        .map(|(capability, _)| capability)
        .collect()
}

/// What the kernel allows to the calling thread.
struct Allowed {
    /// Whether it may open pinned maps.
    pins: bool,
    /// Whether it may mark a socket.
    marks: bool,
}

impl Allowed {
    fn now() -> Self {
        let marked = Socket::new(Domain::IPV4, Type::DGRAM, None)
            .and_then(|socket| socket.set_mark(mark::MAGIC_FROM_EGRESS_PROXY));
        Self {
            pins: shared_maps::user::may_open_pins(),
            marks: marked.is_ok(),
        }
    }
}

/// Why the user cannot be changed.
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

/// Gives up all capabilities except [`KEPT`] and `also`. If root may not change its user, as in a
/// container, the thread stays root with those of these capabilities that it has.
pub(super) fn become_user(user: Uid, group: Gid, also: &[Capability]) -> Result<(), UserError> {
    let failed = |call| move |source| UserError::Call { call, source };
    let had = caps::read(None, CapSet::Permitted)?;
    let kept: CapsHashSet = KEPT
        .into_iter()
        .chain(also.iter().copied())
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
    // The effective set is reduced first, because it must never exceed the permitted set.
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
