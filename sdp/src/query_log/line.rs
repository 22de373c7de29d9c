//! One line of the query log: the data of a query when it was judged, and its end.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use dns_policy::{rule::Transport, wall_time};
use serde::Serialize;

use dns_wire::{Header, Rcode};

/// A query that is to be logged.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Time at which the query was judged, nanoseconds of Unix time.
    pub time: u64,
    /// The same time on the monotonic clock.
    pub asked: Instant,
    /// Endpoint number and identity of the client, if it was found.
    pub endpoint: Option<(u16, u32)>,
    /// Address from which the query came.
    pub pod: IpAddr,
    /// Name as policy matches it: lower case, bytes outside of the printable range as `\DDD`.
    pub name: String,
    /// Type of the question as a number, for example 28 for AAAA.
    pub qtype: u16,
    pub transport: Transport,
    pub allowed: bool,
    /// Server for which the query was meant.
    pub server: SocketAddr,
    /// Identity of the server, if it was looked up.
    pub server_identity: Option<u32>,
    /// Selector and pattern of the rule that allows the query.
    pub rule: Option<(String, String)>,
    /// Outcome of the query, set when it ends.
    pub end: QueryEnd,
}

/// Outcome of a query, with its answer and durations.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueryEnd {
    /// The outcome in one of the words that metrics use.
    pub result: &'static str,
    /// Code of the answer that the client got, if it got one.
    pub rcode: Option<u16>,
    /// Number of records in the answer section.
    pub answers: u16,
    /// Time from the query to the answer's release.
    pub took: Duration,
    /// The part of `took` during which the answer waited for the agent.
    pub held: Duration,
}

impl QueryEnd {
    /// The outcome of a query whose client gets `message`.
    pub fn sent(result: &'static str, message: &[u8]) -> Self {
        let header = Header::read(message);
        Self {
            result,
            rcode: header.map(|header| header.flags & 0xf),
            answers: header.map_or(0, |header| header.answers),
            ..Self::default()
        }
    }

    /// The outcome of a query that the proxy answers itself.
    pub fn own(result: &'static str, code: Rcode) -> Self {
        Self {
            result,
            rcode: Some(code.number()),
            ..Self::default()
        }
    }

    /// The outcome of a query whose client gets no answer.
    pub fn unanswered(result: &'static str) -> Self {
        Self {
            result,
            ..Self::default()
        }
    }

    /// The same outcome after a wait of `held` for the agent.
    #[must_use]
    pub fn held(self, held: Duration) -> Self {
        Self { held, ..self }
    }
}

/// The written form of a line. Absent fields are left out.
#[derive(Debug, Serialize)]
pub(super) struct Line<'a> {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<u16>,
    pod: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    identity: Option<u32>,
    name: &'a str,
    #[serde(rename = "type")]
    qtype: Cow<'static, str>,
    protocol: &'static str,
    verdict: &'static str,
    server: IpAddr,
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    server_identity: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    selector: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rcode: Option<Cow<'static, str>>,
    answers: u16,
    latency_us: u64,
    held_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    one_in: Option<u32>,
}

impl<'a> Line<'a> {
    pub(super) fn of(entry: &'a Entry, one_in: u32) -> Self {
        let rule = entry.rule.as_ref();
        Self {
            time: wall_time::render(entry.time),
            endpoint: entry.endpoint.map(|(id, _)| id),
            pod: entry.pod,
            identity: entry.endpoint.map(|(_, identity)| identity),
            name: &entry.name,
            qtype: type_name(entry.qtype),
            protocol: entry.transport.as_str(),
            verdict: if entry.allowed { "allowed" } else { "denied" },
            server: entry.server.ip(),
            port: entry.server.port(),
            server_identity: entry.server_identity,
            selector: rule.map(|(selector, _)| selector.as_str()),
            rule: rule.map(|(_, pattern)| pattern.as_str()),
            result: entry.end.result,
            rcode: entry.end.rcode.map(code_name),
            answers: entry.end.answers,
            latency_us: micros(entry.end.took),
            held_us: micros(entry.end.held),
            one_in: (one_in > 1).then_some(one_in),
        }
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        put(self, to);
    }
}

/// Appends the line with the number of lost lines.
pub(super) fn dropped(time: u64, dropped: u64, to: &mut Vec<u8>) {
    #[derive(Serialize)]
    struct Dropped {
        time: String,
        dropped: u64,
    }
    let time = wall_time::render(time);
    put(&Dropped { time, dropped }, to);
}

/// Appends one line. JSON escapes every byte that would end the line or a string in it.
fn put(line: &impl Serialize, to: &mut Vec<u8>) {
    let begin = to.len();
    match serde_json::to_writer(&mut *to, line) {
        Ok(()) => to.push(b'\n'),
        // These types can always be serialised. Without this, a partial line could remain.
        Err(_) => to.truncate(begin),
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// Name of a type as in zone files; for unknown types, the form of RFC 3597, section 5.
fn type_name(qtype: u16) -> Cow<'static, str> {
    Cow::Borrowed(match qtype {
        1 => "A",
        2 => "NS",
        5 => "CNAME",
        6 => "SOA",
        12 => "PTR",
        13 => "HINFO",
        15 => "MX",
        16 => "TXT",
        28 => "AAAA",
        33 => "SRV",
        35 => "NAPTR",
        39 => "DNAME",
        43 => "DS",
        46 => "RRSIG",
        47 => "NSEC",
        48 => "DNSKEY",
        52 => "TLSA",
        64 => "SVCB",
        65 => "HTTPS",
        251 => "IXFR",
        252 => "AXFR",
        255 => "ANY",
        257 => "CAA",
        other => return Cow::Owned(format!("TYPE{other}")),
    })
}

fn code_name(code: u16) -> Cow<'static, str> {
    Cow::Borrowed(match code {
        0 => "NOERROR",
        1 => "FORMERR",
        2 => "SERVFAIL",
        3 => "NXDOMAIN",
        4 => "NOTIMP",
        5 => "REFUSED",
        6 => "YXDOMAIN",
        9 => "NOTAUTH",
        10 => "NOTZONE",
        16 => "BADVERS",
        other => return Cow::Owned(format!("RCODE{other}")),
    })
}
