//! This process as a member of the steering group: its slots, its sockets in them, its heartbeat.
//!
//! Each UDP worker is a member of its own and sends its heartbeat from its own loop, so that a
//! worker that hangs gets no more packets. A member joins again by itself when pins appear late,
//! when pins are replaced, and when another member took its slot while it slept.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use daemon::{
    pins::{self, PinDirError},
    steering_program,
};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use parking_lot::Mutex;
use shared_maps::{
    pin,
    steering::{
        HEARTBEAT_DEAD_NS, HEARTBEAT_INTERVAL_MS, KIND_FREE, SLOTS, SLOTS_NAME, SOCKS_NAME,
        SOCKS_PER_SLOT, Slot, socket_index,
    },
    user::{Access, Globals, Map, MapError, MapKind, monotonic_ns},
};

use crate::gate::Gate;

/// Interval at which a member with a slot checks whether the pins have changed. A member without a
/// slot tries to join with every heartbeat, because redirected packets may be dropped until it has
/// a slot.
const RECHECK: Duration = Duration::from_secs(1);
/// Time limit for the lock of the slots: a process that holds it for longer counts as hanging.
const LOCKED_FOR: Duration = Duration::from_secs(2);
/// Age of the last heartbeat after which a slot may be reused. Steering has stopped using the slot
/// well before.
const TAKEN_AFTER_NS: u64 = 3 * HEARTBEAT_DEAD_NS;

type Slots = Map<u32, Slot>;
type Socks = Map<u32, u32>;

/// Sockets of one member: duplicates, in the order of [`socket_index`].
#[derive(Debug, Default)]
pub(crate) struct MemberSockets {
    pub(crate) udp4: Option<OwnedFd>,
    pub(crate) udp6: Option<OwnedFd>,
    pub(crate) tcp4: Option<OwnedFd>,
    pub(crate) tcp6: Option<OwnedFd>,
}

impl MemberSockets {
    fn in_order(&self) -> impl Iterator<Item = (u32, &OwnedFd)> {
        let all = [
            (&self.udp4, false, false),
            (&self.udp6, false, true),
            (&self.tcp4, true, false),
            (&self.tcp6, true, true),
        ];
        all.into_iter()
            .filter_map(|(fd, tcp, v6)| Some((socket_index(0, tcp, v6), fd.as_ref()?)))
    }
}

/// How this process takes part in steering.
#[derive(Clone, Debug)]
pub struct SteeringConfig {
    /// BPF root, `/sys/fs/bpf` by default.
    pub bpf_root: PathBuf,
    /// [`shared_maps::steering::KIND_SDP`] or [`shared_maps::steering::KIND_FALLBACK`].
    pub kind: u32,
    /// Whether this process can answer. Slots are taken only while the gate is open.
    pub gate: Gate,
}

/// State of steering for one worker, or for the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SteeringStatus {
    /// Steering is disabled by the settings.
    Off,
    /// The maps are not pinned, or cannot be used: the kernel's hash distributes the load.
    Unavailable(String),
    /// Live replicas have every slot. They serve, and a replica that leaves makes room.
    Full(String),
    /// No slot is taken, because this process cannot answer, for this reason.
    Waiting(String),
    /// Numbers of the slots that this process has.
    Joined(Vec<u32>),
    /// The process has released its slots.
    Left,
}

/// State of a member, shared with `status`.
pub(crate) type SharedStatus = Arc<Mutex<SteeringStatus>>;

/// Membership of one worker in the steering group, with its slot and sockets.
#[derive(Debug)]
pub(crate) struct Member {
    config: SteeringConfig,
    port: u16,
    sockets: MemberSockets,
    slot: Option<JoinedSlot>,
    next_beat: Instant,
    next_check: Instant,
    left: bool,
    /// Time since which another process has held the lock for taking slots.
    refused_since: Option<Instant>,
    status: SharedStatus,
}

/// The slot of this member.
#[derive(Debug)]
struct JoinedSlot {
    slots: Slots,
    socks: Socks,
    number: u32,
    record: Slot,
}

/// Why a member has no slot.
#[derive(Debug, thiserror::Error)]
enum JoinError {
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("live replicas use all {SLOTS} steering slots")]
    NoSlot,
    #[error(transparent)]
    Directory(#[from] PinDirError),
    #[error("cannot lock {path}: {source}")]
    Lock { path: String, source: io::Error },
    #[error("no steering program is attached: {path} does not exist", path = .0.display())]
    NoProgram(PathBuf),
}

