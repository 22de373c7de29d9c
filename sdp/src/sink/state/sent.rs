//! Mappings that were sent and have no final result.

use std::{collections::BTreeMap, net::IpAddr};

use dns_policy::{
    boot_time::BootTime,
    mapping::{LONGEST_LEASE, Mapping, Realised},
};
use limits::quota::{Holder, Quota};

use super::{super::Outgoing, Calls};
use crate::mapping::{
    OnRealised,
    pairs::{AgentAck, Key},
};

/// Maximum work that the agent has for held answers, in units of one address. Each endpoint has a
/// share of it. The agent works in the order of arrival, so its work for one endpoint delays the
/// others. Further work waits here, where endpoints take turns. A single endpoint may have about 50
/// names on their way, which take the agent about a millisecond.
const WINDOW: usize = 1024;
/// Work of the agent for a name in addition to its addresses, in units of one address.
const NAME: usize = 8;
/// Approximate limit of unanswered mappings that no client waits for: an answer must not wait long
/// in the agent behind thousands of names that are sent again.
const OTHERS: usize = 256;
/// Maximum number of mappings without a result, and of mappings that are not durable yet. Above it,
/// the oldest are forgotten.
const IN_FLIGHT: usize = 65_536;

/// An answer that waits for the result of a mapping that was sent.
pub(super) struct AwaitedResult {
    /// Time at which the answer began to wait.
    pub(super) since: BootTime,
    /// When the mapping was sent.
    pub(super) sent: BootTime,
    pub(super) on_realised: OnRealised,
}

pub(super) struct InFlight {
    pub(super) key: Key,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ack: AgentAck,
    /// Time at which the mapping was sent, and the time until which its TTL runs.
    pub(super) sent: BootTime,
    pub(super) runs_until: BootTime,
    /// Whether a client waited for the mapping when it was sent.
    pub(super) waited: bool,
}

pub(in crate::sink) struct Sent {
    next_sequence: u64,
    /// The agent's unfinished work for held answers.
    on_wire: Quota,
    others_on_wire: usize,
    in_flight: BTreeMap<u64, InFlight>,
    /// Mappings that are realised but not on the agent's disk yet. No answer waits for them.
    pub(super) undurable: BTreeMap<u64, InFlight>,
    pub(super) held: BTreeMap<u64, AwaitedResult>,
}

impl Default for Sent {
    fn default() -> Self {
        Self {
            next_sequence: 1,
            on_wire: Quota::new(WINDOW),
            others_on_wire: 0,
            in_flight: BTreeMap::new(),
            undurable: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }
}

impl Sent {
    /// Adds a mapping that is sent. `client` has the callback of a waiting answer, and the time at
    /// which it began to wait.
    pub(super) fn add(
        &mut self,
        mapping: Mapping,
        client: Option<(BootTime, OnRealised)>,
        now: BootTime,
        min_ttl: u32,
    ) -> Outgoing {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let seen = mapping.seen_at;
        let sent = InFlight {
            key: Key::of(&mapping),
            addresses: mapping.addresses.clone(),
            ack: AgentAck {
                seen,
                until: seen.plus_secs(mapping.ttl.max(min_ttl).into()),
            },
            sent: now,
            runs_until: seen
                .plus_secs(mapping.ttl.into())
                .min(now.plus(LONGEST_LEASE)),
            waited: client.is_some(),
        };
        let leased = client.is_none() && !mapping.replayed;
        if let Some((since, on_realised)) = client {
            // A mapping that is larger than the share is sent when no mapping of its endpoint is on
            // the wire.
            self.on_wire
                .add(mapping.endpoint.into(), work(&sent.addresses));
            let awaited = AwaitedResult {
                since,
                sent: now,
                on_realised,
            };
            self.held.insert(sequence, awaited);
        } else {
            self.others_on_wire += 1;
        }
        self.in_flight.insert(sequence, sent);
        if self.in_flight.len() > IN_FLIGHT
            && let Some((oldest, _)) = self.in_flight.first_key_value()
        {
            self.answered(*oldest);
        }
        Outgoing {
            sequence,
            mapping,
            leased,
            report: None,
        }
    }

    /// Removes a mapping that was answered, so that it is no longer on its way.
    pub(super) fn answered(&mut self, sequence: u64) -> Option<InFlight> {
        let sent = self.in_flight.remove(&sequence)?;
        if sent.waited {
            let holder = sent.key.asked.endpoint.into();
            self.on_wire.give_back(holder, work(&sent.addresses));
        } else {
            self.others_on_wire -= 1;
        }
        Some(sent)
    }

    /// Notes that a realised mapping waits until the agent has it on its disk.
    pub(super) fn await_durable(&mut self, sequence: u64, sent: InFlight) {
        self.undurable.insert(sequence, sent);
        if self.undurable.len() > IN_FLIGHT {
            self.undurable.pop_first();
        }
    }

    /// Whether more work for the answers of `holder` may be sent.
    pub(super) fn has_room(&self, holder: Holder) -> bool {
        self.on_wire.allows(holder, 1)
    }

    /// Number of mappings without a waiting client that may be sent.
    pub(super) fn room_for_others(&self) -> usize {
        OTHERS.saturating_sub(self.others_on_wire)
    }

    /// Mappings without a result for which clients waited when they were sent.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &InFlight> {
        self.in_flight.values().filter(|sent| sent.waited)
    }

    /// Number of mappings without a result.
    pub(in crate::sink) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether an answer waits for the result of a mapping.
    pub(in crate::sink) fn has_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Clears everything, because no more results come. The held answers are added to `calls`.
    pub(super) fn clear(&mut self, calls: &mut Calls) {
        self.in_flight.clear();
        self.on_wire.clear();
        self.others_on_wire = 0;
        self.undurable.clear();
        let held = std::mem::take(&mut self.held).into_values();
        calls.extend(held.map(|held| (held.on_realised, Realised::AgentAway)));
    }
}

/// Work of the agent for a mapping, in units of one address. It is limited, so that one large
/// mapping leaves room for a mapping of another endpoint.
fn work(addresses: &[IpAddr]) -> usize {
    (NAME + addresses.len()).min(WINDOW / 2)
}
