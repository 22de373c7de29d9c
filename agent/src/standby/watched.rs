//! What a standby knows of the owner while it waits.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dns_policy::{boot_time::BootTime, wall_time};
use parking_lot::Mutex;

use crate::{
    admin::{
        client::{Client, ClientError},
        standby::{OWNER, StandbyView},
    },
    config::Config,
    metrics::owner::OwnerScrape,
    owner::{OwnerView, file::OwnerFile},
};

/// Time between two questions whether the owner lives.
const INTERVAL: Duration = Duration::from_secs(5);

/// What this standby sees of the owner. All clones have one state.
#[derive(Clone, Debug)]
pub(super) struct Watched(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// What the page says of this standby itself.
    own: StandbyView,
    /// The owner's admin socket.
    socket: PathBuf,
    state_dir: PathBuf,
    /// When the owner last answered, or this standby began to ask.
    answered: Mutex<Instant>,
    has_answered: AtomicBool,
    takes_over_at: Mutex<Option<String>>,
}

impl Watched {
    /// `owner` is its process id, if it can be seen.
    pub(super) fn new(config: &Config, owner: Option<u32>) -> Self {
        Self(Arc::new(Inner {
            own: StandbyView::now(owner),
            socket: config.flags.admin_socket.clone(),
            state_dir: config.flags.state_dir.clone(),
            answered: Mutex::new(Instant::now()),
            has_answered: AtomicBool::new(false),
            takes_over_at: Mutex::new(None),
        }))
    }

    /// Asks the owner for a sign of life, again and again. Nothing follows from its silence but a report: the owner may
    /// be stopped, and go on.
    pub(super) async fn ask(self) {
        let client = Client::new(&self.0.socket);
        loop {
            match client.get::<OwnerView>(OWNER).await {
                // A release that does not know the question answers, too.
                Ok(_) | Err(ClientError::Refused(_) | ClientError::Decode(_)) => {
                    *self.0.answered.lock() = Instant::now();
                    self.0.has_answered.store(true, Ordering::Relaxed);
                }
                Err(error) => tracing::debug!(%error, "the owner does not answer"),
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Whether the owner has ever answered this standby.
    pub(super) fn has_answered(&self) -> bool {
        self.0.has_answered.load(Ordering::Relaxed)
    }

    /// How long the owner has not answered. One question may be on its way.
    pub(super) fn silent_for(&self) -> Duration {
        let silent = self.0.answered.lock().elapsed();
        silent.saturating_sub(INTERVAL)
    }

    /// The takeover waits for this time.
    pub(super) fn takes_over_in(&self, delay: Duration) {
        let at = wall_time::now().saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(0));
        *self.0.takes_over_at.lock() = Some(wall_time::render(at));
    }

    fn owner(&self) -> Option<OwnerFile> {
        OwnerFile::read(&self.0.state_dir).ok().flatten()
    }

    pub(super) fn view(&self) -> StandbyView {
        StandbyView {
            owned_by: self
                .owner()
                .map(|file| OwnerView::of(&file, BootTime::now())),
            owner_silent_seconds: self.silent_for().as_secs(),
            takes_over_at: self.0.takes_over_at.lock().clone(),
            ..self.0.own.clone()
        }
    }

    pub(super) fn scrape(&self) -> OwnerScrape {
        let takeovers = self.owner().map(|file| file.takeovers).unwrap_or_default();
        OwnerScrape {
            silent_seconds: Some(self.silent_for().as_secs()),
            ..OwnerScrape::of(&takeovers, BootTime::now())
        }
    }
}
