//! A directory as the store: one YAML file for each object, written by one agent.

mod files;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, OpenOptions, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use agent_core::source_event::SourceEvent;
use dns_policy::name::Fqdn;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use self::files::{Files, check_owner};
use super::{Changes, Created, Observers, ResolverStore, Role, StoreError, StoreHealth, Updated};
use crate::{
    resolver::object::{ObjectKey, Resolver, Status, Version},
    watched_dir::WatchedDir,
};

/// Subdirectory of `--resolver-dir`.
const DIRECTORY: &str = "dnsnameresolvers";
/// The agent that writes has a lock on this file.
const LOCK: &str = ".lock";
/// Time between attempts to become the agent that writes.
const ATTEMPTS: Duration = Duration::from_secs(1);
/// Maximum objects in one list of changes.
const CHANGES: usize = 256;

/// The store. Clones are the same store.
#[derive(Clone, Debug)]
pub(crate) struct FileStore {
    dir: PathBuf,
    files: Arc<Mutex<Files>>,
    /// Notified when there are changes that the watch has not sent.
    changed: Arc<Notify>,
}

impl FileStore {
    /// Objects of `namespace` in the directory `--resolver-dir`. Nothing is read or written yet.
    pub(crate) fn new(resolver_dir: &Path, namespace: &str) -> Self {
        let dir = resolver_dir.join(DIRECTORY);
        Self {
            files: Arc::new(Mutex::new(Files::new(&dir, namespace))),
            changed: Arc::default(),
            dir,
        }
    }

    /// Runs `work` on a thread that may wait for the disk.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Files) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let files = Arc::clone(&self.files);
        let done = tokio::task::spawn_blocking(move || work(&mut files.lock())).await;
        let done = done.unwrap_or_else(|_| {
            let error = "reading or writing an object panicked (a bug)";
            Err(StoreError::Unavailable(error.to_owned()))
        });
        self.changed.notify_one();
        done
    }

    /// The lock on the directory, which is made if it is missing; `None` if another agent has the lock.
    fn take_lock(dir: &Path) -> io::Result<Option<Flock<fs::File>>> {
        files::make(dir)?;
        check_owner(dir)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(dir.join(LOCK))?;
        // Every process that may open the file may lock it.
        file.set_permissions(Permissions::from_mode(0o600))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Some(lock)),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, errno)) => Err(errno.into()),
        }
    }

    /// Whether the locked file is still the one at its path. If not, another agent can lock the file that is there.
    fn holds(dir: &Path, lock: &Flock<fs::File>) -> bool {
        let there = fs::metadata(dir.join(LOCK));
        let same = there.and_then(|there| {
            let held = lock.metadata()?;
            Ok((there.dev(), there.ino()) == (held.dev(), held.ino()))
        });
        same.unwrap_or(false)
    }
}

impl ResolverStore for FileStore {
    fn observers(&self) -> Observers {
        Observers::Leader
    }

    async fn get(&self, key: &ObjectKey) -> Result<Option<Resolver>, StoreError> {
        let key = key.clone();
        self.with(move |files| files.get(&key)).await
    }

    async fn list(&self) -> Result<Vec<Resolver>, StoreError> {
        let listed = self.with(|files| {
            files.scan()?;
            Ok(files.objects())
        });
        listed.await
    }

