//! Questions to DNS servers: UDP, and TCP if the answer is truncated.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use dns_policy::name::Fqdn;
use dns_wire::{HEADER_LEN, Header, TYPE_A, TYPE_AAAA, answer};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    task::JoinSet,
    time::timeout,
};

use super::{
    object::MAX_ADDRESSES,
    observe::{Failure, Outcome},
};

/// Time for the answer to one question.
const TIME: Duration = Duration::from_secs(5);
/// After this time without an answer, the question is sent once more.
const AGAIN: Duration = Duration::from_secs(2);
/// Bytes of the longest answer that is read over UDP; without EDNS an answer has at most 512.
const DATAGRAM: usize = 4096;
const FLAG_RECURSION_DESIRED: u16 = 0x0100;
const FLAG_TRUNCATED: u16 = 0x0200;
const CLASS_IN: u16 = 1;

/// Which addresses are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Families {
    pub ipv4: bool,
    pub ipv6: bool,
}

/// Asks each server for the addresses of a name, at the same time.
///
/// A server that answers outweighs a silent one. Between A and AAAA records, addresses
/// outweigh a failure, and a failure outweighs an answer without addresses.
pub async fn look_up(name: &Fqdn, servers: &[SocketAddr], families: Families) -> Outcome {
    let kinds = [(TYPE_A, families.ipv4), (TYPE_AAAA, families.ipv6)];
    let mut asked = JoinSet::new();
    for server in servers {
        for (kind, _) in kinds.into_iter().filter(|(_, is_on)| *is_on) {
            let (server, name) = (*server, name.clone());
            asked.spawn(async move { (kind, ask(server, &name, kind).await) });
        }
    }
    let mut by_kind = BTreeMap::<u16, Outcome>::new();
    while let Some(ended) = asked.join_next().await {
        let Ok((kind, outcome)) = ended else {
            continue;
        };
        let before = by_kind.remove(&kind);
        let outcome = match before {
            Some(before) => merged(before, outcome, of_servers),
            None => outcome,
        };
        by_kind.insert(kind, outcome);
    }
    let kinds = by_kind.into_values();
    kinds
        .reduce(|a, b| merged(a, b, of_types))
        .unwrap_or(Outcome::Failed(Failure::Silent))
}

/// Weight of an outcome among the outcomes of several servers.
fn of_servers(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Found(_) => 4,
        Outcome::NoData => 3,
        Outcome::Failed(Failure::Code(3)) => 2,
        Outcome::Failed(Failure::Code(_)) => 1,
        Outcome::Failed(Failure::Silent) => 0,
    }
}

/// Weight of an outcome among the outcomes of A and AAAA.
fn of_types(outcome: &Outcome) -> u8 {
    match outcome {
        Outcome::Found(_) => 4,
        Outcome::Failed(Failure::Code(3)) => 3,
        Outcome::Failed(Failure::Code(_)) => 2,
        Outcome::Failed(Failure::Silent) => 1,
        Outcome::NoData => 0,
    }
}

fn merged(a: Outcome, b: Outcome, weight: fn(&Outcome) -> u8) -> Outcome {
    match (a, b) {
        (Outcome::Found(mut all), Outcome::Found(more)) => {
            for (ip, ttl) in more {
                let room = all.len() < MAX_ADDRESSES;
                match all.iter_mut().find(|(known, _)| *known == ip) {
                    Some(known) => known.1 = known.1.max(ttl),
                    None if room => all.push((ip, ttl)),
                    None => {}
                }
            }
            Outcome::Found(all)
        }
        (a, b) if weight(&a) >= weight(&b) => a,
        (_, b) => b,
    }
}

/// Asks one server one question. Every error of the network is [`Failure::Silent`].
async fn ask(server: SocketAddr, name: &Fqdn, kind: u16) -> Outcome {
    let Some(question) = question(name, kind) else {
        return Outcome::Failed(Failure::Code(1));
    };
    let exchange = async {
        let answer = over_udp(server, &question).await?;
        let flags = Header::read(&answer).map_or(0, |header| header.flags);
        match flags & FLAG_TRUNCATED {
            0 => Ok(answer),
            _ => over_tcp(server, &question).await,
        }
    };
    match timeout(TIME, exchange).await {
        Ok(Ok(answer)) => read(&answer),
        Ok(Err(error)) => {
            tracing::debug!(%server, %name, %error, "a look-up failed");
            Outcome::Failed(Failure::Silent)
        }
        Err(_) => Outcome::Failed(Failure::Silent),
    }
}

fn read(answer: &[u8]) -> Outcome {
    let code = Header::read(answer).map_or(2, |header| header.rcode());
    let code = u8::try_from(code).unwrap_or(2);
    match answer::read(answer) {
        Ok(reading) if code == 0 => match reading.learned {
            Some(learned) => {
                let addresses = learned.addresses.into_iter().take(MAX_ADDRESSES);
                Outcome::Found(addresses.map(|ip| (ip, learned.ttl)).collect())
            }
            None => Outcome::NoData,
        },
        Ok(_) => Outcome::Failed(Failure::Code(code)),
        Err(_) => Outcome::Failed(Failure::Code(2)),
    }
}

/// The question section: name, type and class. `None` if the text is not a name.
fn question(name: &Fqdn, kind: u16) -> Option<Vec<u8>> {
    let mut question = Vec::with_capacity(HEADER_LEN + 260);
    for label in name.as_str().strip_suffix('.')?.split('.') {
        let length = u8::try_from(label.len()).ok();
        let length = length.filter(|length| (1..=63).contains(length))?;
        question.push(length);
        question.extend_from_slice(label.as_bytes());
    }
    question.push(0);
    question.extend_from_slice(&kind.to_be_bytes());
    question.extend_from_slice(&CLASS_IN.to_be_bytes());
    Some(question)
}

/// A query with a random id.
fn query(question: &[u8]) -> (u16, Vec<u8>) {
    let id = rand::random::<u16>();
    let mut query = Vec::with_capacity(HEADER_LEN + question.len());
    for number in [id, FLAG_RECURSION_DESIRED, 1, 0, 0, 0] {
        query.extend_from_slice(&number.to_be_bytes());
    }
    query.extend_from_slice(question);
    (id, query)
}

fn is_answer(message: &[u8], id: u16, question: &[u8]) -> bool {
    Header::read(message).is_some_and(|header| header.id == id)
        && answer::answers(message, question)
}

/// The kernel chooses a random port, and accepts datagrams of this server only.
async fn over_udp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    let (id, query) = query(question);
    let mut buffer = vec![0; DATAGRAM];
    loop {
        socket.send(&query).await?;
        let received = timeout(AGAIN, async {
            loop {
                let length = socket.recv(&mut buffer).await?;
                let message = buffer.get(..length).unwrap_or_default();
                if is_answer(message, id, question) {
                    return io::Result::Ok(message.to_vec());
                }
            }
        });
        if let Ok(answer) = received.await {
            return answer;
        }
    }
}

async fn over_tcp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let (id, query) = query(question);
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    let framed = [&length.to_be_bytes()[..], &query].concat();
    stream.write_all(&framed).await?;
    let length = stream.read_u16().await?;
    let mut answer = vec![0; usize::from(length)];
    stream.read_exact(&mut answer).await?;
    match is_answer(&answer, id, question) {
        true => Ok(answer),
        false => Err(io::Error::other("the answer is not to the question")),
    }
}
