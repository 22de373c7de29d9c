//! A second agent beside the one that owns the node (`--standby`): it waits until that one ends, and takes its place.
//!
//! ```text
//!  turn (one waits, others wait for it) ─► is the node free? ─ yes ─────────────────────────────────────┐
//!                                            └─ no ─► settings as the owner's? ─► owner's end ─► brake ─► app::run
//! ```
//! Until then it writes nothing but its socket.

mod page;
mod trial;
mod warm;
mod watched;

use std::{
    fs::{self, File},
    path::Path,
    thread,
    time::Duration,
};

use agent_datapath::{root::BpfRootLock, warm::Warm};
use anyhow::{Context as _, Result, bail};
use daemon::{
    pins::{self, MayOpen},
    service_manager::ServiceManager,
    state_file::StateFileError,
};
use dns_policy::boot_time::BootTime;
use nix::fcntl::Flock;
use shared_maps::{pin, user::boot_id};
use tokio::sync::oneshot;

use self::{page::Page, trial::Trial, watched::Watched};
use crate::{
    config::{Config, Settings, Standby},
    epoch::{StateDirError, StateDirLock},
    owner::{Former, file::OwnerFile},
};

/// Time between two looks whether the owner still has these settings.
const LOOK: Duration = Duration::from_secs(1);
/// How long a process that ends may take between the releases of its two locks.
const ENDING: Duration = Duration::from_secs(5);
/// An owner that has not answered for so long may have been stopped, and has not looked for its endpoints meanwhile.
const NOT_LOOKED: Duration = Duration::from_secs(60);

/// What a standby has when it owns the node.
pub(crate) struct Taken {
    pub(crate) lock: BpfRootLock,
    pub(crate) begin: Begin,
    /// What the former owner left in its file.
    pub(crate) former: Former,
}

/// How an agent comes to own the node.
pub(crate) enum Begin {
    /// No other agent owned it.
    Start,
    /// The owner before has ended.
    Takeover {
        /// The programs that this agent loaded while it waited, if it could.
        warm: Option<Box<Warm>>,
        /// The endpoints are where the owner before had them until just now.
        keeps_endpoints: bool,
    },
}

/// Waits until this process owns the BPF root.
///
/// # Errors
/// The owner has other settings, or a lock or the socket cannot be had.
pub(crate) async fn wait(
    config: &Config,
    settings: &Settings,
    manager: &ServiceManager,
) -> Result<Taken> {
    let root = &config.flags.bpf_root;
    let comparison = Comparison::new(config, settings);
    comparison.check_root()?;
    let _turn = turn(root, manager).await?;
    if let Some(lock) = free_or_same_state_dir(config).await? {
        let (begin, former) = (Begin::Start, former(config));
        return Ok(Taken {
            lock,
            begin,
            former,
        });
    }
    comparison.check()?;
    let warm = warm::load(config).await;
    let holder = BpfRootLock::holder(root)?;
    let watched = Watched::new(config, holder);
    let trial = Trial::new(config, warm.as_ref().err().cloned());
    let page = Page::serve(config, &watched, trial).await?;
    tracing::info!(
        owner = holder,
        "standing by: this agent takes over when the owner of the node ends"
    );
    let path = root.clone();
    let mut owned = std::pin::pin!(on_thread(move || BpfRootLock::wait(&path)));
    let lock = loop {
        manager.state(true, "stands by for the agent that owns this node");
        manager.alive();
        match tokio::time::timeout(LOOK, &mut owned).await {
            Ok(lock) => break lock??,
            Err(_) => comparison.check()?,
        }
    };
    let former = former(config);
    let longest = config.flags.standby.standby_max_delay;
    let delay = former.delay(BootTime::now(), longest);
    brake(delay, &watched, manager).await;
    page.close().await;
    tracing::info!("taking over: the agent that owned this node has ended");
    let begin = Begin::Takeover {
        warm: warm.ok().map(Box::new),
        keeps_endpoints: keeps_endpoints(&former, delay, &watched),
    };
    Ok(Taken {
        lock,
        begin,
        former,
    })
}

/// Waits until no other agent stands by.
async fn turn(root: &Path, manager: &ServiceManager) -> Result<Flock<File>> {
    let turn = pins::make(root, pin::STANDBY_LOCK, MayOpen::Owner)?;
    let mut turn = std::pin::pin!(on_thread(move || pins::wait(turn)));
    loop {
        match tokio::time::timeout(LOOK, &mut turn).await {
            Ok(turn) => return turn?.context("waiting for the turn of this standby"),
            Err(_) => {
                manager.state(true, "waits for its turn to stand by");
                manager.alive();
            }
        }
    }
}

/// Whether the endpoints are where the owner before had them. An owner that was stopped for long, or died before it had
/// looked for them, does not know.
fn keeps_endpoints(former: &Former, delay: Duration, watched: &Watched) -> bool {
    let keeps = former.has_looked()
        && delay.is_zero()
        && watched.has_answered()
        && watched.silent_for() < NOT_LOOKED;
    if !keeps {
        tracing::info!(
            "this agent looks for all endpoints before it is ready, as after an ordinary start"
        );
    }
    keeps
}

