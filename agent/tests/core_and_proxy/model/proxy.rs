//! A standalone proxy without sockets: the real sink and journal, a listener that only
//! holds and releases, a file in memory, and both directions of its stream.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use agent_core::core::event::{MappingResult, Revocation, StreamId};
use dns_policy::{
    boot_time::BootTime,
    epoch::Epoch,
    mapping::{Mapping, Realised},
};
use holdfast_sdp::{
    journal::{Journal, ledger::Ledger},
    mapping::Release,
    sink::{self, LinkSink, Outgoing, Promise},
};
use parking_lot::Mutex;

use super::LastWrite;

/// Boot of the journal files.
pub(super) const BOOT: &str = "00000000-0000-4000-8000-000000000001";
/// How long a proxy holds an answer before it releases it without a result.
pub(super) const MAX_DELAY: Duration = Duration::from_millis(100);
const PAIRS: usize = 1000;

/// A message from the proxy to the agent.
#[derive(Debug)]
pub(super) enum Up {
    Mapping(Outgoing),
    Ack(u64),
}

/// A message from the agent to the proxy.
#[derive(Debug)]
pub(super) enum Down {
    Result(MappingResult),
    Revoke(Revocation),
    Rules(Epoch, u64),
    Closed,
}

/// An answer's number, and what became of its mapping.
type Results = Arc<Mutex<Vec<(usize, Realised)>>>;

#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) sink: Arc<LinkSink>,
    journal: Arc<Journal>,
    ledger: Ledger,
    file: Vec<u8>,
    results: Results,
    pub(super) stream: Option<StreamId>,
    pub(super) up: VecDeque<Up>,
    pub(super) down: VecDeque<Down>,
}

impl Proxy {
    pub(super) fn start(now: BootTime) -> Self {
        let journal = Arc::new(Journal::default());
        journal.attend();
        let ledger = Ledger::new(PAIRS);
        Self {
            sink: Arc::new(LinkSink::with_journal(0, MAX_DELAY, Arc::clone(&journal))),
            file: ledger.image(BOOT, now),
            journal,
            ledger,
            results: Results::default(),
            stream: None,
            up: VecDeque::new(),
            down: VecDeque::new(),
        }
    }

    /// Learns from answer number `answer`.
    pub(super) fn learn(&self, answer: usize, mapping: Mapping, now: BootTime) -> Release {
        let results = Arc::clone(&self.results);
        let done = Box::new(move |realised| results.lock().push((answer, realised)));
        self.sink.learn_at(mapping, done, now)
    }

    /// Held answers whose mappings have a result.
    pub(super) fn take_results(&self) -> Vec<(usize, Realised)> {
        std::mem::take(&mut self.results.lock())
    }

    /// Puts the sink's messages onto the stream.
    pub(super) fn send(&mut self, now: BootTime) {
        if self.stream.is_some() {
            let batch = self.sink.next_batch(now);
            self.up.extend(batch.revoked.into_iter().map(Up::Ack));
            self.up.extend(batch.mappings.into_iter().map(Up::Mapping));
        }
    }

    /// Takes one message of the agent; returns a revocation that it carried out.
    pub(super) fn deliver(&mut self) -> Option<Revocation> {
        match self.down.pop_front()? {
            Down::Result(result) => self.sink.results(vec![translate(&result)]),
            Down::Rules(epoch, revision) => self.sink.rules_applied(epoch, revision),
            Down::Revoke(revocation) => {
                let (name, addresses) = (&revocation.name, &revocation.addresses);
                self.sink.revoke(revocation.id, Some(name), addresses);
                return Some(revocation);
            }
            Down::Closed => self.disconnect(),
        }
        None
    }

    /// Ends the stream; messages on their way are lost.
    pub(super) fn disconnect(&mut self) {
        self.stream = None;
        self.up.clear();
        self.sink.agent_down();
    }

    /// Gives the writer's thread its turn. A kill interrupts a torn write.
    pub(super) fn write(&mut self, now: BootTime, write: LastWrite) {
        let (notes, waiting) = self.journal.take();
        let mut records = Vec::new();
        for note in &notes {
            self.ledger.take(note, &mut records);
        }
        if self.ledger.is_empty() {
            self.file = self.ledger.image(BOOT, now);
            records.clear();
        }
        self.file.extend(&records);
        if write == LastWrite::Torn && !waiting.is_empty() {
            self.file.truncate(self.file.len() - records.len().min(3));
            return;
        }
        self.journal.written();
        for done in waiting {
            done(Realised::AgentAway);
        }
    }

    /// Adopts the file of another proxy.
    pub(super) fn adopt(&mut self, file: &[u8], now: BootTime) {
        let (left, _torn) = Ledger::read(file, BOOT, PAIRS).expect("a file of this boot");
        let mappings = left.mappings(now);
        for (mapping, lasts) in &mappings {
            let note = holdfast_sdp::journal::Note::Learned(mapping.clone(), *lasts);
            self.ledger.take(&note, &mut self.file);
        }
        self.sink.adopt(&mappings);
    }

    /// The journal file, which a killed proxy leaves behind.
    pub(super) fn file(self) -> Vec<u8> {
        self.file
    }

    pub(super) fn journalled(&self) -> usize {
        self.ledger.len()
    }

    pub(super) fn expire(&mut self, now: BootTime) {
        if self.down.is_empty() {
            self.sink.read_all(now);
        }
        self.sink.tick(now);
        self.ledger.expire(now);
    }
}

fn translate(result: &MappingResult) -> sink::MappingResult {
    sink::MappingResult {
        sequence: result.sequence,
        result: match result.realised {
            Realised::Yes => Ok(sink::Grant {
                durable: result.durable,
                promise: Promise::of_lease(result.lease_end),
                revision: result.revision,
            }),
            Realised::No(refusal) => Err(refusal),
            Realised::AgentAway => Err(dns_policy::mapping::Refusal::NotRealised),
        },
    }
}
