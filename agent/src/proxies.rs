//! The connected proxies: the results that each waits for, and the rules that it was sent and has acknowledged.
//!
//! The core writes here and never waits. Rules are one table that every stream
//! compares with what it sent last: a slow proxy skips versions, never piles
//! them up. A stream whose results are not fetched is closed; its proxy
//! connects again and sends what it still needs.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use agent_core::core::event::{MappingResult, Revocation, RulesUpdate, StreamId};
use daemon::{label, peer::Peer};
use dns_policy::rule::{EndpointRules, RulesOf};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shared_maps::EndpointId;
use tokio::sync::watch;

mod results;

pub use self::results::Results;
use self::results::{Mailbox, mailbox};

/// Maximum streams of one kind; further ones are refused. Peers that may open one
/// kind do not shut out peers of another kind. A peer gets a further stream while it has fewer than
/// are free, as in [`limits::quota`].
const MAX_STREAMS: usize = 256;

/// DNS rules of all endpoints at one revision.
#[derive(Clone, Debug, Default)]
pub struct RulesTable {
    pub revision: u64,
    /// Whether the table is complete: only then a proxy gets it.
    pub ready: bool,
    /// Rules by endpoint; an endpoint without rules is absent.
    pub endpoints: BTreeMap<EndpointId, Arc<EndpointRules>>,
}

/// The difference from one table to a later one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RulesDelta {
    /// Endpoints whose rules are new or changed.
    pub changed: Vec<(EndpointId, Arc<EndpointRules>)>,
    /// Endpoints that no longer have rules.
    pub removed: Vec<EndpointId>,
}

impl RulesTable {
    /// The difference from `before` to this table.
    pub fn since(&self, before: &Self) -> RulesDelta {
        let changed = self
            .endpoints
            .iter()
            .filter(|(id, rules)| {
                before
                    .endpoints
                    .get(id)
                    .is_none_or(|old| !Arc::ptr_eq(old, rules))
            })
            .map(|(id, rules)| (*id, Arc::clone(rules)))
            .collect();
        let removed = before
            .endpoints
            .keys()
            .filter(|id| !self.endpoints.contains_key(id))
            .copied()
            .collect();
        RulesDelta { changed, removed }
    }

    fn apply(&mut self, update: RulesUpdate) {
        self.revision = update.revision;
        for RulesOf { endpoint, rules } in update.changed {
            if rules.ports.is_empty() {
                self.endpoints.remove(&endpoint);
            } else {
                self.endpoints.insert(endpoint, Arc::new(rules));
            }
        }
        for endpoint in update.removed {
            self.endpoints.remove(&endpoint);
        }
    }
}

/// A message to one mapping stream.
#[derive(Clone, Debug, PartialEq)]
pub enum ToStream {
    Results(Vec<MappingResult>),
    /// Leases to drop and to acknowledge.
    Revoke(Vec<Arc<Revocation>>),
}

/// State of one proxy's stream, for `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyView {
    /// Number of the stream, unique within one run of the agent.
    pub stream: u64,
    /// Name from the proxy's Hello, or `pid-N`; `builtin`, `fqdndata` or `fqdndata-rules` for the
    /// other kinds.
    pub instance: String,
    /// `mappings`, `rules`, `builtin` or `fqdndata`.
    pub kind: String,
    /// Process at the other end, if it is known.
    pub pid: Option<i32>,
    /// Revision of the rules that was sent last; 0 for streams without rules.
    pub sent_revision: u64,
    /// Revision of the rules that was acknowledged last; 0 for streams without rules.
    pub acked_revision: u64,
    /// The proxy's mappings without a result yet: at most as many answers wait for them.
    pub waiting: u64,
    /// Why the proxy refused the revision it was sent last.
    pub nack: Option<String>,
    /// Its `--state-dir`, if that is not the agent's directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_state_dir: Option<String>,
}

