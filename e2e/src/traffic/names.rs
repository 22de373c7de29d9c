//! The queried names, their addresses, and both in wire format.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rand::Rng;
use serde::{Deserialize, Serialize};

/// DNS zone that contains all queried names.
pub(crate) const ZONE: &str = "good.test";
/// Bytes of a DNS header.
const HEADER: usize = 12;

/// Numbered names, each with one address per family.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Names {
    /// Names that are queried repeatedly.
    pub hot: u32,
    /// All names. Names beyond `hot` are queried rarely, so that new addresses are learned.
    pub all: u32,
    /// Percentage of queries for any name instead of a hot one.
    pub others_percent: u32,
}

impl Names {
    /// A name for the next query.
    pub fn pick(&self, rng: &mut impl Rng) -> u32 {
        let other = rng.random_range(0..100) < self.others_percent;
        rng.random_range(0..if other { self.all } else { self.hot })
    }
}

/// Name of this number, `n<number>.good.test`.
pub(crate) fn name(number: u32) -> String {
    format!("n{number}.{ZONE}")
}

/// IPv4 address of the name with this number, in 100.64.0.0/10.
pub(crate) fn v4(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(100, 64, 0, 0).to_bits() + number)
}

/// IPv6 address of the name with this number, in 2001:db8:64::/96.
pub(crate) fn v6(number: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(
        Ipv6Addr::new(0x2001, 0xdb8, 0x64, 0, 0, 0, 0, 0).to_bits() + u128::from(number),
    )
}

/// The zone as a master file.
pub(crate) fn zone_file(names: &Names) -> String {
    let mut zone = format!(
        "$ORIGIN {ZONE}.\n$TTL 600\n@ IN SOA ns hostmaster 1 3600 600 86400 60\n@ IN NS ns\nns IN A 192.0.2.2\n"
    );
    for number in 0..names.all {
        // Every second name has a TTL of a day, longer than a lease may last.
        let ttl = if number % 2 == 0 { 600 } else { 86_400 };
        let _ = writeln!(
            zone,
            "n{number} {ttl} IN A {}\nn{number} {ttl} IN AAAA {}",
            v4(number),
            v6(number)
        );
    }
    zone
}

/// A query as sent, with the expected answer.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub id: u16,
    name: u32,
    v6: bool,
}

impl Asked {
    /// A query for A records if `id` is even, else for AAAA records.
    pub(crate) fn new(id: u16, name: u32) -> Self {
        Self {
            id,
            name,
            v6: id % 2 == 1,
        }
    }

    /// Appends the query in wire format to `out`.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.to_be_bytes());
        // RD, one question.
        out.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        self.question(out);
    }

    fn question(&self, out: &mut Vec<u8>) {
        for label in name(self.name).split('.') {
            out.push(u8::try_from(label.len()).unwrap_or(u8::MAX));
            out.extend_from_slice(label.as_bytes());
        }
        let kind = if self.v6 { 28 } else { 1 };
        out.extend_from_slice(&[0, 0, kind, 0, 1]);
    }

    /// Returns an error that says what is wrong with an answer.
    pub(crate) fn check(&self, answer: &[u8]) -> Result<(), String> {
        let mut question = Vec::with_capacity(64);
        self.question(&mut question);
        let field = |at: usize| {
            let bytes = answer.get(at..at + 2)?.try_into().ok()?;
            Some(u16::from_be_bytes(bytes))
        };
        let of = || {
            format!(
                "{} (type {})",
                name(self.name),
                if self.v6 { 28 } else { 1 }
            )
        };
        let (Some(id), Some(flags), Some(questions), Some(answers)) =
            (field(0), field(2), field(4), field(6))
        else {
            return Err(format!("{}: {} bytes are no answer", of(), answer.len()));
        };
        if id != self.id || flags & 0x8000 == 0 || questions != 1 {
            return Err(format!("{}: not an answer to it", of()));
        }
        if flags & 0xf != 0 || answers != 1 {
            return Err(format!(
                "{}: rcode {}, {answers} records",
                of(),
                flags & 0xf
            ));
        }
        let end = HEADER + question.len();
        if answer.get(HEADER..end) != Some(&question) {
            return Err(format!("{}: another question", of()));
        }
        let owner = match answer.get(end) {
            Some(first) if first & 0xc0 == 0xc0 => 2,
            _ => question.len() - 4,
        };
        // After the owner: type, class, TTL, length.
        let data = answer.get(end + owner + 10..).unwrap_or_default();
        let right = match self.address() {
            IpAddr::V4(ip) => data.starts_with(&ip.octets()),
            IpAddr::V6(ip) => data.starts_with(&ip.octets()),
        };
        if !right {
            return Err(format!("{}: another address than {}", of(), self.address()));
        }
        Ok(())
    }

    fn address(&self) -> IpAddr {
        if self.v6 {
            v6(self.name).into()
        } else {
            v4(self.name).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{Message, MessageType};
    use hickory_proto::rr::rdata::{A, AAAA};
    use hickory_proto::rr::{RData, Record};

    use super::*;

    fn answered(asked: &Asked, change: impl FnOnce(&mut Message)) -> Result<(), String> {
        let mut query = Vec::new();
        asked.write(&mut query);
        let mut message = Message::from_vec(&query).expect("our queries are well-formed");
        message.metadata.message_type = MessageType::Response;
        let owner = message.queries[0].name().clone();
        let data = match asked.address() {
            IpAddr::V4(ip) => RData::A(A(ip)),
            IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
        };
        message.add_answer(Record::from_rdata(owner, 600, data));
        change(&mut message);
        asked.check(&message.to_vec().expect("it encodes"))
    }

    #[test]
    fn only_the_right_answer_is_right() {
        for asked in [Asked::new(4, 70_000), Asked::new(5, 3)] {
            assert_eq!(answered(&asked, |_| {}), Ok(()));
            assert!(answered(&asked, |m| m.metadata.id += 2).is_err());
            assert!(answered(&asked, |m| m.answers.clear()).is_err());
            let refused = hickory_proto::op::ResponseCode::Refused;
            assert!(answered(&asked, |m| m.metadata.response_code = refused).is_err());
            let other = Asked {
                name: 12,
                ..asked.clone()
            };
            let mut bytes = Vec::new();
            other.write(&mut bytes);
            let question = Message::from_vec(&bytes).unwrap().queries;
            assert!(answered(&asked, |m| m.queries = question).is_err());
            let data = match other.address() {
                IpAddr::V4(ip) => RData::A(A(ip)),
                IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
            };
            assert!(answered(&asked, |m| m.answers[0].data = data).is_err());
            assert!(asked.check(&[0; 5]).is_err());
        }
    }
}
