//! Sending answers from the servers' own addresses.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    time::Instant,
};

use rand::Rng;

use super::SocketOptions;
use crate::socket::{self, SocketError, sys, sys::Datagram};

/// Reply sockets per worker at most: one per family and server port.
const MAX_SOCKETS: usize = 64;
/// Dummy addresses that are tried before giving up.
const TRIES: usize = 4;

/// Sends answers to clients.
pub(super) struct Replies {
    transparent: bool,
    sockets: HashMap<(bool, u16), (OwnedFd, Instant)>,
}

impl Replies {
    pub(super) fn new(options: SocketOptions) -> Self {
        Self {
            transparent: options == SocketOptions::Transparent,
            sockets: HashMap::new(),
        }
    }

    /// Sends `answers` (bytes, client), all from `server`. Says how many were sent.
    ///
    /// `listener` is the socket that queries came to: the sender where sockets are not transparent.
    pub(super) fn send<'a>(
        &mut self,
        server: SocketAddr,
        answers: impl Iterator<Item = (&'a [u8], SocketAddr)>,
        listener: &OwnedFd,
        now: Instant,
    ) -> Result<usize, SocketError> {
        let source = self.transparent.then(|| server.ip());
        let socket = if self.transparent {
            self.socket(server, now)?
        } else {
            listener
        };
        let empty = Datagram {
            bytes: &[],
            to: None,
            source: None,
        };
        let mut batch = [empty; sys::BATCH];
        let mut len = 0;
        for (slot, (bytes, client)) in batch.iter_mut().zip(answers) {
            *slot = Datagram {
                bytes,
                to: Some(client),
                source,
            };
            len += 1;
        }
        let batch = batch.get(..len).unwrap_or_default();
        Ok(len - send_all(socket, batch, |_| {}))
    }

    fn socket(&mut self, server: SocketAddr, now: Instant) -> Result<&OwnedFd, SocketError> {
        let key = (matches!(server.ip(), IpAddr::V6(_)), server.port());
        if !self.sockets.contains_key(&key) {
            if self.sockets.len() >= MAX_SOCKETS
                && let Some(oldest) = self
                    .sockets
                    .iter()
                    .min_by_key(|(_, (_, used))| *used)
                    .map(|(k, _)| *k)
            {
                self.sockets.remove(&oldest);
            }
            let mut tries = TRIES;
            let fd = loop {
                tries -= 1;
                match socket::udp_reply(key.0, key.1, rand::rng().random_range(1..u16::MAX)) {
                    Err(_) if tries > 0 => {}
                    result => break result?,
                }
            };
            self.sockets.insert(key, (fd, now));
        }
        let entry = self.sockets.entry(key);
        match entry {
            std::collections::hash_map::Entry::Occupied(entry) => {
                let (fd, used) = entry.into_mut();
                *used = now;
                Ok(fd)
            }
            std::collections::hash_map::Entry::Vacant(_) => Err(SocketError {
                what: "no reply socket",
                source: io::ErrorKind::NotFound.into(),
            }),
        }
    }
}

/// Sends all datagrams, going on past those that fail. Says how many failed.
///
/// A connected socket reports an ICMP error of an earlier datagram on the next
/// one: that one is tried again.
pub(super) fn send_all(
    socket: &OwnedFd,
    datagrams: &[Datagram<'_>],
    mut failed: impl FnMut(usize),
) -> usize {
    let mut at = 0;
    let mut failures = 0;
    let mut retried = false;
    while let Some(rest) = datagrams.get(at..).filter(|r| !r.is_empty()) {
        match sys::send(socket, rest) {
            Ok(sent) => {
                at += sent.max(1);
                retried = false;
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && !retried => retried = true,
            Err(_) => {
                failed(at);
                failures += 1;
                at += 1;
                retried = false;
            }
        }
    }
    failures
}