label! {
    /// Kind of a stream between the agent and a proxy, by its service.
    StreamKind = "kind" {
        /// Streams of holdfast-sdp with mappings of names to addresses.
        Mappings => "mappings",
        /// Streams to holdfast-sdp with DNS rules.
        Rules => "rules",
        /// The built-in proxy of this agent.
        Builtin => "builtin",
        /// Streams of FQDNData, Cilium's gRPC service for DNS proxies.
        FqdnData => "fqdndata",
    }
}

/// The registry. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Proxies {
    shared: Arc<Shared>,
}

type Views = BTreeMap<StreamId, Stream>;

#[derive(Debug)]
struct Stream {
    kind: StreamKind,
    /// The other end; `None` = this process.
    who: Option<Peer>,
    view: ProxyView,
}

#[derive(Debug, Default)]
struct Shared {
    rules: watch::Sender<Arc<RulesTable>>,
    results: Mutex<BTreeMap<StreamId, Mailbox>>,
    views: Mutex<Views>,
    /// Number of the last stream; the first one is 1.
    last: AtomicU64,
    changes: watch::Sender<u64>,
    closed_slow: AtomicU64,
    nacks: AtomicU64,
    unreadable: AtomicU64,
    oversized: AtomicU64,
}

impl Proxies {
    /// Receives the table of rules after each change. A slow receiver skips tables.
    pub fn watch_rules(&self) -> watch::Receiver<Arc<RulesTable>> {
        self.shared.rules.subscribe()
    }

    /// Counts what changed of endpoints, identities and prefixes.
    pub fn watch_changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// Notes that endpoints, identities or prefixes may have changed.
    pub fn changed(&self) {
        self.shared
            .changes
            .send_modify(|number| *number = number.wrapping_add(1));
    }

    /// Enters a stream of this process that gets results. The results end if it reads too slowly.
    pub fn open_results(
        &self,
        kind: StreamKind,
        instance: &str,
        pid: Option<i32>,
    ) -> (StreamGuard, Results) {
        let guard = self.enter(&mut self.shared.views.lock(), kind, instance, pid, None);
        let results = guard.results();
        (guard, results)
    }

    /// Enters the stream of a proxy, `who`, if it may have another of its kind.
    pub fn admit(
        &self,
        kind: StreamKind,
        instance: &str,
        pid: Option<i32>,
        who: Peer,
    ) -> Option<StreamGuard> {
        let mut views = self.shared.views.lock();
        let of_kind = || views.values().filter(|stream| stream.kind == kind);
        let held = of_kind().filter(|stream| stream.who == Some(who)).count();
        let free = MAX_STREAMS.saturating_sub(of_kind().count());
        if held >= free {
            return None;
        }
        Some(self.enter(&mut views, kind, instance, pid, Some(who)))
    }

    fn enter(
        &self,
        views: &mut Views,
        kind: StreamKind,
        instance: &str,
        pid: Option<i32>,
        who: Option<Peer>,
    ) -> StreamGuard {
        let id = StreamId(self.shared.last.fetch_add(1, Ordering::Relaxed) + 1);
        let view = ProxyView {
            stream: id.0,
            instance: instance.to_owned(),
            kind: kind.as_str().to_owned(),
            pid,
            ..ProxyView::default()
        };
        views.insert(id, Stream { kind, who, view });
        StreamGuard {
            id,
            proxies: self.clone(),
        }
    }

    /// Connected proxies, one entry for each stream.
    pub fn views(&self) -> Vec<ProxyView> {
        let views = self.shared.views.lock();
        views.values().map(|stream| stream.view.clone()).collect()
    }

    /// Streams closed because they did not fetch their results.
    pub fn closed_slow(&self) -> u64 {
        self.shared.closed_slow.load(Ordering::Relaxed)
    }

    /// Revisions that a proxy refused.
    pub fn nacks(&self) -> u64 {
        self.shared.nacks.load(Ordering::Relaxed)
    }

    /// Counts mappings that could not be read.
    pub fn add_unreadable(&self, number: u64) {
        self.shared.unreadable.fetch_add(number, Ordering::Relaxed);
    }

