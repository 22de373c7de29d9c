//! The answers that a worker holds, and their release by any thread. While the worker sleeps, the
//! thread that receives the result releases the answer, because waking the worker takes longer than
//! sending.

use std::{net::SocketAddr, os::fd::OwnedFd, sync::Arc, time::Instant};

use dns_policy::mapping::Realised;
use dns_wire::set_id;
use parking_lot::{Mutex, MutexGuard};

use super::{SocketOptions, control::Control, held::HeldAnswers, reply_sender::ReplySender};
use crate::{arena::Key, proxy::Proxy, query::pending::HeldAnswer, stats::AnswerResult};

/// The held answers of one worker, with the sockets through which any thread can release them.
pub(super) struct Releases {
    proxy: Arc<Proxy>,
    control: Arc<Control>,
    held: Mutex<HeldAnswers>,
    /// Separate from the worker's own sockets, which are never locked.
    out: Mutex<ReplySender>,
    /// Sockets that receive queries. The flag of each tells whether it is for IPv6.
    listeners: Vec<(Arc<OwnedFd>, bool)>,
}

impl Releases {
    pub(super) fn new(
        proxy: Arc<Proxy>,
        control: Arc<Control>,
        options: SocketOptions,
        listeners: Vec<(Arc<OwnedFd>, bool)>,
    ) -> Self {
        Self {
            held: Mutex::new(HeldAnswers::new(proxy.config().max_delay)),
            out: Mutex::new(ReplySender::new(options)),
            proxy,
            control,
            listeners,
        }
    }

    pub(super) fn held(&self) -> MutexGuard<'_, HeldAnswers> {
        self.held.lock()
    }

    /// Takes the result for a held answer.
    pub(super) fn realised(&self, key: Key, realised: Realised) {
        // An awake worker handles several results at once, and may still be holding the answer.
        if self.control.is_asleep() {
            self.release_realised(key, realised, Instant::now());
        } else {
            self.control.realised(key, realised);
        }
    }

    /// Releases a held answer that has its result, unless it was released before.
    pub(super) fn release_realised(&self, key: Key, realised: Realised, now: Instant) {
        let taken = self.held().take(key);
        if let Some(mut answer) = taken {
            let result = answer.settle(realised);
            self.release(answer, result, now);
        }
    }

    /// Sends an answer that is no longer among the held ones.
    pub(super) fn release(&self, mut answer: HeldAnswer, result: AnswerResult, now: Instant) {
        self.proxy
            .observer()
            .released_held(&mut answer, result, now);
        let HeldAnswer { query, message, .. } = &mut answer;
        for (client, header) in query.recipients() {
            set_id(message, header.id);
            self.send(message, (query.from.server, client), now);
        }
    }

    fn send(&self, answer: &[u8], (server, client): (SocketAddr, SocketAddr), now: Instant) {
        let same = self.listeners.iter();
        let same = same.filter(|(_, ipv6)| *ipv6 == client.is_ipv6());
        let Some((listener, _)) = same.chain(&self.listeners).next() else {
            return;
        };
        let one = std::iter::once((answer, client));
        let unsent = self.out.lock().send(server, one, listener, now);
        count_unsent(&self.proxy, 1, unsent);
    }
}

/// Counts the answers that could not be sent: all `wanted` answers if the whole call failed.
pub(super) fn count_unsent(
    proxy: &Proxy,
    wanted: usize,
    unsent: Result<usize, crate::socket::SocketError>,
) {
    let unsent = unsent.unwrap_or_else(|e| {
        tracing::warn!(error = %e, "cannot send answers to clients");
        wanted
    });
    if unsent > 0 {
        let unsent = u64::try_from(unsent).unwrap_or(u64::MAX);
        let answers = &proxy.stats().answers;
        answers.add(AnswerResult::SendFailed, unsent);
    }
}
