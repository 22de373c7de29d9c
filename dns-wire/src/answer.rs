//! Answers as servers send them: do they answer our question, and what do they teach?

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use dns_policy::name::NameBuf;
use foldhash::quality::RandomState;

use super::{
    CLASS_IN, FLAG_TRUNCATED, HEADER_LEN, Header, Record, TYPE_A, TYPE_AAAA, TYPE_CNAME, edns,
    edns::Edns, labels,
};

/// Maximum number of addresses that are learned from one answer. Pools of servers have some dozens,
/// and the agent takes no more from one mapping.
pub const MAX_ADDRESSES: usize = 1024;
/// Maximum length of a CNAME chain that is followed.
const MAX_CHAIN: usize = 32;

/// Whether `message` is a response to the question `asked` (name, type and class as sent).
///
/// The name must come back byte for byte: its case is part of what a forger
/// must guess. A server that cannot read or will not serve a query may leave
/// the question out, but only with an error code.
pub fn answers(message: &[u8], asked: &[u8]) -> bool {
    answers_if(message, asked, <[u8]>::eq)
}

/// Like [`answers`], for TCP: a forgery is not possible there, and a server may lose the name's
/// case (RFC 4343).
pub fn answers_in_any_case(message: &[u8], asked: &[u8]) -> bool {
    answers_if(message, asked, <[u8]>::eq_ignore_ascii_case)
}

fn answers_if(message: &[u8], asked: &[u8], same: impl Fn(&[u8], &[u8]) -> bool) -> bool {
    let Some(header) = Header::read(message) else {
        return false;
    };
    if !header.is_response() || header.opcode() != 0 {
        return false;
    }
    match header.questions {
        0 => header.answers == 0 && (header.rcode() != 0 || is_extended_error(message, header)),
        1 => {
            let (name, kind) = asked.split_at(asked.len().saturating_sub(4));
            let body = message.get(HEADER_LEN..).unwrap_or_default();
            body.split_at_checked(name.len())
                .is_some_and(|(theirs, rest)| same(theirs, name) && rest.starts_with(kind))
        }
        _ => false,
    }
}

/// Whether the code is in the OPT record alone, as BADVERS is (RFC 6891, 6.1.3).
fn is_extended_error(message: &[u8], header: Header) -> bool {
    let rest = usize::from(header.authorities) + usize::from(header.additionals);
    edns::find(message, HEADER_LEN, rest)
        .and_then(|(edns, _)| edns)
        .is_some_and(|edns| edns.extended_rcode != 0)
}

/// Addresses and TTL for the name of the question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Learned {
    /// Addresses of the name, reached along its CNAME chain: the first [`MAX_ADDRESSES`] of them,
    /// each once.
    pub addresses: Vec<IpAddr>,
    /// Further addresses of the name, which are not learned.
    pub left_out: usize,
    /// Minimum of the TTLs of that chain and those addresses, seconds.
    pub ttl: u32,
}

impl Learned {
    /// Keeps the first [`MAX_ADDRESSES`] addresses, each once.
    fn limit(&mut self) {
        if self.addresses.len() > MAX_ADDRESSES {
            let mut known = HashSet::with_hasher(RandomState::default());
            self.addresses.retain(|address| known.insert(*address));
            self.left_out = self.addresses.len().saturating_sub(MAX_ADDRESSES);
            self.addresses.truncate(MAX_ADDRESSES);
        }
        self.addresses.sort_unstable();
        self.addresses.dedup();
    }
}

/// The answer cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server's answer cannot be decoded")]
pub struct Malformed;

/// Results of parsing an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Addresses, if the code is 0 and there are any.
    pub learned: Option<Learned>,
    /// OPT record of the answer, if it carries an option that must not be passed on.
    pub hop_by_hop: Option<Edns>,
}

