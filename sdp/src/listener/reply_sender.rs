//! Sending answers from the servers' own addresses.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    time::Instant,
};

use rand::Rng;

use super::{SocketOptions, send_all::send_all};
use crate::socket::{
    self, SocketError,
    sys::{Datagram, SendBatch},
};

/// Maximum number of reply sockets per worker: one per family and server port.
const MAX_SENDERS: usize = 64;
/// Number of dummy addresses that are tried before giving up.
const TRIES: usize = 4;

/// Sends answers to clients from the address and port of the queried server.
pub(super) struct ReplySender {
    transparent: bool,
    senders: HashMap<(bool, u16), Sender>,
    batch: SendBatch,
    /// A datagram with its UDP header, for raw senders.
    framed: Vec<u8>,
}

/// A socket that sends from one port of any address.
struct Sender {
    fd: OwnedFd,
    kind: Kind,
    used: Instant,
}

/// How a sender sets the source port of its packets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The socket is bound to the port.
    Bound,
    /// Another socket has the port on every address, so the sender writes the UDP header.
    Raw,
}

impl ReplySender {
    pub(super) fn new(options: SocketOptions) -> Self {
        Self {
            transparent: options == SocketOptions::Transparent,
            senders: HashMap::new(),
            batch: SendBatch::new(),
            framed: Vec::new(),
        }
    }

    /// Sends `answers`, each with its client, from `server`. Returns the number of answers that
    /// could not be sent.
    ///
    /// `listener` is the socket that received the queries. It sends the answers if sockets are not
    /// transparent.
    pub(super) fn send<'a>(
        &mut self,
        server: SocketAddr,
        answers: impl Iterator<Item = (&'a [u8], SocketAddr)> + Clone,
        listener: &OwnedFd,
        now: Instant,
    ) -> Result<usize, SocketError> {
        let source = self.transparent.then(|| server.ip());
        let (socket, kind) = if self.transparent {
            let sender = sender(&mut self.senders, server, now)?;
            (&sender.fd, sender.kind)
        } else {
            (listener, Kind::Bound)
        };
        if kind == Kind::Raw {
            let batch = &mut self.batch;
            return Ok(send_raw(batch, socket, server, answers, &mut self.framed));
        }
        let datagrams = answers.map(|(bytes, client)| Datagram {
            bytes,
            to: Some(client),
            source,
        });
        Ok(send_all(&mut self.batch, socket, datagrams, |_| {}))
    }
}

/// The sender for a server's port and family.
fn sender(
    senders: &mut HashMap<(bool, u16), Sender>,
    server: SocketAddr,
    now: Instant,
) -> Result<&Sender, SocketError> {
    let key = (server.is_ipv6(), server.port());
    if senders.len() >= MAX_SENDERS
        && !senders.contains_key(&key)
        && let Some(oldest) = senders.iter().min_by_key(|(_, s)| s.used).map(|(k, _)| *k)
    {
        senders.remove(&oldest);
    }
    match senders.entry(key) {
        Entry::Occupied(entry) => {
            let sender = entry.into_mut();
            sender.used = now;
            Ok(sender)
        }
        Entry::Vacant(entry) => {
            let (fd, kind) = open(key.0, key.1)?;
            Ok(entry.insert(Sender {
                fd,
                kind,
                used: now,
            }))
        }
    }
}

fn open(ipv6: bool, port: u16) -> Result<(OwnedFd, Kind), SocketError> {
    let mut tries = TRIES;
    loop {
        tries -= 1;
        match socket::udp_reply(ipv6, port, rand::rng().random_range(1..u16::MAX)) {
            Ok(fd) => return Ok((fd, Kind::Bound)),
            // Cilium's chart gives its proxy no capability for ports below 1024.
            Err(error) if error.source.kind() == io::ErrorKind::PermissionDenied => {
                tracing::info!(
                    port,
                    "no permission to bind the server's port: answers use a raw socket"
                );
                return Ok((socket::raw_reply(ipv6)?, Kind::Raw));
            }
            Err(_) if tries > 0 => {}
            Err(error) if error.source.kind() == io::ErrorKind::AddrInUse => {
                tracing::info!(
                    port,
                    "port taken on every address by another socket: answers use a raw socket"
                );
                return Ok((socket::raw_reply(ipv6)?, Kind::Raw));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Sends each answer with a UDP header made here. Returns the number that could not be sent.
fn send_raw<'a>(
    batch: &mut SendBatch,
    socket: &OwnedFd,
    server: SocketAddr,
    answers: impl Iterator<Item = (&'a [u8], SocketAddr)>,
    framed: &mut Vec<u8>,
) -> usize {
    let mut unsent = 0;
    for (bytes, client) in answers {
        let Ok(length) = u16::try_from(bytes.len() + 8) else {
            unsent += 1;
            continue;
        };
        framed.clear();
        // Over IPv4 the checksum may be zero (RFC 768). Over IPv6 the kernel writes it.
        for field in [server.port(), client.port(), length, 0] {
            framed.extend_from_slice(&field.to_be_bytes());
        }
        framed.extend_from_slice(bytes);
        // A raw socket has no port.
        let to = match client {
            SocketAddr::V4(client) => SocketAddr::from((*client.ip(), 0)),
            SocketAddr::V6(mut client) => {
                client.set_port(0);
                client.into()
            }
        };
        let datagram = Datagram {
            bytes: framed,
            to: Some(to),
            source: Some(server.ip()),
        };
        unsent += send_all(batch, socket, std::iter::once(datagram), |_| {});
    }
    unsent
}