    /// Mappings that could not be read.
    pub fn unreadable(&self) -> u64 {
        self.shared.unreadable.load(Ordering::Relaxed)
    }

    /// Counts a snapshot that is larger than a proxy can receive.
    pub fn add_oversized(&self) {
        self.shared.oversized.fetch_add(1, Ordering::Relaxed);
    }

    /// Snapshots that were larger than a proxy can receive.
    pub fn oversized(&self) -> u64 {
        self.shared.oversized.load(Ordering::Relaxed)
    }

    /// Takes new rules from the core.
    pub fn rules(&self, update: RulesUpdate) {
        self.shared
            .rules
            .send_modify(|table| Arc::make_mut(table).apply(update));
    }

    /// Notes that the rules are complete from now on.
    pub fn ready(&self) {
        self.shared
            .rules
            .send_modify(|table| Arc::make_mut(table).ready = true);
    }

    /// Sends each result to the stream that its mapping came from.
    pub fn results(&self, results: Vec<MappingResult>) {
        let mut by_stream: BTreeMap<StreamId, Vec<MappingResult>> = BTreeMap::new();
        for result in results {
            by_stream.entry(result.stream).or_default().push(result);
        }
        for (stream, results) in by_stream {
            // A second result says that the first is on disk.
            let first = results.iter().filter(|result| !result.durable).count() as u64;
            if let Some(Stream { view, .. }) = self.shared.views.lock().get_mut(&stream) {
                view.waiting = view.waiting.saturating_sub(first);
            }
            self.send(stream, ToStream::Results(results));
        }
    }

    /// Sends revocations to their streams: one message for each stream.
    pub fn revoke(&self, revocations: Vec<Revocation>) {
        let mut by_stream: BTreeMap<StreamId, Vec<Arc<Revocation>>> = BTreeMap::new();
        for revocation in revocations.into_iter().map(Arc::new) {
            for stream in &revocation.streams {
                let of_stream = by_stream.entry(*stream).or_default();
                of_stream.push(Arc::clone(&revocation));
            }
        }
        for (stream, revocations) in by_stream {
            self.send(stream, ToStream::Revoke(revocations));
        }
    }

    fn send(&self, stream: StreamId, message: ToStream) {
        let mut results = self.shared.results.lock();
        let Some(mailbox) = results.get(&stream) else {
            return;
        };
        if !mailbox.put(message) {
            // Its receiver ends, and with it the stream.
            results.remove(&stream);
            self.shared.closed_slow.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                stream = stream.0,
                "the proxy does not read its results; closing its stream"
            );
        }
    }
}

/// A stream's entry; gone when dropped.
#[derive(Debug)]
pub struct StreamGuard {
    id: StreamId,
    proxies: Proxies,
}

impl StreamGuard {
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// The results of the stream's mappings. They end if they are not read.
    pub fn results(&self) -> Results {
        let (mailbox, results) = mailbox();
        let mut all = self.proxies.shared.results.lock();
        all.insert(self.id, mailbox);
        results
    }

    /// The registry that the stream is in.
    pub fn proxies(&self) -> &Proxies {
        &self.proxies
    }

    /// Notes mappings that are owed a result.
    pub fn took(&self, mappings: usize) {
        self.change(|view| view.waiting += mappings as u64);
    }

    /// Notes the proxy's state directory, if it is not the agent's.
    pub fn has_other_state_dir(&self, dir: Option<&str>) {
        if let Some(dir) = dir {
            self.change(|view| view.other_state_dir = Some(dir.to_owned()));
        }
    }

    /// Records the revision that was sent last, for `status`.
    pub fn sent(&self, revision: u64) {
        self.change(|view| view.sent_revision = revision);
    }

    /// Records that the proxy acknowledged `revision`, which ends an earlier refusal.
    pub fn acked(&self, revision: u64) {
        self.change(|view| {
            view.acked_revision = revision;
            view.nack = None;
        });
    }

