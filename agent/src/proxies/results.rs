//! What one mapping stream is owed: bounded in messages and in results.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::mpsc;

use super::ToStream;

/// Maximum messages that wait for one mapping stream.
pub(super) const STREAM_QUEUE: usize = 1024;
/// Maximum results and revocations in these messages, about 15 MiB; then no further one is taken. Files of several
/// endpoints may make as many mappings durable at once. One message may hold more, because a cleaning revokes all the
/// names that the core has.
pub(super) const STREAM_RESULTS: usize = 262_144;

/// The core's end; never waits.
#[derive(Debug)]
pub(super) struct Mailbox {
    sender: mpsc::Sender<ToStream>,
    waiting: Arc<AtomicUsize>,
}

/// Receiving end of a mapping stream's queue.
#[derive(Debug)]
pub struct Results {
    receiver: mpsc::Receiver<ToStream>,
    waiting: Arc<AtomicUsize>,
}

pub(super) fn mailbox() -> (Mailbox, Results) {
    let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
    let waiting = Arc::new(AtomicUsize::new(0));
    let results = Results {
        receiver,
        waiting: Arc::clone(&waiting),
    };
    (Mailbox { sender, waiting }, results)
}

impl Mailbox {
    /// Queues a message. Returns false if the stream has fetched too little, or is gone.
    pub(super) fn put(&self, message: ToStream) -> bool {
        let number = results_in(&message);
        let waiting = self.waiting.fetch_add(number, Ordering::Relaxed);
        waiting < STREAM_RESULTS && self.sender.try_send(message).is_ok()
    }
}

impl Results {
    /// The next message; `None` once the stream has to end.
    pub async fn recv(&mut self) -> Option<ToStream> {
        let message = self.receiver.recv().await?;
        self.waiting
            .fetch_sub(results_in(&message), Ordering::Relaxed);
        Some(message)
    }
}

fn results_in(message: &ToStream) -> usize {
    match message {
        ToStream::Results(results) => results.len(),
        ToStream::Revoke(revocations) => revocations.len(),
    }
}

#[cfg(test)]
mod tests {
    use dns_policy::{mapping::Realised, name::Fqdn};

    use super::*;
    use agent_core::core::event::{MappingResult, Revocation, StreamId};

    #[tokio::test]
    async fn results_are_bounded_however_few_messages_they_come_in() {
        let result = MappingResult {
            stream: StreamId(1),
            sequence: 1,
            realised: Realised::Yes,
            durable: false,
            lease_end: None,
            revision: 1,
        };
        let half = ToStream::Results(vec![result; STREAM_RESULTS / 2]);
        let (mailbox, mut results) = mailbox();
        assert!(mailbox.put(half.clone()) && mailbox.put(half.clone()));
        results.recv().await.unwrap();
        assert!(mailbox.put(half.clone()), "there is room again");
        assert!(!mailbox.put(half));
    }

    #[tokio::test]
    async fn a_cleaning_of_any_number_of_names_is_accepted() {
        let revocation = Arc::new(Revocation {
            id: 1,
            streams: Vec::new(),
            name: Fqdn::normalise("foo.com"),
            addresses: Vec::new(),
        });
        let cleaning = ToStream::Revoke(vec![revocation; STREAM_RESULTS + 1]);
        let (mailbox, mut results) = mailbox();
        assert!(mailbox.put(cleaning.clone()));
        assert!(!mailbox.put(cleaning.clone()), "it is not fetched");
        assert_eq!(results.recv().await, Some(cleaning));
    }
}
