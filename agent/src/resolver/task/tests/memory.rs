//! Stores of tests: one in memory, and one that makes conflicts in another store.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;

use super::*;
use crate::resolver::object::{AddressStatus, NameStatus, ObjectKey, Status, Version};

#[derive(Clone, Default)]
pub(super) struct Memory(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    objects: BTreeMap<ObjectKey, Resolver>,
    version: u64,
    writes: u64,
    refuses: bool,
    has_leader: bool,
    watches: Vec<mpsc::UnboundedSender<Changes>>,
}

impl State {
    fn put(&mut self, mut object: Resolver) -> Result<Resolver, StoreError> {
        if self.refuses {
            return Err(StoreError::Unavailable("the store is away".to_owned()));
        }
        self.version += 1;
        self.writes += 1;
        object.version = Version(self.version.to_string());
        self.objects.insert(object.key.clone(), object.clone());
        self.send(&SourceEvent::Apply(object.clone()));
        Ok(object)
    }

    fn send(&mut self, event: &SourceEvent<Resolver>) {
        self.watches
            .retain(|watch| watch.send(vec![event.clone()]).is_ok());
    }
}

impl Memory {
    pub(super) fn objects(&self) -> Vec<Resolver> {
        self.0.lock().objects.values().cloned().collect()
    }

    pub(super) fn writes(&self) -> u64 {
        self.0.lock().writes
    }

    pub(super) fn refuse(&self, refuses: bool) {
        self.0.lock().refuses = refuses;
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a test's store never waits for its watches"
    )]
    fn begin_watch(&self) -> mpsc::UnboundedReceiver<Changes> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut state = self.0.lock();
        let objects = state.objects.values().cloned().map(SourceEvent::Apply);
        let list = std::iter::once(SourceEvent::Init).chain(objects);
        sender
            .send(list.chain([SourceEvent::InitDone]).collect())
            .unwrap();
        state.watches.push(sender);
        receiver
    }
}

impl ResolverStore for Memory {
    fn observers(&self) -> Observers {
        Observers::Every
    }

    async fn get(&self, key: &ObjectKey) -> Result<Option<Resolver>, StoreError> {
        Ok(self.0.lock().objects.get(key).cloned())
    }

    async fn list(&self) -> Result<Vec<Resolver>, StoreError> {
        Ok(self.objects())
    }

    async fn watch(
        &self,
        changes: mpsc::Sender<Changes>,
        _health: watch::Sender<StoreHealth>,
        stop: CancellationToken,
    ) {
        let mut receiver = self.begin_watch();
        while let Some(Some(changed)) = stop.run_until_cancelled(receiver.recv()).await {
            if changes.send(changed).await.is_err() {
                return;
            }
        }
    }

    async fn lead(&self, role: watch::Sender<Role>, stop: CancellationToken) {
        while std::mem::replace(&mut self.0.lock().has_leader, true) {
            tokio::select! {
                () = sleep(Duration::from_millis(5)) => {}
                () = stop.cancelled() => return,
            }
        }
        role.send_replace(Role::Leads);
        stop.cancelled().await;
        self.0.lock().has_leader = false;
    }

    async fn create(&self, key: &ObjectKey, name: &Fqdn) -> Result<Created, StoreError> {
        let mut state = self.0.lock();
        if state.objects.contains_key(key) {
            return Ok(Created::Exists);
        }
        let object = Resolver {
            key: key.clone(),
            version: Version::default(),
            name: name.clone(),
            status: Status::default(),
        };
        state.put(object).map(Created::Done)
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let mut state = self.0.lock();
        if state.objects.remove(key).is_some() {
            state.send(&SourceEvent::Delete(key.to_string()));
        }
        Ok(())
    }

    async fn update_status(
        &self,
        key: &ObjectKey,
        version: &Version,
        status: &Status,
    ) -> Result<Updated, StoreError> {
        let mut state = self.0.lock();
        let Some(mut object) = state.objects.get(key).cloned() else {
            return Ok(Updated::Gone);
        };
        if &object.version != version {
            return Ok(Updated::Conflict);
        }
        object.status = status.clone();
        state
            .put(object)
            .map(|object| Updated::Done(object.version))
    }
}

/// Before every third write, another writer changes the object.
pub(super) struct Conflicting<S> {
    store: S,
    count: AtomicU64,
}

impl<S> Conflicting<S> {
    pub(super) fn new(store: S) -> Self {
        Self {
            store,
            count: AtomicU64::default(),
        }
    }
}

impl<S: ResolverStore> ResolverStore for Conflicting<S> {
    fn observers(&self) -> Observers {
        self.store.observers()
    }

    async fn get(&self, key: &ObjectKey) -> Result<Option<Resolver>, StoreError> {
        self.store.get(key).await
    }

    async fn list(&self) -> Result<Vec<Resolver>, StoreError> {
        self.store.list().await
    }

    async fn watch(
        &self,
        changes: mpsc::Sender<Changes>,
        health: watch::Sender<StoreHealth>,
        stop: CancellationToken,
    ) {
        self.store.watch(changes, health, stop).await;
    }

    async fn lead(&self, role: watch::Sender<Role>, stop: CancellationToken) {
        self.store.lead(role, stop).await;
    }

    async fn create(&self, key: &ObjectKey, name: &Fqdn) -> Result<Created, StoreError> {
        self.store.create(key, name).await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.store.delete(key).await
    }

    async fn update_status(
        &self,
        key: &ObjectKey,
        version: &Version,
        status: &Status,
    ) -> Result<Updated, StoreError> {
        let count = self.count.fetch_add(1, Relaxed);
        if count.is_multiple_of(3)
            && let Some(object) = self.store.get(key).await?
        {
            let mut other = object.status;
            if other.of(&object.name).is_none() {
                let entry = NameStatus {
                    name: object.name.clone(),
                    addresses: Vec::new(),
                    failures: 0,
                    degraded: None,
                };
                other.names.insert(0, entry);
            }
            let last = u8::try_from(count % 250).unwrap_or_default();
            let ip = IpAddr::from([203, 0, 113, last]);
            let entry = &mut other.names[0];
            if entry.addresses.iter().all(|address| address.ip != ip) {
                entry.addresses.push(AddressStatus {
                    ip,
                    ttl: 300,
                    last: now(),
                });
            }
            self.store
                .update_status(key, &object.version, &other)
                .await?;
        }
        self.store.update_status(key, version, status).await
    }
}
