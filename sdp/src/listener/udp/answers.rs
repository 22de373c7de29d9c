//! A worker's way from servers back to clients.

use std::{io, sync::Arc};

use daemon::quota::Holder;
use dns_policy::boot_time::BootTime;

use super::{BATCH, ROUNDS, Worker, listener_for};
use crate::{
    arena::Key,
    listener::held::HeldAnswer,
    proxy::{
        Fate,
        stats::{AnswerResult, Label as _, Stage},
    },
    query_log::End,
    socket::sys::RecvBatch,
    upstream::udp::{Flight, Joined},
    wire::{Rcode, set_id},
};

impl Worker {
    /// Takes answers from an upstream socket and releases or holds them.
    pub(super) fn answers(&mut self, socket: Key) {
        for _ in 0..ROUNDS {
            let Some(fd) = self.upstream.fd(socket) else {
                return;
            };
            let received = match self.answers.recv(fd) {
                Ok(received) => received,
                // An ICMP error: reading it took it away, and the others wait on.
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(_) => return,
            };
            self.taken += received;
            let now = BootTime::now();
            let mut released = std::mem::take(&mut self.released);
            let mut server = None;
            for at in 0..received {
                let Some(mut flight) = self.upstream.answered(socket, self.answers.bytes(at))
                else {
                    self.proxy.stats().answers.inc(AnswerResult::Unexpected);
                    continue;
                };
                if self.answer(at, &mut flight, now) {
                    released.push((at, flight.client));
                    server = Some(flight.server);
                }
                self.upstream.recycle(flight);
            }
            if let Some(server) = server {
                let answers = released.iter();
                let answers = answers.map(|(at, client)| (self.answers.bytes(*at), *client));
                let listener = listener_for(&self.listeners, server);
                let unsent = self.replies.send(server, answers, listener, self.now);
                self.count_unsent(released.len(), unsent);
            }
            released.clear();
            self.released = released;
            self.proxy.sink().push();
            if received < BATCH {
                return;
            }
        }
    }

    /// Takes in one answer. Whether it is to be sent now, as it lies in the batch.
    fn answer(&mut self, at: usize, flight: &mut Flight, now: BootTime) -> bool {
        let stats = self.proxy.stats();
        stats.in_flight.down();
        let took = self.now.duration_since(flight.sent_at);
        stats.stages.observe(Stage::Upstream, took);
        set_id(self.answers.bytes_mut(at), flight.kept.id);
        // Of before the sink is asked: what changes while it decides counts.
        let version = self.proxy.sink().leases_version();
        let message = self.answers.bytes(at);
        let print = self.repeats.print(flight.endpoint, flight.server, message);
        let is_repeat = flight.joined.is_empty() && self.repeats.is_leased(print, version, now);
        if is_repeat && !self.proxy.wants_notice() {
            stats.answers.inc(AnswerResult::Released);
            stats.stages.observe(Stage::Total, took);
            self.log_sent(at, flight, AnswerResult::Released);
            return true;
        }
        let to_send = self.learn(at, flight, now);
        if to_send == Some(AnswerResult::Released) {
            self.repeats.leased(print, version, now);
        }
        to_send.is_some()
    }

    /// Learns from one answer. How it was counted, if it is to be sent now as it lies in the batch.
    fn learn(&mut self, at: usize, flight: &mut Flight, now: BootTime) -> Option<AnswerResult> {
        let asked = flight.asked(flight.client, self.now);
        let mut place = None;
        let holder = Holder::from(flight.endpoint);
        let length = self.answers.bytes(at).len();
        let releases = &self.releases;
        let has_room = releases.held().has_room(holder, length);
        let answered = self.proxy.answer(&asked, self.answers.bytes(at), now, || {
            if !has_room {
                return Box::new(|_| {});
            }
            let key = releases.held().reserve();
            place = Some(key);
            let releases = Arc::clone(releases);
            Box::new(move |realised| releases.realised(key, realised))
        });
        for joined in &flight.joined {
            let asked = flight.asked(joined.client, self.now);
            self.proxy.notice_joined(&asked, self.answers.bytes(at));
        }
        let copy = |recv: &RecvBatch| {
            let mut bytes = recv.bytes(at).to_vec();
            if let Some(edns) = &answered.hop_by_hop {
                edns.strip_keepalive(&mut bytes);
            }
            bytes
        };
        let result = match (answered.fate, place) {
            (Fate::Hold, Some(key)) => {
                let bytes = copy(&self.answers);
                let Flight { client, server, .. } = *flight;
                let joined = flight.joined.clone();
                self.releases.held().hold(
                    key,
                    HeldAnswer {
                        holder,
                        bytes,
                        client,
                        server,
                        joined,
                        logged: std::mem::take(&mut flight.logged),
                        asked: flight.sent_at,
                        since: self.now,
                    },
                );
                self.proxy.stats().held.up();
                return None;
            }
            (Fate::Malformed, _) => {
                self.proxy.stats().answers.inc(AnswerResult::Malformed);
                self.servfail(flight);
                let result = AnswerResult::Malformed.text();
                self.log(&mut flight.logged, End::own(result, Rcode::ServFail));
                return None;
            }
            (Fate::Release(result), place) => {
                if let Some(key) = place {
                    self.releases.held().take(key);
                }
                result
            }
            (Fate::Hold, None) => AnswerResult::HeldFull,
        };
        let answers = u64::try_from(1 + flight.joined.len()).unwrap_or(1);
        let stats = self.proxy.stats();
        stats.answers.add(result, answers);
        let took = self.now.duration_since(flight.sent_at);
        stats.stages.observe(Stage::Total, took);
        self.log_sent(at, flight, result);
        for Joined { client, kept } in &flight.joined {
            self.own = copy(&self.answers);
            set_id(&mut self.own, kept.id);
            self.send_own(flight.server, *client);
        }
        if answered.hop_by_hop.is_some() {
            self.own = copy(&self.answers);
            self.send_own(flight.server, flight.client);
            return None;
        }
        Some(result)
    }

    /// Ends the query log's entries of an answer that is released as it lies in the batch.
    fn log_sent(&self, at: usize, flight: &mut Flight, result: AnswerResult) {
        if !flight.logged.is_empty() {
            let end = End::sent(result.text(), self.answers.bytes(at));
            self.log(&mut flight.logged, end);
        }
    }

    /// Releases held answers whose fate has become known.
    pub(super) fn release_realised(&mut self) {
        let mut realised = std::mem::take(&mut self.realised);
        self.control.take_realised(&mut realised);
        for (key, realised) in realised.drain(..) {
            self.releases.release_realised(key, realised, self.now);
        }
        self.realised = realised;
    }

    /// Releases held answers that may wait no longer.
    pub(super) fn release_late(&mut self) {
        loop {
            let late = self.releases.held().expired(self.now);
            let Some(answer) = late else { break };
            self.releases.release(answer, AnswerResult::Late, self.now);
        }
    }
}
