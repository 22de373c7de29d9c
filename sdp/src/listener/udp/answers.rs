//! Answers of servers to a worker, and their release to clients.

use std::{io, sync::Arc};

use dns_policy::boot_time::BootTime;
use dns_wire::{edns::Edns, set_id};
use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::{BATCH, ROUNDS, Worker};
use crate::{
    arena::Key,
    proxy::AnswerDecision,
    query::{
        observe::Failure,
        pending::{Arrival, HeldAnswer, Joined, PendingQuery},
    },
    stats::AnswerResult,
    upstream::udp::Flight,
};

impl Worker {
    /// Handles an event of an upstream socket: answers, ICMP errors, or both.
    pub(super) fn server_event(&mut self, event: EpollEvent) {
        let socket = Key::from_u64(event.data());
        if event.events().contains(EpollFlags::EPOLLERR) {
            self.undelivered(socket);
        }
        self.answers(socket);
    }

    /// Receives answers from an upstream socket and releases or holds them.
    fn answers(&mut self, socket: Key) {
        for _ in 0..ROUNDS {
            let Some(fd) = self.upstream.fd(socket) else {
                return;
            };
            let received = match self.buffers.answers.recv(fd) {
                Ok(received) => received,
                // An ICMP error. Reading it removed it, and the other queries still wait.
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(_) => return,
            };
            self.taken += received;
            let now = BootTime::now();
            let mut released = std::mem::take(&mut self.buffers.released);
            let mut server = None;
            for at in 0..received {
                let message = self.buffers.answers.bytes(at);
                let flight = self.upstream.answered(socket, message, self.now);
                let Some(Flight { query, .. }) = flight else {
                    self.proxy.stats().answers.inc(AnswerResult::Unexpected);
                    continue;
                };
                let from = query.from;
                if self.answer(at, query, now) {
                    released.push((at, from.client));
                    server = Some(from.server);
                }
            }
            if let Some(server) = server {
                let answers = released.iter();
                let answers =
                    answers.map(|(at, client)| (self.buffers.answers.bytes(*at), *client));
                self.clients
                    .send(&self.proxy, (server, server), answers, self.now);
            }
            released.clear();
            self.buffers.released = released;
            self.proxy.sink().push();
            if received < BATCH {
                return;
            }
        }
    }

    /// Handles one answer. Returns whether to send it from the batch at once.
    fn answer(&mut self, at: usize, mut query: PendingQuery<Vec<u8>>, now: BootTime) -> bool {
        let observer = self.proxy.observer();
        observer.answered(&query, self.now);
        set_id(self.buffers.answers.bytes_mut(at), query.header.id);
        // The version is read before the sink decides, so that a change in between is noticed.
        let version = self.proxy.sink().leases_version();
        let message = self.buffers.answers.bytes(at);
        let print = self
            .repeats
            .print(query.endpoint, query.from.server, message);
        let is_repeat = query.joined.is_empty() && self.repeats.is_leased(print, version, now);
        if is_repeat && !observer.wants_report() {
            observer.released(&mut query, message, AnswerResult::Released, self.now);
            self.upstream.recycle(query.question);
            return true;
        }
        let to_send = self.learn(at, query, now);
        if to_send == Some(AnswerResult::Released) {
            self.repeats.leased(print, version, now);
        }
        to_send.is_some()
    }

    /// Learns from one answer. Returns its result if it is to be sent from the batch at once.
    fn learn(
        &mut self,
        at: usize,
        mut query: PendingQuery<Vec<u8>>,
        now: BootTime,
    ) -> Option<AnswerResult> {
        let mut place = None;
        let message = self.buffers.answers.bytes(at);
        let releases = &self.releases;
        let has_room = releases.held().has_room(query.holder(), message.len());
        let now = (self.now, now);
        let answered = self.proxy.answer(&query, message, now, || {
            if !has_room {
                return Box::new(|_| {});
            }
            let key = releases.held().reserve();
            place = Some(key);
            let releases = Arc::clone(releases);
            Box::new(move |realised| releases.realised(key, realised))
        });
        let edns = answered.hop_by_hop.as_ref();
        let result = match (answered.decision, place) {
            (AnswerDecision::Hold, Some(key)) => {
                let upstream = &mut self.upstream;
                let answer = HeldAnswer {
                    query: query.map_question(|question| upstream.recycle(question)),
                    message: without_keepalive(self.buffers.answers.bytes(at), edns),
                    since: self.now,
                };
                self.releases.held().hold(key, answer);
                self.proxy.observer().held();
                return None;
            }
            (AnswerDecision::Malformed, _) => {
                self.fail(&mut query, Failure::Malformed);
                self.upstream.recycle(query.question);
                return None;
            }
            (AnswerDecision::Release(result), place) => {
                if let Some(key) = place {
                    self.releases.held().take(key);
                }
                result
            }
            (AnswerDecision::Hold, None) => AnswerResult::HeldFull,
        };
        let observer = self.proxy.observer();
        observer.released(&mut query, message, result, self.now);
        self.send_to_joined(at, &query, edns);
        let Arrival { client, server, .. } = query.from;
        self.upstream.recycle(query.question);
        if edns.is_some() {
            self.buffers.own = without_keepalive(self.buffers.answers.bytes(at), edns);
            self.send_own(server, client);
            return None;
        }
        Some(result)
    }

    /// Sends an answer to the clients whose queries joined the query that was sent.
    #[inline]
    fn send_to_joined(&mut self, at: usize, query: &PendingQuery<Vec<u8>>, edns: Option<&Edns>) {
        for Joined { client, header, .. } in &query.joined {
            self.buffers.own = without_keepalive(self.buffers.answers.bytes(at), edns);
            set_id(&mut self.buffers.own, header.id);
            self.send_own(query.from.server, *client);
        }
    }

    /// Releases held answers whose result has arrived.
    pub(super) fn release_realised(&mut self) {
        let mut realised = std::mem::take(&mut self.buffers.realised);
        self.control.take_realised(&mut realised);
        for (key, realised) in realised.drain(..) {
            self.releases.release_realised(key, realised, self.now);
        }
        self.buffers.realised = realised;
    }

    /// Releases held answers whose time is over.
    pub(super) fn release_late(&mut self) {
        loop {
            let late = self.releases.held().expired(self.now);
            let Some(answer) = late else { break };
            self.releases.release(answer, AnswerResult::Late, self.now);
        }
    }
}

/// A copy of an answer. `edns` is its OPT record, if it carries an option that must not be passed on.
#[inline]
fn without_keepalive(message: &[u8], edns: Option<&Edns>) -> Vec<u8> {
    let mut bytes = message.to_vec();
    if let Some(edns) = edns {
        edns.strip_keepalive(&mut bytes);
    }
    bytes
}