impl Member {
    /// Makes a member and joins if possible. Otherwise [`Self::beat`] tries again.
    pub(crate) fn new(
        config: SteeringConfig,
        port: u16,
        sockets: MemberSockets,
        status: SharedStatus,
        now: Instant,
    ) -> Self {
        let mut member = Self {
            config,
            port,
            sockets,
            slot: None,
            next_beat: now,
            next_check: now,
            left: false,
            refused_since: None,
            status,
        };
        member.beat(now);
        member
    }

    /// Time at which [`Self::beat`] should be called next.
    pub(crate) fn next_beat(&self) -> Instant {
        self.next_beat
    }

    /// Writes the heartbeat if it is due.
    pub(crate) fn beat(&mut self, now: Instant) {
        if self.left || now < self.next_beat {
            return;
        }
        self.next_beat = now + Duration::from_millis(HEARTBEAT_INTERVAL_MS);
        if let Some(why) = self.config.gate.closed() {
            self.wait(&why);
            return;
        }
        if now >= self.next_check {
            self.next_check = now + RECHECK;
            self.check_pins();
        }
        if self.slot.is_none() {
            self.join(now);
        }
        if let Some(slot) = &mut self.slot
            && let Err(why) = slot.beat()
        {
            tracing::warn!(%why, "a worker lost its steering slot; it joins again");
            self.slot = None;
            *self.status.lock() = SteeringStatus::Unavailable(why);
        }
    }

    /// Gives up the slot until the gate is open.
    fn wait(&mut self, why: &str) {
        if let Some(slot) = self.slot.take() {
            tracing::warn!(
                why,
                "a worker gives up its steering slot until it can answer queries"
            );
            slot.vacate();
        }
        *self.status.lock() = SteeringStatus::Waiting(why.to_owned());
    }

    /// Gives up the slot, so that no new packets come to this member.
    pub(crate) fn leave(&mut self) {
        if self.left {
            return;
        }
        self.left = true;
        if let Some(slot) = self.slot.take() {
            slot.vacate();
        }
        // The duplicates would keep closed listeners open.
        self.sockets = MemberSockets::default();
        *self.status.lock() = SteeringStatus::Left;
        self.next_beat += Duration::from_secs(3600);
    }

    fn join(&mut self, now: Instant) {
        match self.try_join(now) {
            Ok(slot) => {
                *self.status.lock() = SteeringStatus::Joined(vec![slot.number]);
                self.slot = Some(slot);
            }
            Err(e @ JoinError::NoSlot) => *self.status.lock() = SteeringStatus::Full(e.to_string()),
            Err(e) => *self.status.lock() = SteeringStatus::Unavailable(e.to_string()),
        }
    }

    fn try_join(&mut self, now: Instant) -> Result<JoinedSlot, JoinError> {
        let globals = Globals::new(&self.config.bpf_root);
        let slots = Slots::open(&globals.path(SLOTS_NAME), MapKind::Array, Access::ReadWrite)?;
        program_is_there(&globals)?;
        let socks = Socks::open(
            &globals.path(SOCKS_NAME),
            MapKind::SockMap,
            Access::ReadWrite,
        )?;
        // Two members that join at once must not use the same slot.
        let _lock = self.lock(&globals, now)?;
        let now_ns = monotonic_ns();
        let mut number = None;
        for candidate in 0..SLOTS.min(slots.max_entries()) {
            let slot = slots.get(&candidate)?.unwrap_or_default();
            if slot.kind == KIND_FREE || now_ns.saturating_sub(slot.heartbeat) > TAKEN_AFTER_NS {
                number = Some(candidate);
                break;
            }
        }
        let number = match number {
            Some(number) => number,
            None => self.orphan(&slots, &socks)?.ok_or(JoinError::NoSlot)?,
        };
        let mut bits = 0;
        for (index, fd) in self.sockets.in_order() {
            socks.set(
                &(number * SOCKS_PER_SLOT + index),
                &fd.as_raw_fd().cast_unsigned(),
            )?;
            bits |= 1 << index;
        }
        let record = Slot {
            heartbeat: monotonic_ns(),
            kind: self.config.kind,
            owner: std::process::id(),
            sockets: bits,
            proxy_port: u32::from(self.port),
        };
        slots.set(&number, &record)?;
        Ok(JoinedSlot {
            slots,
            socks,
            number,
            record,
        })
    }

