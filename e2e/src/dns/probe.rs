//! One DNS query, sent once and never retried, and its answer.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query as Question, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{Name, RData, RecordType};

/// Option code of padding (RFC 7830).
const PADDING: u16 = 12;

/// A DNS query that is sent once.
#[derive(Clone, Debug)]
pub struct Query {
    name: String,
    rtype: RecordType,
    server: SocketAddr,
    tcp: bool,
    padding: Option<usize>,
    edns: bool,
    limit: Duration,
}

/// The answer to a query, with its sender and its time.
#[derive(Clone, Debug)]
pub struct Reply {
    pub message: Message,
    /// Source address of the answer.
    pub from: SocketAddr,
    /// Time from sending to receiving.
    pub took: Duration,
}

impl Query {
    /// A query over UDP to `server` (port 53) for the A records of a name.
    pub fn a(name: &str, server: IpAddr) -> Self {
        Self {
            name: format!("{}.", name.trim_end_matches('.')),
            rtype: RecordType::A,
            server: SocketAddr::new(server, 53),
            tcp: false,
            padding: None,
            edns: false,
            limit: Duration::from_secs(3),
        }
    }

    /// A query over UDP to `server` (port 53) for the AAAA records of a name.
    pub fn aaaa(name: &str, server: IpAddr) -> Self {
        Self {
            rtype: RecordType::AAAA,
            ..Self::a(name, server)
        }
    }

    /// Sends the query to another port than 53.
    pub fn port(mut self, port: u16) -> Self {
        self.server.set_port(port);
        self
    }

    pub fn tcp(self) -> Self {
        Self { tcp: true, ..self }
    }

    /// Adds an EDNS option that makes the message exactly `size` bytes long.
    pub fn sized(self, size: usize) -> Self {
        Self {
            padding: Some(size),
            ..self
        }
    }

    /// Adds an OPT record without options.
    pub fn edns(self) -> Self {
        Self { edns: true, ..self }
    }

    /// Sets the longest wait for the answer.
    pub fn within(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Sends the query from the calling thread's namespace.
    pub fn send(&self) -> Result<Reply> {
        let id = rand::random();
        let bytes = self.encode(id)?;
        let start = Instant::now();
        let (answer, from) = if self.tcp {
            (self.over_tcp(&bytes)?, self.server)
        } else {
            self.over_udp(&bytes)?
        };
        let message = Message::from_vec(&answer).context("decode the answer")?;
        ensure!(message.metadata.id == id, "answer to another query");
        ensure!(
            from == self.server,
            "answer from {from}, asked {}",
            self.server
        );
        Ok(Reply {
            message,
            from,
            took: start.elapsed(),
        })
    }

    fn over_udp(&self, bytes: &[u8]) -> Result<(Vec<u8>, SocketAddr)> {
        let any: IpAddr = match self.server {
            SocketAddr::V4(_) => [0, 0, 0, 0].into(),
            SocketAddr::V6(_) => [0u16; 8].into(),
        };
        // Not connected, because an answer from a wrong address must be received and not filtered.
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(self.limit))?;
        socket.send_to(bytes, self.server)?;
        let mut buffer = vec![0; 65_535];
        let (length, from) = socket
            .recv_from(&mut buffer)
            .with_context(|| format!("no answer for {} from {}", self.name, self.server))?;
        buffer.truncate(length);
        Ok((buffer, from))
    }

    fn over_tcp(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut stream = TcpStream::connect_timeout(&self.server, self.limit)
            .with_context(|| format!("connect to {}", self.server))?;
        stream.set_read_timeout(Some(self.limit))?;
        let mut framed = u16::try_from(bytes.len())?.to_be_bytes().to_vec();
        framed.extend_from_slice(bytes);
        stream.write_all(&framed)?;
        let mut length = [0; 2];
        stream
            .read_exact(&mut length)
            .context("no answer over TCP")?;
        let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut answer)?;
        Ok(answer)
    }

    /// The query in wire format. Over TCP, its length precedes it.
    pub fn encode(&self, id: u16) -> Result<Vec<u8>> {
        let mut message = Message::new(id, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.add_query(Question::query(Name::from_ascii(&self.name)?, self.rtype));
        if self.edns || self.padding.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(4096);
            message.set_edns(edns);
        }
        let bare = message.to_vec()?;
        let Some(size) = self.padding else {
            return Ok(bare);
        };
        // Option header: code and length, two bytes each.
        let Some(fill) = size.checked_sub(bare.len() + 4) else {
            bail!("the bare query is already {} bytes long", bare.len())
        };
        if let Some(edns) = &mut message.edns {
            edns.options_mut()
                .insert(EdnsOption::Unknown(PADDING, vec![0; fill]));
        }
        let padded = message.to_vec()?;
        ensure!(
            padded.len() == size,
            "padded to {}, not {size}",
            padded.len()
        );
        Ok(padded)
    }
}

impl Reply {
    pub fn code(&self) -> ResponseCode {
        self.message.metadata.response_code
    }

    /// Addresses in the answer section.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let records = self.message.answers.iter();
        records
            .filter_map(|record| match &record.data {
                RData::A(a) => Some(IpAddr::V4(a.0)),
                RData::AAAA(a) => Some(IpAddr::V6(a.0)),
                _ => None,
            })
            .collect()
    }

    /// Fails unless this is a positive answer with exactly this address.
    pub fn expect(self, address: IpAddr) -> Result<Self> {
        ensure!(
            self.code() == ResponseCode::NoError && self.addresses() == [address],
            "expected {address}, got {} {:?}",
            self.code(),
            self.addresses()
        );
        Ok(self)
    }

    /// Fails unless this is the proxy's answer to a name that policy forbids: REFUSED, or NXDOMAIN
    /// with the proxy's own SOA record (its primary server is the root).
    pub fn expect_refused(self) -> Result<Self> {
        let by_proxy = self
            .message
            .authorities
            .iter()
            .any(|record| matches!(&record.data, RData::SOA(soa) if soa.mname.is_root()));
        let code = self.code();
        ensure!(
            self.message.answers.is_empty()
                && (code == ResponseCode::Refused || code == ResponseCode::NXDomain && by_proxy),
            "expected a refusal by policy, got {code} {:?}",
            self.addresses()
        );
        Ok(self)
    }

    /// Fails unless the answer has this code and no records.
    pub fn expect_code(self, code: ResponseCode) -> Result<Self> {
        ensure!(
            self.code() == code && self.message.answers.is_empty(),
            "expected {code}, got {} {:?}",
            self.code(),
            self.addresses()
        );
        Ok(self)
    }
}
