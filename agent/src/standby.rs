//! A second agent beside the one that owns the node (`--standby`): it waits until that one ends, and takes its place.
//!
//! ```text
//!  turn (one waits, the others wait for it) ─► settings as the owner's? ─► lock of the BPF root ─► app::run goes on
//! ```
//! Until then it writes nothing but its socket.

pub(crate) mod owner_file;
mod page;

use std::{path::Path, thread, time::Duration};

use agent_datapath::root::BpfRootLock;
use anyhow::{Context as _, Result, bail};
use daemon::pins::{self, MayOpen};
use shared_maps::pin;
use tokio::sync::oneshot;

use self::{owner_file::OwnerFile, page::Page};
use crate::{
    admin::standby::StandbyView,
    config::{Config, Settings, Standby},
    epoch::{StateDirError, StateDirLock},
};

/// Time between two looks whether the owner still has these settings.
const LOOK: Duration = Duration::from_secs(1);
/// How long a process that ends may take for its other lock.
const ENDING: Duration = Duration::from_secs(5);

/// Waits until this process owns the BPF root.
///
/// # Errors
/// The owner has other settings, or a lock or the socket cannot be had.
pub(crate) async fn wait(config: &Config, settings: &Settings) -> Result<BpfRootLock> {
    let root = &config.flags.bpf_root;
    let turn = pins::make(root, pin::STANDBY_LOCK, MayOpen::Owner)?;
    let _turn = on_thread(move || pins::wait(turn))
        .await?
        .context("waiting for the turn of this standby")?;
    let holder = BpfRootLock::holder(root)?;
    if holder.is_some() {
        same_state_dir(config).await?;
    }
    let comparison = Comparison::new(config, settings);
    comparison.check()?;
    let page = Page::serve(&config.flags.admin_socket, &StandbyView::now(holder))?;
    tracing::info!(
        owner = holder,
        "standing by: this agent takes over when the owner of the node ends"
    );
    let path = root.clone();
    let mut owned = std::pin::pin!(on_thread(move || BpfRootLock::wait(&path)));
    let lock = loop {
        match tokio::time::timeout(LOOK, &mut owned).await {
            Ok(lock) => break lock??,
            Err(_) => comparison.check()?,
        }
    };
    drop(page);
    tracing::info!("taking over: the agent that owned this node has ended");
    Ok(lock)
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

    fn check(&self) -> Result<()> {
        let state = &self.config.flags.state_dir;
        let Some(owner) = OwnerFile::read(state)? else {
            // The owner is of a release without this file.
            return Ok(());
        };
        if owner.node != self.config.node_name {
            bail!(
                "--node-name: this standby is {:?}, and the agent that owns this node is {:?}; give both the same name",
                self.config.node_name,
                owner.node
            );
        }
        if self.config.flags.standby.standby == Some(Standby::Other) {
            return Ok(());
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
}

/// The owner of a BPF root has its state directory locked as well.
async fn same_state_dir(config: &Config) -> Result<()> {
    let (root, state) = (&config.flags.bpf_root, &config.flags.state_dir);
    let deadline = tokio::time::Instant::now() + ENDING;
    loop {
        match StateDirLock::take(state) {
            Err(StateDirError::Busy { .. }) => return Ok(()),
            taken => drop(taken?),
        }
        if BpfRootLock::holder(root)?.is_none() {
            return Ok(());
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
