//! Records that can change while the server runs, and the fault of each name.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, CNAME};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use parking_lot::Mutex;

/// The server's behaviour for queries for a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Manner {
    #[default]
    Normal,
    /// Answers, but only after this time.
    Delay(Duration),
    Lost,
    /// Answers with an id that was not sent.
    WrongId,
    /// Over UDP answers with TC and without records, over TCP as usual.
    Truncated,
    /// Answers with bytes that are no DNS message.
    Garbage,
    /// Answers with a question that was not sent.
    WrongQuestion,
    /// Answers with this code and no records.
    Code(ResponseCode),
}

#[derive(Clone, Debug, Default)]
struct Entry {
    addresses: Vec<IpAddr>,
    alias: Option<String>,
    ttl: u32,
    manner: Manner,
    asked: u64,
}

/// The records, shared by the servers and the test.
#[derive(Clone, Debug, Default)]
pub struct Zone(Arc<Mutex<HashMap<String, Entry>>>);

/// One message to send back.
#[derive(Debug)]
pub struct Response {
    /// Bytes without the TCP length prefix.
    pub bytes: Vec<u8>,
    /// How long to wait before sending it.
    pub delay: Duration,
}

impl Zone {
    /// Sets the addresses of a name and their TTL in seconds.
    pub fn set(&self, name: &str, addresses: &[IpAddr], ttl: u32) {
        let mut zone = self.0.lock();
        let entry = zone.entry(key(name)).or_default();
        entry.addresses = addresses.to_vec();
        entry.alias = None;
        entry.ttl = ttl;
    }

    /// Makes `name` an alias of `target`.
    pub fn alias(&self, name: &str, target: &str, ttl: u32) {
        let mut zone = self.0.lock();
        let entry = zone.entry(key(name)).or_default();
        entry.alias = Some(key(target));
        entry.ttl = ttl;
    }

    /// Sets how the server treats a name.
    pub fn manner(&self, name: &str, manner: Manner) {
        self.0.lock().entry(key(name)).or_default().manner = manner;
    }

    /// How many queries for a name have reached a server.
    pub fn asked(&self, name: &str) -> u64 {
        self.0.lock().get(&key(name)).map_or(0, |entry| entry.asked)
    }

    /// The messages to send for a query. `None`: no answer.
    pub fn respond(&self, query: &[u8], tcp: bool) -> Option<Response> {
        let request = Message::from_vec(query).ok()?;
        let question = request.queries.first()?.clone();
        let name = key(&question.name().to_ascii());
        let (manner, known) = {
            let mut zone = self.0.lock();
            let known = zone
                .get(&name)
                .is_some_and(|e| e.alias.is_some() || !e.addresses.is_empty());
            let entry = zone.entry(name.clone()).or_default();
            entry.asked += 1;
            (entry.manner.clone(), known)
        };

        let mut answer = Message::new(request.metadata.id, MessageType::Response, OpCode::Query);
        answer.metadata.recursion_desired = request.metadata.recursion_desired;
        answer.metadata.recursion_available = true;
        answer.edns = request.edns.is_some().then(Default::default);
        answer.add_query(question.clone());
        let mut delay = Duration::ZERO;
        match manner {
            Manner::Lost => return None,
            Manner::Garbage => {
                return Some(Response {
                    bytes: vec![0xff; 7],
                    delay,
                });
            }
            Manner::Code(code) => answer.metadata.response_code = code,
            Manner::Truncated if !tcp => answer.metadata.truncation = true,
            Manner::WrongQuestion => {
                answer.queries = vec![Query::query(
                    Name::from_ascii("elsewhere.test.").ok()?,
                    question.query_type(),
                )];
                self.fill(&mut answer, &question, &name);
            }
            _ if !known => answer.metadata.response_code = ResponseCode::NXDomain,
            Manner::WrongId => {
                answer.metadata.id = request.metadata.id.wrapping_add(1);
                self.fill(&mut answer, &question, &name);
            }
            Manner::Delay(by) => {
                delay = by;
                self.fill(&mut answer, &question, &name);
            }
            Manner::Normal | Manner::Truncated => self.fill(&mut answer, &question, &name),
        }
        Some(Response {
            bytes: answer.to_vec().ok()?,
            delay,
        })
    }

    /// Adds the records, following aliases.
    fn fill(&self, answer: &mut Message, question: &Query, name: &str) {
        let zone = self.0.lock();
        let mut owner = question.name().clone();
        let mut name = name.to_owned();
        for _ in 0..8 {
            let Some(entry) = zone.get(&name) else { return };
            let Some(target) = &entry.alias else {
                for address in &entry.addresses {
                    let data = match (address, question.query_type()) {
                        (IpAddr::V4(v4), RecordType::A) => RData::A(A(*v4)),
                        (IpAddr::V6(v6), RecordType::AAAA) => RData::AAAA(AAAA(*v6)),
                        _ => continue,
                    };
                    answer.add_answer(Record::from_rdata(owner.clone(), entry.ttl, data));
                }
                return;
            };
            let Ok(next) = Name::from_ascii(format!("{target}.")) else {
                return;
            };
            let data = RData::CNAME(CNAME(next.clone()));
            answer.add_answer(Record::from_rdata(owner, entry.ttl, data));
            owner = next;
            name = target.clone();
        }
    }
}

fn key(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}
