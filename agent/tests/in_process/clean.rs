//! A cleaning of thousands of leased names.

use agent_core::core::{
    Event,
    event::{CleanNames, RevokeAck},
};
use holdfast_agent::proxies::{StreamKind, ToStream};
use polling::until_awaited;
use tokio::time::timeout;

use crate::lab::{Lab, TEST_TIMEOUT, mapping};

/// Number of leased names, more than the mailbox of a stream can hold.
const NAMES: u16 = 5_000;

#[tokio::test]
async fn a_large_cleaning_closes_no_stream_and_ends_when_all_gave_their_leases_back() {
    let lab = Lab::start_synced().await;
    let endpoint = lab.endpoint().await;
    let mut native = lab.mappings().await;
    let (builtin, mut messages) = lab
        .proxies
        .open_results(StreamKind::Builtin, "builtin", None);
    let up = Event::StreamUp(builtin.id());
    lab.core.send(up).await.unwrap();
    let names = (0..NAMES).map(|n| {
        let [high, low] = n.to_be_bytes();
        let (sequence, name) = (u64::from(n) + 1, format!("n{n}.example.com."));
        mapping(endpoint, sequence, &name, [198, 18, high, low])
    });
    native.send(names.collect()).await;
    assert!(native.result(NAMES.into()).await.realised);

    let clean = Event::CleanNames(CleanNames::default());
    lab.core.send(clean).await.unwrap();
    // No stream has received anything yet, and all revocations are published.
    let pending = lab.core.inspect(|core| core.unrevoked(None).len()).await;
    assert_eq!(pending, Ok(usize::from(NAMES)));
    assert_eq!(lab.proxies.closed_slow(), 0, "a stream was closed");

    let stream = builtin.id();
    let mut acks = Vec::new();
    while acks.len() < usize::from(NAMES) {
        let message = timeout(TEST_TIMEOUT, messages.recv()).await.unwrap();
        if let ToStream::Revoke(revocations) = message.expect("the stream is open") {
            let revoked = revocations.iter();
            acks.extend(revoked.map(|one| RevokeAck { stream, id: one.id }));
        }
    }
    lab.core.send(Event::RevokeAcked(acks)).await.unwrap();
    for _ in 0..NAMES {
        native.give_back().await;
    }
    let leased = async || lab.core.inspect(|core| core.unrevoked(None).len()).await;
    let none_left = until_awaited("no lease is left", leased, |leased| *leased == Ok(0));
    none_left.await.unwrap();
    assert_eq!(lab.proxies.closed_slow(), 0);
    assert!(lab.core.snapshot().await.unwrap().names.is_empty());
}