/// The owner before, which has ended.
pub(crate) fn former(config: &Config) -> Former {
    let boot_id = boot_id().unwrap_or_default();
    Former::read(&config.flags.state_dir, &boot_id)
}

/// Waits before a takeover that may be one of a loop. This agent has the lock meanwhile, so that no other one starts.
async fn brake(delay: Duration, watched: &Watched, manager: &ServiceManager) {
    if delay.is_zero() {
        return;
    }
    tracing::warn!(
        ?delay,
        "several owners of this node died one after the other: this agent waits before it takes over, and is the owner \
         then; see --standby-max-delay, and the logs of the agents that died"
    );
    watched.takes_over_in(delay);
    let end = tokio::time::Instant::now() + delay;
    while let Some(left) = end.checked_duration_since(tokio::time::Instant::now()) {
        manager.state(
            true,
            "waits before it takes over, because several owners died",
        );
        manager.alive();
        tokio::time::sleep(left.min(LOOK).max(Duration::from_millis(1))).await;
    }
}

/// The lock of the state directory, which the owner before this one gives back a moment after the BPF root.
pub(crate) async fn state_dir(config: &Config) -> Result<StateDirLock, StateDirError> {
    StateDirLock::take_within(&config.flags.state_dir, ENDING).await
}

/// Compares this agent with the owner.
struct Comparison<'a> {
    config: &'a Config,
    settings: &'a Settings,
}

impl<'a> Comparison<'a> {
    fn new(config: &'a Config, settings: &'a Settings) -> Self {
        Self { config, settings }
    }

    /// Refuses a standby whose settings keep it from taking this owner's place.
    fn check(&self) -> Result<()> {
        let state = &self.config.flags.state_dir;
        let owner = match OwnerFile::read(state) {
            Ok(Some(owner)) => owner,
            // The owner is of a release without this file, or could not write it.
            Ok(None) => return Ok(()),
            // For example, this process has no descriptor left: it compares again in a moment.
            Err(error @ StateFileError::Io { .. }) => {
                tracing::warn!(%error, "this standby cannot compare its settings with those of the owner");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        if owner.node != self.config.node_name {
            bail!(
                "--node-name: this standby is {:?}, and the agent that owns this node is {:?}; give both the same name",
                self.config.node_name,
                owner.node
            );
        }
        if self.config.flags.standby.standby == Some(Standby::Other) {
            let differences = self.settings.differences_in_places(&owner.settings);
            if differences.is_empty() {
                return Ok(());
            }
            bail!(
                "--standby=other: the agent that owns this node has other directories or sockets: {}. Its proxies and \
                 commands find the next owner only at the same ones: give both the same",
                differences.join("; ")
            );
        }
        let differences = self.settings.differences(&owner.settings);
        if differences.is_empty() {
            return Ok(());
        }
        bail!(
            "--standby: the agent that owns this node has other settings: {}. Give both the same, or let this one take \
             over with its own by --standby=other",
            differences.join("; ")
        );
    }

    /// Refuses a standby whose state directory is in use by an agent with another BPF root. The standby waits for the
    /// lock of its own BPF root, which that agent does not hold: it would never get the state directory.
    fn check_root(&self) -> Result<()> {
        let (root, state) = (&self.config.flags.bpf_root, &self.config.flags.state_dir);
        if !StateDirLock::is_held(state)? {
            return Ok(());
        }
        let owner = OwnerFile::read(state)?;
        let other = owner.as_ref().and_then(|owner| owner.settings.bpf_root());
        let Some(other) = other.filter(|other| !is_same_dir(root, other)) else {
            return Ok(());
        };
        bail!(
            "--bpf-root: the agent that has the state directory {} has the BPF root {}, and this standby {}; give both \
             agents the same",
            state.display(),
            other.display(),
            root.display()
        );
    }
}

/// Whether two spellings are of one directory.
fn is_same_dir(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    one == other || real(one) == real(other)
}

/// The lock of the BPF root if it is free. `None`: an agent holds this lock, and also that of this agent's state
/// directory.
async fn free_or_same_state_dir(config: &Config) -> Result<Option<BpfRootLock>> {
    let (root, state) = (&config.flags.bpf_root, &config.flags.state_dir);
    let deadline = tokio::time::Instant::now() + ENDING;
    loop {
        if let Some(lock) = BpfRootLock::take_if_free(root)? {
            return Ok(Some(lock));
        }
        if StateDirLock::is_held(state)? {
            return Ok(None);
        }
        if tokio::time::Instant::now() >= deadline {
            bail!(other_state_dir(root, state));
        }
        tokio::time::sleep(LOOK / 10).await;
    }
}

fn other_state_dir(root: &Path, state: &Path) -> String {
    format!(
        "--state-dir: the agent that owns the BPF root {} keeps its state elsewhere than in {}; give both agents the same \
         --state-dir",
        root.display(),
        state.display()
    )
}

/// The result of a call that blocks. A runtime that ends does not wait for it.
async fn on_thread<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (send, receive) = oneshot::channel();
    thread::Builder::new()
        .name("standby".to_owned())
        .spawn(move || {
            let _gone = send.send(call());
        })?;
    Ok(receive.await?)
}