    async fn watch(
        &self,
        changes: mpsc::Sender<Changes>,
        health: watch::Sender<StoreHealth>,
        stop: CancellationToken,
    ) {
        let mut watched = None;
        let mut has_listed = false;
        let mut has_begun = false;
        while !stop.is_cancelled() {
            let is_first = !has_listed;
            let scanned = self.with(move |files| {
                let scanned = files.scan();
                let problems = files.problems(&scanned);
                // A directory that cannot be read counts as empty: the agent continues without objects.
                if is_first && (scanned.is_ok() || !has_begun) {
                    return Ok((scanned, problems, files.list_events()));
                }
                Ok((scanned, problems, files.take_changes()))
            });
            let (scanned, problems, events) = match scanned.await {
                Ok(done) => done,
                Err(error) => (Err(error.clone()), vec![error.to_string()], Vec::new()),
            };
            has_begun = true;
            has_listed |= scanned.is_ok();
            health.send_if_modified(|health| {
                let is_new = health.problems != problems;
                health.problems = problems;
                is_new
            });
            for some in events.chunks(CHANGES) {
                if changes.send(some.to_vec()).await.is_err() {
                    return;
                }
            }
            if watched.is_none() && self.dir.is_dir() {
                watched = Some(WatchedDir::new(&self.dir));
                // Looks once more: files may have changed before the watch began.
                continue;
            }
            tokio::select! {
                () = self.changed_by_us() => {}
                () = seen(watched.as_ref()) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    async fn lead(&self, role: watch::Sender<Role>, stop: CancellationToken) {
        let mut held = None;
        while !stop.is_cancelled() {
            let dir = self.dir.clone();
            let before: Option<Flock<fs::File>> = held.take();
            let now = tokio::task::spawn_blocking(move || match before {
                Some(lock) if FileStore::holds(&dir, &lock) => Ok((Some(lock), true)),
                // The file at the path may be another one now.
                _ => FileStore::take_lock(&dir).map(|lock| (lock, false)),
            });
            let now = match now.await {
                // After a panic, which is in the log, another agent may have the lock.
                Ok(Ok((None, _))) | Err(_) => {
                    self.settle(None).await;
                    Role::Follows
                }
                Ok(Ok((Some(lock), is_as_before))) => {
                    let began = match is_as_before {
                        true => Ok(()),
                        false => self.begin().await,
                    };
                    match began {
                        Ok(()) => {
                            held = Some(lock);
                            Role::Leads
                        }
                        Err(error) => {
                            self.settle(Some(error)).await;
                            Role::LeadsInMemory
                        }
                    }
                }
                Ok(Err(error)) => {
                    self.settle(Some(files::failed(&self.dir, &error))).await;
                    Role::LeadsInMemory
                }
            };
            role.send_if_modified(|role| std::mem::replace(role, now) != now);
            let _stopped = stop.run_until_cancelled(sleep(ATTEMPTS)).await;
        }
        self.files.lock().set_leads(false);
        role.send_replace(Role::Follows);
        drop(held);
    }

    async fn create(&self, key: &ObjectKey, name: &Fqdn) -> Result<Created, StoreError> {
        let (key, name) = (key.clone(), name.clone());
        self.with(move |files| files.create(&key, &name)).await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let key = key.clone();
        self.with(move |files| files.delete(&key)).await
    }

    async fn update_status(
        &self,
        key: &ObjectKey,
        version: &Version,
        status: &Status,
    ) -> Result<Updated, StoreError> {
        let (key, version, status) = (key.clone(), version.clone(), status.clone());
        let updated = self.with(move |files| files.update(&key, &version, status));
        updated.await
    }
}

impl FileStore {
    /// Begins to write, on the basis of the files that the former leader left.
    async fn begin(&self) -> Result<(), StoreError> {
        let began = self.with(|files| {
            files.set_leads(false);
            files.scan()?;
            files.set_leads(true);
            files.set_unwritable(None);
            Ok(())
        });
        began.await
    }

    /// Ends writing, because another agent writes, or because nothing can be written.
    async fn settle(&self, unwritable: Option<StoreError>) {
        let settled = self.with(|files| {
            files.set_leads(false);
            files.set_unwritable(unwritable);
            Ok(())
        });
        // The call changes memory only.
        let _done = settled.await;
    }

    async fn changed_by_us(&self) {
        loop {
            self.changed.notified().await;
            if self.files.lock().has_changes() {
                return;
            }
        }
    }
}

async fn seen(watched: Option<&WatchedDir>) {
    match watched {
        Some(watched) => watched.changed().await,
        None => sleep(ATTEMPTS).await,
    }
}

/// A change that the watch sends.
type Event = SourceEvent<Resolver>;
