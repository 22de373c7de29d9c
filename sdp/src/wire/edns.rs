//! The OPT record of a message (RFC 6891), and removing hop-by-hop options.

use std::ops::Range;

use super::{Record, TYPE_OPT, put_u16, u16_at};

/// Option EDNS TCP keepalive (RFC 7828): between two hops only.
const OPTION_TCP_KEEPALIVE: u16 = 11;
/// Flag DO in the extended flags (RFC 3225).
const FLAG_DNSSEC_OK: u32 = 0x8000;

/// What matters of an OPT record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edns {
    /// UDP payload size its sender takes, bytes.
    pub udp_size: u16,
    /// DNSSEC records wanted.
    pub dnssec_ok: bool,
    /// EDNS version.
    pub version: u8,
    /// Where the TCP keepalive option lies, header included.
    keepalive: Option<Range<usize>>,
    /// Where the data of the record starts.
    data: usize,
}

impl Edns {
    /// Of an OPT record. `None` if its options do not fill its data.
    pub(super) fn of(message: &[u8], record: &Record) -> Option<Self> {
        let end = record.data + record.data_len;
        let mut keepalive = None;
        let mut at = record.data;
        while at < end {
            let code = u16_at(message, at)?;
            let next = at + 4 + usize::from(u16_at(message, at + 2)?);
            if next > end {
                return None;
            }
            if code == OPTION_TCP_KEEPALIVE {
                keepalive.get_or_insert(at..next);
            }
            at = next;
        }
        let [_, version, ..] = record.ttl.to_be_bytes();
        Some(Self {
            udp_size: record.class,
            dnssec_ok: record.ttl & FLAG_DNSSEC_OK != 0,
            version,
            keepalive,
            data: record.data,
        })
    }

    /// Whether [`Self::strip_keepalive`] would change anything.
    pub fn has_keepalive(&self) -> bool {
        self.keepalive.is_some()
    }

    /// Takes the TCP keepalive option out of `message`, which this was read from.
    pub fn strip_keepalive(&self, message: &mut Vec<u8>) {
        let Some(option) = self.keepalive.clone() else {
            return;
        };
        let length_at = self.data - 2;
        let removed = option.len();
        if let Some(length) = u16_at(message, length_at)
            && let Ok(removed) = u16::try_from(removed)
        {
            put_u16(message, length_at, length.saturating_sub(removed));
            message.drain(option);
        }
    }
}

/// Reads `count` records from `at` on and finds the OPT record among them.
/// `None` if a record cannot be read or there are two OPT records.
pub(super) fn find(message: &[u8], mut at: usize, count: usize) -> Option<(Option<Edns>, usize)> {
    let mut edns = None;
    for _ in 0..count {
        let (record, next) = Record::read(message, at)?;
        if record.rtype == TYPE_OPT {
            // Owner must be the root (RFC 6891, 6.1.2).
            if edns.is_some() || message.get(record.owner) != Some(&0) {
                return None;
            }
            edns = Some(Edns::of(message, &record)?);
        }
        at = next;
    }
    Some((edns, at))
}
