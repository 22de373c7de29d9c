//! The content of a journal: pairs that no agent has made durable. It does no I/O and returns the
//! bytes for the file.

use std::net::IpAddr;

use dns_policy::{boot_time::BootTime, mapping::Mapping, name::Fqdn};
use limits::quota::Holder;

use super::record::{self, HeaderError, Record};
use crate::mapping::pairs::{AgentAck, Key, PairTable};

/// One entry for the journal.
#[derive(Clone, Debug)]
pub enum Note {
    /// No agent has made the mapping durable. The mapping counts for this many seconds from
    /// `seen_at`.
    Learned(Mapping, u32),
    /// The agent's disk has these pairs as they were sent.
    Settled(Key, Vec<IpAddr>, AgentAck),
    /// The agent never accepts these pairs as they were sent.
    Forgotten(Key, Vec<IpAddr>, AgentAck),
    /// The agent revokes these pairs. No name stands for all names, and no addresses for all
    /// addresses of the name.
    Revoked(Option<Fqdn>, Vec<IpAddr>),
}

impl Note {
    /// The endpoint for which the note is written; `None` for a revocation.
    pub(super) fn holder(&self) -> Option<Holder> {
        match self {
            Self::Learned(mapping, _) => Some(mapping.endpoint.into()),
            Self::Settled(key, ..) | Self::Forgotten(key, ..) => Some(key.asked.endpoint.into()),
            Self::Revoked(..) => None,
        }
    }
}

/// A mapping from a journal, and the number of seconds from `seen_at` for which it counts.
pub type Written = (Mapping, u32);

/// Table of the pairs that the journal's file must contain.
#[derive(Debug)]
pub struct Ledger {
    pairs: PairTable,
}

impl Ledger {
    /// A ledger of at most `limit` pairs. Above the limit, the endpoint with the most pairs loses
    /// the pairs that end soonest.
    pub fn new(limit: usize) -> Self {
        Self {
            pairs: PairTable::new(limit),
        }
    }

    /// Takes a note, and appends its record to `out` if the file needs one.
    ///
    /// A durable pair needs no record: sending the pair to an agent again does no harm. A
    /// revocation needs a record: sending a revoked pair again would open what was closed.
    pub fn take(&mut self, note: &Note, out: &mut Vec<u8>) {
        match note {
            Note::Learned(mapping, lasts) => {
                self.pairs.keep(mapping, *lasts);
                record::put_learned(out, mapping, *lasts);
            }
            Note::Settled(key, addresses, ack) => {
                self.pairs.drop_settled(key, addresses, *ack);
            }
            Note::Forgotten(key, addresses, ack) => self.pairs.forget(key, addresses, *ack),
            Note::Revoked(name, addresses) => {
                self.pairs.revoke(name.as_ref(), addresses);
                record::put_revoked(out, name.as_ref(), addresses);
            }
        }
    }

    /// Reads a file. Also returns whether it ended in bytes that are no record.
    pub fn read(bytes: &[u8], boot_id: &str, limit: usize) -> Result<(Self, bool), HeaderError> {
        let mut records = record::read(bytes, boot_id)?;
        let mut ledger = Self::new(limit);
        for record in records.by_ref() {
            match record {
                Record::Learned(mapping, lasts) => ledger.pairs.keep(&mapping, lasts),
                Record::Revoked(name, addresses) => {
                    ledger.pairs.revoke(name.as_ref(), &addresses);
                }
            }
        }
        Ok((ledger, records.is_torn()))
    }

    /// A whole file without superfluous records.
    pub fn image(&self, boot_id: &str, now: BootTime) -> Vec<u8> {
        let mut out = record::header(boot_id);
        for (mapping, lasts) in self.mappings(now) {
            record::put_learned(&mut out, &mapping, lasts);
        }
        out
    }

    /// The pairs that have not ended.
    pub fn mappings(&self, now: BootTime) -> Vec<Written> {
        let keys = self.pairs.keys(true).into_iter();
        keys.flat_map(|key| self.pairs.unexpired(&key, now))
            .collect()
    }

    /// Removes the pairs that need not be stored any longer at `now`.
    pub fn expire(&mut self, now: BootTime) {
        self.pairs.expire(now);
    }