/// Reads an answer that [`answers`] accepted.
///
/// A truncated answer may end anywhere after its question.
pub fn read(message: &[u8]) -> Result<Reading, Malformed> {
    let header = Header::read(message).ok_or(Malformed)?;
    let truncated = header.flags & FLAG_TRUNCATED != 0;
    let start = match header.questions {
        0 => HEADER_LEN,
        _ => labels::skip_plain(message, HEADER_LEN).ok_or(Malformed)? + 4,
    };
    let mut at = start;
    for _ in 0..header.answers {
        match Record::read(message, at) {
            Some((_, next)) => at = next,
            None if truncated => break,
            None => return Err(Malformed),
        }
    }
    let rest = usize::from(header.authorities) + usize::from(header.additionals);
    let edns = match edns::find(message, at, rest) {
        Some((edns, _)) => edns,
        None if truncated => None,
        None => return Err(Malformed),
    };
    let section = Section {
        message,
        start,
        end: at,
    };
    let extended_rcode = edns.as_ref().map_or(0, |e| e.extended_rcode);
    let learned = match (extended_rcode, header.rcode()) {
        (0, 0) if at > start && header.questions == 1 => section.learn()?,
        _ => None,
    };
    Ok(Reading {
        learned,
        hop_by_hop: edns.filter(Edns::has_keepalive),
    })
}

/// The answer section of a message, which was checked to be readable.
struct Section<'a> {
    message: &'a [u8],
    start: usize,
    end: usize,
}

impl Section<'_> {
    fn learn(&self) -> Result<Option<Learned>, Malformed> {
        let mut learned = Learned {
            ttl: u32::MAX,
            ..Learned::default()
        };
        // Owners are read once and not once per link of the chain, because an answer may have
        // thousands of owners with hundreds of labels and pointers each.
        let state = RandomState::default();
        let hash = |at| labels::hash(self.message, at, &state);
        let records: Vec<_> = self
            .records()
            .filter(|record| record.class == CLASS_IN)
            .filter_map(|record| Some((hash(record.owner)?, record)))
            .collect();
        let mut owner = HEADER_LEN;
        let mut seen = Vec::new();
        let mut chain_ttl = u32::MAX;
        for _ in 0..MAX_CHAIN {
            let mut target = None;
            let Some(wanted) = hash(owner) else {
                break;
            };
            for (hash, record) in &records {
                if *hash != wanted || !labels::same(self.message, record.owner, owner) {
                    continue;
                }
                if let Some(address) = self.address(record)? {
                    learned.ttl = learned.ttl.min(ttl(record)).min(chain_ttl);
                    learned.addresses.push(address);
                } else if record.rtype == TYPE_CNAME && target.is_none() {
                    target = Some((record.data, ttl(record)));
                }
            }
            match target {
                Some((next, ttl)) => {
                    chain_ttl = chain_ttl.min(ttl);
                    seen.push(owner);
                    if seen.iter().any(|at| labels::same(self.message, *at, next)) {
                        break;
                    }
                    owner = next;
                }
                None => break,
            }
        }
        learned.limit();
        Ok((!learned.addresses.is_empty()).then_some(learned))
    }

    fn records(&self) -> impl Iterator<Item = Record> {
        let mut at = self.start;
        std::iter::from_fn(move || {
            if at >= self.end {
                return None;
            }
            let (record, next) = Record::read(self.message, at)?;
            at = next;
            Some(record)
        })
    }

    fn address(&self, record: &Record) -> Result<Option<IpAddr>, Malformed> {
        let data = self
            .message
            .get(record.data..record.data + record.data_len)
            .ok_or(Malformed)?;
        match record.rtype {
            TYPE_A => {
                let bytes: [u8; 4] = data.try_into().map_err(|_| Malformed)?;
                Ok(Some(IpAddr::V4(Ipv4Addr::from(bytes))))
            }
            TYPE_AAAA => {
                let bytes: [u8; 16] = data.try_into().map_err(|_| Malformed)?;
                Ok(Some(IpAddr::V6(Ipv6Addr::from(bytes))))
            }
            _ => Ok(None),
        }
    }
}

/// TTL of a record; one with the top bit set counts as 0 (RFC 2181, 8).
fn ttl(record: &Record) -> u32 {
    if record.ttl > i32::MAX.unsigned_abs() {
        0
    } else {
        record.ttl
    }
}

