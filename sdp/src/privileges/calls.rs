//! The system calls that fail (seccomp(2)).
//!
//! The list contains the refused calls and not the allowed ones, because libraries change which
//! calls they use. For calls that are always allowed, the kernel uses a bitmap, so the filter costs
//! the query path nothing.

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub(super) enum FilterError {
    #[error("no filter for {arch}: {0}", arch = std::env::consts::ARCH)]
    Build(#[from] BackendError),
    #[error(transparent)]
    Install(#[from] seccompiler::Error),
}

/// Calls that a running process never needs. They concern other programs, other processes, other
/// namespaces, mounts, kernel and clock settings, files by handle (which Landlock does not see),
/// and interfaces known for their security holes.
const REFUSED: [libc::c_long; 46] = [
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
];

/// Commands of bpf(2) that make or attach something: maps, programs, pins, types and links. If the
/// kernel needs CAP_BPF for reading pinned maps, they would work without this list.
const REFUSED_OF_BPF: [u64; 13] = [
    0,  // BPF_MAP_CREATE
    5,  // BPF_PROG_LOAD
    6,  // BPF_OBJ_PIN
    8,  // BPF_PROG_ATTACH
    9,  // BPF_PROG_DETACH
    10, // BPF_PROG_TEST_RUN
    17, // BPF_RAW_TRACEPOINT_OPEN
    18, // BPF_BTF_LOAD
    28, // BPF_LINK_CREATE
    29, // BPF_LINK_UPDATE
    33, // BPF_ITER_CREATE
    34, // BPF_LINK_DETACH
    36, // BPF_TOKEN_CREATE
];

/// Refuses these calls to the thread, and to the threads that it starts.
pub(super) fn restrict() -> Result<(), FilterError> {
    let equals = |argument, value| -> Result<SeccompRule, BackendError> {
        let is = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?;
        SeccompRule::new(vec![is])
    };
    let mut rules: std::collections::BTreeMap<_, Vec<SeccompRule>> =
        REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    let of_bpf: Result<Vec<_>, _> = REFUSED_OF_BPF.iter().map(|c| equals(0, *c)).collect();
    rules.insert(libc::SYS_bpf, of_bpf?);
    rules.insert(
        libc::SYS_socket,
        // CAP_NET_RAW is for sending answers, and not for reading the node's traffic.
        vec![equals(0, u64::from(libc::AF_PACKET.unsigned_abs()))?],
    );
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    Ok(())
}
