//! A file before its text is made. With many names the text takes milliseconds, for which no answer
//! should wait; what it is made of is copied much faster.

use std::{cmp::Reverse, net::IpAddr};

use dns_policy::{boot_time::BootTime, name::Fqdn};

use super::{EndpointFile, HistoryEntry, ServerAddresses, render};

/// What a file is made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct UnrenderedFile {
    /// The endpoint; its history is in `pairs`.
    pub(crate) file: EndpointFile,
    /// Addresses learned and not expired. Addresses of one name follow one another.
    pub(crate) pairs: Vec<LearnedPair>,
    /// Where the servers of its DNS rules are.
    pub(crate) servers: ServerAddresses,
    /// Maximum number of addresses that a rule lists.
    pub(crate) max_servers: usize,
    /// Unix time of the machine's boot, nanoseconds.
    pub(crate) boot_unix_ns: u64,
}

/// An address of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LearnedPair {
    pub(crate) name: Fqdn,
    pub(crate) address: IpAddr,
    pub(crate) seen: BootTime,
    pub(crate) expires: BootTime,
    /// TTL, seconds.
    pub(crate) ttl: u32,
    /// When the answers of trusted DNS servers that gave it end, if any did.
    pub(crate) trusted_until: Option<BootTime>,
}

impl UnrenderedFile {
    /// Renders the text of the file, which takes milliseconds with many names.
    pub(crate) fn text(&self) -> String {
        let file = EndpointFile {
            history: self.history(),
            ..self.file.clone()
        };
        render(&file, &self.servers, self.max_servers)
    }

    fn history(&self) -> Vec<HistoryEntry> {
        let wall = |at: BootTime| at.nanos().saturating_add(self.boot_unix_ns);
        let mut history = Vec::new();
        for pairs in self.pairs.chunk_by(|one, other| one.name == other.name) {
            // Addresses of one answer share an entry: most of them still have the same times.
            let same = |one: &&LearnedPair, other: &&LearnedPair| {
                (one.seen, one.expires, one.ttl, one.trusted_until)
                    == (other.seen, other.expires, other.ttl, other.trusted_until)
            };
            let mut pairs: Vec<&LearnedPair> = pairs.iter().collect();
            pairs.sort_unstable_by_key(|pair| {
                let times = (Reverse(pair.seen), pair.expires, pair.ttl);
                (times, pair.trusted_until, pair.address)
            });
            for answer in pairs.chunk_by(same) {
                let Some(first) = answer.first() else {
                    continue;
                };
                history.push(HistoryEntry {
                    name: first.name.clone(),
                    lookup: wall(first.seen),
                    expires: wall(first.expires),
                    ttl: first.ttl,
                    addresses: answer.iter().map(|pair| pair.address).collect(),
                    trusted_until: first.trusted_until.map_or(0, wall),
                });
            }
        }
        history
    }
}
