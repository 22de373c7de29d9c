//! A client that sends without pause and receives nothing. Its messages wait in its own buffers and
//! not in the agent, and other clients are served.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use fqdn_proto::native::MappingRefusal;
use polling::{until, until_async};
use tokio::{sync::oneshot, time::timeout};
use tokio_util::task::TaskTracker;

use crate::lab::{Lab, TEST_TIMEOUT, mapping};

/// Mappings in each batch of the client.
const BATCH: usize = 4096;
/// Maximum number of batches that the agent's queue and the connection's buffers may hold. If only events were
/// counted, more than a thousand would fit into the queue.
const HELD: usize = 32;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_waits_at_its_sender_and_stalls_no_other_client() {
    let lab = Lab::start_synced().await;
    let endpoint = lab.endpoint().await;
    let mut good = lab.mappings().await;
    let bad = lab.mappings().await;
    let sent = Arc::new(AtomicUsize::new(0));
    let tasks = TaskTracker::new();
    let shared = Arc::clone(&lab.datapath.memory);
    let (locked, is_locked) = oneshot::channel();
    let stalled = tasks.spawn_blocking({
        let (core, stop) = (lab.core.clone(), lab.stop.clone());
        move || {
            let _maps = shared.lock();
            locked.send(()).unwrap();
            let full_or_stopped = || core.is_full() || stop.is_cancelled();
            until("the core's queue is full", full_or_stopped, |is| *is);
        }
    });
    is_locked.await.unwrap();
    // The core waits for its maps: the queue fills.
    good.send(vec![mapping(
        endpoint,
        1,
        "good1.example.com.",
        [192, 0, 2, 9],
    )])
    .await;
    tasks.spawn({
        let (sent, stop) = (Arc::clone(&sent), lab.stop.clone());
        async move {
            let flood = async {
                for sequence in 1.. {
                    let one = mapping(999, sequence, "www.example.com.", [192, 0, 2, 1]);
                    if !bad.offer(vec![one; BATCH]).await {
                        return;
                    }
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            };
            tokio::select! {
                () = flood => {}
                () = stop.cancelled() => {}
            }
        }
    });
    timeout(TEST_TIMEOUT, stalled)
        .await
        .expect("it is full")
        .unwrap();
    let held = sent.load(Ordering::Relaxed);
    assert!(held <= HELD, "{held} batches were taken by a stalled agent");

    for sequence in 1..=5 {
        let result = good.result(sequence).await;
        assert_eq!(result.refusal, i32::from(MappingRefusal::Unspecified));
        let (sequence, name) = (sequence + 1, "more.example.com.");
        good.send(vec![mapping(endpoint, sequence, name, [192, 0, 2, 9])])
            .await;
    }
    lab.stop.cancel();
    tasks.close();
    tasks.wait().await;
}

#[tokio::test]
async fn malformed_mappings_are_refused_and_counted() {
    let lab = Lab::start_synced().await;
    let mut stream = lab.mappings().await;
    let mut nonsense = mapping(lab.endpoint().await, 1, "www.example.com.", [192, 0, 2, 9]);
    nonsense.addresses = vec![vec![1, 2, 3]];
    stream.send(vec![nonsense]).await;
    let result = stream.result(1).await;
    assert_eq!(result.refusal, i32::from(MappingRefusal::Invalid));
    assert_eq!(lab.proxies.unreadable(), 1);
}

#[tokio::test]
async fn streams_without_end_are_turned_away() {
    let lab = Lab::start_synced().await;
    let mut streams = Vec::new();
    let refused = loop {
        assert!(streams.len() < 1000, "no bound");
        match lab.try_mappings().await {
            Ok(stream) => streams.push(stream),
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    // One process leaves room for others.
    assert!(streams.len() <= 128, "{} streams", streams.len());
    streams.pop();
    let (proxies, left) = (lab.proxies.clone(), streams.len());
    until_async(
        "a place for a stream is free",
        || proxies.views().len(),
        |views| *views <= left,
    )
    .await;
    lab.mappings().await;
}