    /// Removes one sixteenth of the pairs: the pairs that end soonest, of the endpoints with the
    /// most pairs.
    pub fn shrink(&mut self) {
        if !self.pairs.is_empty() {
            self.pairs.shrink();
        }
    }

    /// Number of pairs, each a name with one address.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Pairs dropped because there were too many.
    pub fn dropped(&self) -> u64 {
        self.pairs.dropped()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::pairs::tests::{ack, mapping};

    const BOOT: &str = "0d3f1c9e-53a1-4c0e-9d52-0123456789ab";

    fn at(secs: u64) -> BootTime {
        BootTime::START.plus_secs(secs)
    }

    fn learned(name: &str, addresses: &[u8], seen: u64) -> Note {
        Note::Learned(mapping(name, addresses, 60, seen), 60)
    }

    /// A ledger that took the notes, and the file that contains their records.
    fn written(notes: &[Note]) -> (Ledger, Vec<u8>) {
        let mut ledger = Ledger::new(1000);
        let mut file = ledger.image(BOOT, at(0));
        for note in notes {
            ledger.take(note, &mut file);
        }
        (ledger, file)
    }

    fn names(ledger: &Ledger) -> Vec<String> {
        let all = ledger.mappings(at(11)).into_iter();
        let mut all: Vec<_> = all
            .map(|(m, _)| format!("{} {:?}", m.name.as_str(), m.addresses))
            .collect();
        all.sort();
        all
    }

    #[test]
    fn a_file_has_the_pairs_of_its_writer() {
        let (ledger, file) = written(&[
            learned("a.", &[1, 2], 10),
            learned("b.", &[3], 10),
            Note::Revoked(Some(Fqdn::normalise("a.")), vec![[192, 0, 2, 1].into()]),
            learned("c.", &[4], 10),
        ]);
        let (read, torn) = Ledger::read(&file, BOOT, 1000).unwrap();
        assert!(!torn);
        assert_eq!(names(&read), names(&ledger));
        assert_eq!(read.len(), 3);
        let image = ledger.image(BOOT, at(11));
        assert!(image.len() < file.len());
        assert_eq!(
            names(&Ledger::read(&image, BOOT, 1000).unwrap().0),
            names(&ledger)
        );
    }

    #[test]
    fn a_revocation_does_not_affect_later_pairs() {
        let (_, file) = written(&[
            learned("a.", &[1], 10),
            Note::Revoked(None, vec![]),
            learned("a.", &[2], 10),
        ]);
        let (read, _) = Ledger::read(&file, BOOT, 1000).unwrap();
        let [(only, 60)] = &read.mappings(at(11))[..] else {
            panic!("{read:?}");
        };
        assert_eq!(only.addresses, [IpAddr::from([192, 0, 2, 2])]);
        assert!(only.replayed);
    }

    #[test]
    fn durable_pairs_are_removed_unless_seen_again() {
        let key = |note: &Note| match note {
            Note::Learned(m, _) => Key::of(m),
            _ => unreachable!(),
        };
        let (a, b) = (learned("a.", &[1], 10), learned("b.", &[1], 10));
        let addresses = vec![[192, 0, 2, 1].into()];
        let (mut ledger, mut file) = written(&[a.clone(), b.clone(), learned("b.", &[1], 20)]);
        for note in [&a, &b] {
            ledger.take(
                &Note::Settled(key(note), addresses.clone(), ack(10, 70)),
                &mut file,
            );
        }
        assert_eq!(names(&ledger), ["b. [192.0.2.1]"]);
        let refused = |ack| Note::Forgotten(key(&b), addresses.clone(), ack);
        ledger.take(&refused(ack(10, 70)), &mut file);
        assert!(!ledger.is_empty(), "it was seen again");
        ledger.take(&refused(ack(20, 80)), &mut file);
        assert!(ledger.is_empty());
    }

    #[test]
    fn over_the_limit_the_first_to_end_are_removed_and_counted() {
        let mut ledger = Ledger::new(160);
        let mut out = Vec::new();
        for n in 0..200u32 {
            let note = Note::Learned(mapping(&format!("n{n}."), &[1], 9, 0), 1000 - n);
            ledger.take(&note, &mut out);
        }
        assert!(ledger.len() <= 160);
        assert_eq!(ledger.dropped() + u64::try_from(ledger.len()).unwrap(), 200);
        assert!(names(&ledger).iter().any(|name| name.starts_with("n0. ")));
    }
}