    /// Records that the proxy refused `revision`, and counts the refusal.
    pub fn nacked(&self, revision: u64, reason: &str) {
        self.proxies.shared.nacks.fetch_add(1, Ordering::Relaxed);
        self.change(|view| view.nack = Some(format!("revision {revision}: {reason}")));
    }

    fn change(&self, change: impl FnOnce(&mut ProxyView)) {
        if let Some(Stream { view, .. }) = self.proxies.shared.views.lock().get_mut(&self.id) {
            change(view);
        }
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.proxies.shared.results.lock().remove(&self.id);
        self.proxies.shared.views.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use dns_policy::{
        mapping::Realised,
        rule::{PortRules, Transport},
    };

    use super::*;

    fn rules(port: u16) -> EndpointRules {
        EndpointRules {
            ports: vec![PortRules {
                port,
                transport: Transport::Udp,
                rules: Vec::new(),
            }],
        }
    }

    fn update(revision: u64, changed: &[(u16, u16)], removed: &[u16]) -> RulesUpdate {
        RulesUpdate {
            revision,
            changed: changed
                .iter()
                .map(|(id, port)| RulesOf {
                    endpoint: EndpointId(*id),
                    rules: rules(*port),
                })
                .collect(),
            removed: removed.iter().map(|id| EndpointId(*id)).collect(),
        }
    }

    #[test]
    fn a_slow_reader_gets_the_sum_of_the_changes() {
        let proxies = Proxies::default();
        let watch = proxies.watch_rules();
        proxies.rules(update(1, &[(1, 53), (2, 53)], &[]));
        let first = Arc::clone(&watch.borrow());
        proxies.rules(update(2, &[(3, 53)], &[]));
        proxies.rules(update(3, &[(1, 54)], &[2, 3]));
        let delta = watch.borrow().since(&first);
        assert_eq!(delta.changed, [(EndpointId(1), Arc::new(rules(54)))]);
        assert_eq!(delta.removed, [EndpointId(2)]);
    }

    fn process(pid: i32) -> Peer {
        Peer::Process {
            user: 10094,
            pid,
            instance: 0,
        }
    }

    #[test]
    fn streams_of_one_kind_leave_room_for_another_kind_and_for_another_process() {
        let proxies = Proxies::default();
        let admit = |kind, pid| proxies.admit(kind, "x", None, process(pid));
        let guards: Vec<_> = std::iter::from_fn(|| admit(StreamKind::FqdnData, 1))
            .take(1000)
            .collect();
        assert_eq!(guards.len(), MAX_STREAMS / 2);
        assert!(admit(StreamKind::FqdnData, 1).is_none());
        assert!(admit(StreamKind::Mappings, 1).is_some() && admit(StreamKind::Rules, 1).is_some());
        let others: Vec<_> = (2..)
            .map_while(|pid| admit(StreamKind::FqdnData, pid))
            .collect();
        assert_eq!(others.len(), MAX_STREAMS / 2);
        drop(guards);
        assert!(admit(StreamKind::FqdnData, 1).is_some());
    }

    #[tokio::test]
    async fn a_stream_that_reads_nothing_is_closed_and_others_continue() {
        let proxies = Proxies::default();
        let (slow, mut slow_results) = proxies.open_results(StreamKind::Mappings, "slow", None);
        let (good, mut good_results) = proxies.open_results(StreamKind::Mappings, "good", None);
        let result = |guard: &StreamGuard, sequence| MappingResult {
            stream: guard.id(),
            sequence,
            realised: Realised::Yes,
            durable: true,
            lease_end: None,
            revision: 1,
        };
        let queue = results::STREAM_QUEUE;
        let total = queue as u64 + 1;
        for sequence in 0..total {
            proxies.results(vec![result(&slow, sequence), result(&good, sequence)]);
            assert!(good_results.recv().await.is_some());
        }
        assert_eq!(proxies.closed_slow(), 1);
        let mut left = 0;
        while slow_results.recv().await.is_some() {
            left += 1;
        }
        assert_eq!(left, queue, "and then it ends");
    }
}