/// Maximum number of records of an answer section that are reported.
const MAX_REPORTED: usize = 128;

/// Contents of a message's answer section, for logs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerSection {
    /// Response code without its EDNS extension.
    pub rcode: u8,
    /// Minimum of the TTLs of addresses and aliases, seconds; `None` if there are none.
    pub ttl: Option<u32>,
    /// Names that aliases lead to, in order.
    pub cnames: Vec<String>,
    /// Types of the records, in order.
    pub types: Vec<u16>,
}

/// Reads the answer section of a message, as far as it can be read.
pub fn section(message: &[u8]) -> Option<AnswerSection> {
    let header = Header::read(message)?;
    let mut section = AnswerSection {
        rcode: u8::try_from(header.rcode()).unwrap_or(u8::MAX),
        ..AnswerSection::default()
    };
    let mut at = match header.questions {
        0 => HEADER_LEN,
        _ => labels::skip_plain(message, HEADER_LEN)? + 4,
    };
    for _ in 0..usize::from(header.answers).min(MAX_REPORTED) {
        let Some((record, next)) = Record::read(message, at) else {
            break;
        };
        section.types.push(record.rtype);
        let mut target = NameBuf::default();
        if record.rtype == TYPE_CNAME && labels::read(message, record.data, &mut target).is_some() {
            section.cnames.push(target.as_str().to_owned());
        }
        if [TYPE_A, TYPE_AAAA, TYPE_CNAME].contains(&record.rtype) {
            let ttl = ttl(&record);
            section.ttl = Some(section.ttl.map_or(ttl, |least| least.min(ttl)));
        }
        at = next;
    }
    Some(section)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::{MAX_ADDRESSES, MAX_CHAIN, Malformed, answers, read, section};
    use crate::{labels::steps, put_u16, query::tests::plain};

    struct Builder(Vec<u8>, u16);

    impl Builder {
        fn to(name: &str) -> Self {
            let mut message = plain(1, name, 1);
            put_u16(&mut message, 2, 0x8180);
            Self(message, 0)
        }

        fn record(mut self, owner: &[u8], rtype: u16, ttl: u32, data: &[u8]) -> Self {
            self.0.extend_from_slice(owner);
            self.0.extend_from_slice(&rtype.to_be_bytes());
            self.0.extend_from_slice(&[0, 1]);
            self.0.extend_from_slice(&ttl.to_be_bytes());
            self.0
                .extend_from_slice(&u16::try_from(data.len()).unwrap().to_be_bytes());
            self.0.extend_from_slice(data);
            self.1 += 1;
            put_u16(&mut self.0, 6, self.1);
            self
        }
    }

    const Q: &[u8] = b"\xc0\x0c";
    const CDN: &[u8] = b"\x03cdn\x01y\x00";

    fn learned(built: &Builder) -> Option<(Vec<String>, u32)> {
        let learned = read(&built.0).unwrap().learned?;
        Some((
            learned.addresses.iter().map(ToString::to_string).collect(),
            learned.ttl,
        ))
    }

    #[test]
    fn the_chain_is_followed_in_any_order_and_no_further() {
        let built = Builder::to("www.x")
            .record(CDN, 1, 60, &[192, 0, 2, 1])
            .record(b"\x01z\x00", 1, 1, &[192, 0, 2, 9])
            .record(Q, 5, 30, b"\x03CDN\x01y\x00")
            .record(CDN, 1, 90, &[192, 0, 2, 2]);
        let expected = (vec!["192.0.2.1".to_owned(), "192.0.2.2".to_owned()], 30);
        assert_eq!(learned(&built), Some(expected));
    }

    #[test]
    fn a_section_is_reported_with_its_aliases_and_types() {
        let built = Builder::to("a")
            .record(Q, 5, 30, b"\x03cdn\x01y\x00")
            .record(CDN, 16, 1, b"")
            .record(CDN, 1, 60, &[192, 0, 2, 1]);
        let section = section(&built.0).unwrap();
        assert_eq!((section.rcode, section.ttl), (0, Some(30)));
        assert_eq!(section.cnames, ["cdn.y."]);
        assert_eq!(section.types, [5, 16, 1]);
    }

    #[test]
    fn a_loop_ends() {
        let built = Builder::to("a")
            .record(Q, 5, 1, CDN)
            .record(CDN, 5, 1, b"\xc0\x0c");
        assert_eq!(learned(&built), None);
    }

    #[test]
    fn a_long_chain_costs_no_more_than_reading_each_owner_once() {
        // Names of maximum length, which differ only in their last label.
        let name = |number: usize| {
            let mut name = [1, b'a'].repeat(120);
            name.extend_from_slice(&[4]);
            name.extend_from_slice(format!("{number:04}").as_bytes());
            name.push(0);
            name
        };
        let mut built = Builder::to("a").record(Q, 5, 1, &name(0));
        let mut pointers = Vec::new();
        for number in 0..MAX_CHAIN {
            let at = u16::try_from(built.0.len()).unwrap();
            pointers.push((0xc000 | at).to_be_bytes());
            built = built.record(&name(number), 5, 1, &name(number + 1));
        }
        while built.0.len() < 65_000 {
            for owner in &pointers {
                built = built.record(owner, 16, 1, b"");
            }
        }
        let records = usize::from(built.1);
        let before = steps::taken();
        assert_eq!(learned(&built), None);
        let taken = steps::taken() - before;
        // Each name is hashed once and compared with one other name, and the names of the chain are
        // compared with each other.
        let names = 3 * records + MAX_CHAIN * MAX_CHAIN + 2 * MAX_CHAIN;
        assert!(taken <= 123 * names, "{taken} steps for {records} records");
    }

    #[test]
    fn the_first_1024_addresses_of_an_answer_are_learned_and_the_others_counted() {
        let address = |n: u16| {
            let [high, low] = n.to_be_bytes();
            [198, 51, high, low]
        };
        // The highest addresses come first, and each comes twice.
        let answer = |count: u16| {
            let twice = |n| [address(n), address(n)];
            let all = (0..count).rev().flat_map(twice);
            all.fold(Builder::to("a"), |built, data| {
                built.record(Q, 1, 60, &data)
            })
        };
        let learned = |count| read(&answer(count).0).unwrap().learned.unwrap();
        let all = learned(1024);
        assert_eq!((all.addresses.len(), all.left_out), (1024, 0));
        let most = learned(2000);
        assert_eq!((most.addresses.len(), most.left_out), (MAX_ADDRESSES, 976));
        assert_eq!(most.addresses[0], IpAddr::from(address(976)));
        assert_eq!(most.ttl, 60);
    }

    #[test]
    fn only_code_zero_teaches() {
        let mut built = Builder::to("a").record(Q, 1, 5, &[192, 0, 2, 1]);
        assert!(learned(&built).is_some());
        put_u16(&mut built.0, 2, 0x8183);
        assert_eq!(learned(&built), None);
    }

    #[test]
    fn truncated_answers_teach_only_with_the_tc_bit() {
        let mut built = Builder::to("a")
            .record(Q, 1, 5, &[192, 0, 2, 1])
            .record(Q, 1, 5, &[1; 4]);
        built.0.truncate(built.0.len() - 1);
        assert_eq!(read(&built.0), Err(Malformed));
        put_u16(&mut built.0, 2, 0x8380);
        assert_eq!(learned(&built), Some((vec!["192.0.2.1".to_owned()], 5)));
    }

    #[test]
    fn an_answer_must_have_the_question_as_sent() {
        let asked = &plain(1, "wWw.x", 1)[12..];
        assert!(answers(&Builder::to("wWw.x").0, asked));
        assert!(!answers(&Builder::to("www.x").0, asked));
        assert!(!answers(&plain(1, "wWw.x", 1), asked));
        let refused = [0, 1, 0x81, 0x85, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(answers(&refused, asked));
        let empty = [0, 1, 0x81, 0x80, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(!answers(&empty, asked));
    }
}