    /// Locks the slots without waiting: a member that does not get the lock tries again with its
    /// next heartbeat. After [`LOCKED_FOR`] it continues without the lock, because the holder
    /// hangs. If two members then use one slot, their next heartbeats show it and one of them
    /// leaves.
    fn lock(&mut self, globals: &Globals, now: Instant) -> Result<Option<Flock<File>>, JoinError> {
        let dir = pins::open(globals.root(), pin::SLOTS_LOCK)?;
        let path = globals.root().join(pin::SLOTS_LOCK);
        let errno = match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => {
                self.refused_since = None;
                return Ok(Some(locked));
            }
            Err((_, errno)) => errno,
        };
        let since = *self.refused_since.get_or_insert(now);
        if errno != Errno::EWOULDBLOCK || now.saturating_duration_since(since) < LOCKED_FOR {
            return Err(JoinError::Lock {
                path: path.display().to_string(),
                source: errno.into(),
            });
        }
        tracing::warn!(path = %path.display(), "another process holds the lock of the steering slots for too long; joining without it");
        Ok(None)
    }

    /// Finds a slot without sockets: its owner was killed a moment ago, and the kernel removed its
    /// sockets. Without this, replicas that start and exit quickly would use up all slots.
    fn orphan(&self, slots: &Slots, socks: &Socks) -> Result<Option<u32>, MapError> {
        for candidate in 0..SLOTS.min(slots.max_entries()) {
            let slot = slots.get(&candidate)?.unwrap_or_default();
            let mut sockets = self.sockets.in_order();
            let Some((index, fd)) = sockets.find(|(index, _)| slot.sockets & (1 << index) != 0)
            else {
                continue;
            };
            let slot = candidate * SOCKS_PER_SLOT + index;
            if socks.add(&slot, &fd.as_raw_fd().cast_unsigned())? {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    }

    /// Releases a slot whose pins were replaced or removed, because steering no longer uses it.
    fn check_pins(&mut self) {
        let Some(slot) = &self.slot else {
            return;
        };
        let globals = Globals::new(&self.config.bpf_root);
        let path = globals.path(SLOTS_NAME);
        let same = Slots::open(&path, MapKind::Array, Access::ReadWrite)
            .is_ok_and(|pinned| pinned.id() == slot.slots.id())
            && program_is_there(&globals).is_ok();
        if !same && let Some(slot) = self.slot.take() {
            slot.vacate();
        }
    }
}

/// Checks that the steering program is loaded, because maps alone steer nothing. A pin that this
/// process may not inspect counts as present.
fn program_is_there(globals: &Globals) -> Result<(), JoinError> {
    let path = steering_program::link_pin(globals);
    match path.try_exists() {
        Ok(false) => Err(JoinError::NoProgram(path)),
        Ok(true) | Err(_) => Ok(()),
    }
}

impl JoinedSlot {
    fn beat(&mut self) -> Result<(), String> {
        let taken = || {
            format!(
                "slot {} was taken while this replica was silent",
                self.number
            )
        };
        let looked_at = monotonic_ns();
        let found = self.slots.get(&self.number).map_err(|e| e.to_string())?;
        if found != Some(self.record) {
            return Err(taken());
        }
        let mut record = self.record;
        record.heartbeat = monotonic_ns();
        self.slots
            .set(&self.number, &record)
            .map_err(|e| e.to_string())?;
        // This process was stopped between the check and the write for long enough to lose the
        // slot. Its heartbeat may now be in a slot with another process's sockets. Without more
        // heartbeats, the slot is free soon.
        if monotonic_ns().saturating_sub(looked_at) > TAKEN_AFTER_NS {
            return Err(taken());
        }
        self.record = record;
        Ok(())
    }

    fn vacate(self) {
        let ours = self.slots.get(&self.number).ok().flatten() == Some(self.record);
        if !ours {
            return;
        }
        if let Err(e) = self.slots.set(&self.number, &Slot::default()) {
            tracing::warn!(error = %e, slot = self.number, "cannot release a steering slot");
        }
        for index in 0..SOCKS_PER_SLOT {
            // The kernel reports an error if the entry is missing. In both cases the entry is then
            // gone.
            let _ = self.socks.remove(&(self.number * SOCKS_PER_SLOT + index));
        }
    }
}
