//! The OPT record of a message (RFC 6891), and removing hop-by-hop options.

use std::{ops::Range, time::Duration};

use super::{HEADER_LEN, Header, Record, TYPE_OPT, labels, put_u16, u16_at};

/// Option EDNS TCP keepalive (RFC 7828), which is valid between two hops only.
const OPTION_TCP_KEEPALIVE: u16 = 11;
/// Unit of the time in the keepalive option (RFC 7828, 3.1).
const KEEPALIVE_UNIT: Duration = Duration::from_millis(100);
/// Option COOKIE (RFC 7873).
pub(crate) const OPTION_COOKIE: u16 = 10;
/// Length of a cookie with a server part, bytes (RFC 7873, 4).
const FULL_COOKIE: std::ops::RangeInclusive<usize> = 16..=40;
/// Flag DO in the extended flags (RFC 3225).
const FLAG_DNSSEC_OK: u32 = 0x8000;

/// The parts of an OPT record that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edns {
    /// Maximum UDP payload that the sender accepts, bytes.
    pub udp_size: u16,
    /// Flag DO: the sender wants DNSSEC records (RFC 3225).
    pub dnssec_ok: bool,
    pub version: u8,
    /// Upper eight bits of the response code.
    pub extended_rcode: u8,
    has_keepalive: bool,
    keepalive: Option<Duration>,
    /// Range of the data of a cookie with a server part.
    cookie: Option<Range<usize>>,
    /// Range of the data of the record.
    data: Range<usize>,
}

impl Edns {
    /// Parses an OPT record. `None` if its options do not fill its data.
    pub(crate) fn of(message: &[u8], record: &Record) -> Option<Self> {
        let data = record.data..record.data + record.data_len;
        let mut has_keepalive = false;
        let mut keepalive = None;
        let mut cookie = None;
        let mut at = data.start;
        while at < data.end {
            let code = u16_at(message, at)?;
            let option = at + 4..at + 4 + usize::from(u16_at(message, at + 2)?);
            if option.end > data.end {
                return None;
            }
            at = option.end;
            has_keepalive |= code == OPTION_TCP_KEEPALIVE;
            if code == OPTION_TCP_KEEPALIVE && option.len() == 2 {
                keepalive =
                    u16_at(message, option.start).map(|units| KEEPALIVE_UNIT * units.into());
            }
            if code == OPTION_COOKIE && FULL_COOKIE.contains(&option.len()) {
                cookie.get_or_insert(option);
            }
        }
        let [extended_rcode, version, ..] = record.ttl.to_be_bytes();
        Some(Self {
            udp_size: record.class,
            dnssec_ok: record.ttl & FLAG_DNSSEC_OK != 0,
            version,
            extended_rcode,
            has_keepalive,
            keepalive,
            cookie,
            data,
        })
    }

    /// Whether [`Self::strip_keepalive`] would change anything.
    #[inline]
    pub fn has_keepalive(&self) -> bool {
        self.has_keepalive
    }

    /// How long the sender keeps the TCP connection open without queries, if it states that
    /// (RFC 7828, 3.3.2).
    pub fn keepalive(&self) -> Option<Duration> {
        self.keepalive
    }

    /// The cookie in `message`, if it has a server part. `self` was read from `message`.
    pub(crate) fn cookie<'a>(&self, message: &'a [u8]) -> Option<&'a [u8]> {
        message.get(self.cookie.clone()?)
    }

    /// Removes TCP keepalive options from `message`, from which `self` was read.
    pub fn strip_keepalive(&self, message: &mut Vec<u8>) {
        let mut at = self.data.start;
        let mut end = self.data.end;
        while at < end
            && let (Some(code), Some(length)) = (u16_at(message, at), u16_at(message, at + 2))
        {
            let next = at + 4 + usize::from(length);
            if next > end || end > message.len() {
                return;
            }
            if code == OPTION_TCP_KEEPALIVE {
                message.drain(at..next);
                end -= next - at;
            } else {
                at = next;
            }
        }
        if let Ok(length) = u16::try_from(end - self.data.start) {
            put_u16(message, self.data.start - 2, length);
        }
    }
}

/// Reads `count` records from `at` on and finds the OPT record among them.
/// `None` if a record cannot be read or there are two OPT records.
pub(crate) fn find(message: &[u8], mut at: usize, count: usize) -> Option<(Option<Edns>, usize)> {
    let mut edns = None;
    for _ in 0..count {
        let (record, next) = Record::read(message, at)?;
        if record.rtype == TYPE_OPT {
            // The owner must be the root (RFC 6891, 6.1.2).
            if edns.is_some() || message.get(record.owner) != Some(&0) {
                return None;
            }
            edns = Some(Edns::of(message, &record)?);
        }
        at = next;
    }
    Some((edns, at))
}

/// The flag DO of a message that may be broken; `None` if no OPT record is found. A sender of an
/// OPT record gets one back, whatever is wrong (RFC 6891, 7).
pub(crate) fn anywhere(message: &[u8]) -> Option<bool> {
    let header = Header::read(message)?;
    let mut at = HEADER_LEN;
    for _ in 0..header.questions {
        at = labels::skip_plain(message, at)? + 4;
    }
    loop {
        let fixed = labels::skip(message, at)?;
        if u16_at(message, fixed)? == TYPE_OPT {
            let flags = u16_at(message, fixed + 6)?;
            return Some(u32::from(flags) & FLAG_DNSSEC_OK != 0);
        }
        (_, at) = Record::read(message, at)?;
    }
}
