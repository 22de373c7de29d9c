//! A relay and agents, over loopback.

use std::{sync::atomic::Ordering, time::Duration};

use fqdn_proto::relay::{FollowRequest, Frame, cluster_relay_client::ClusterRelayClient};
use tonic::transport::Endpoint;

use super::*;
use crate::relay::lab::{Relay, change, follow, pods, start};
use crate::resource::RESOURCES;

#[tokio::test]
async fn an_agent_follows_a_relay_through_its_restart_with_one_more_listing() {
    let relay = start("127.0.0.1:0", Bounds::agents(9), &pods(3)).await;
    let mut agent = follow(&[&relay.address]);
    agent.until_pods(3).await;
    agent.until_fresh().await;
    assert!(
        agent
            .health
            .view()
            .relay
            .unwrap()
            .starts_with(&relay.address)
    );
    relay.shared.take(change(3, "web"));
    agent.until_pods(4).await;
    let address = relay.address.clone();
    drop(relay);
    agent.until_reason(&format!("relay {address}: ")).await;
    assert_eq!(agent.documents.count("Pod"), 4);
    assert_eq!(agent.listings, RESOURCES.len());
    let relay = start(&address, Bounds::agents(9), &pods(6)).await;
    agent.until_pods(6).await;
    agent.until_fresh().await;
    assert_eq!(agent.listings, 2 * RESOURCES.len());
    drop(relay);
}

#[tokio::test]
async fn the_next_relay_takes_over() {
    let first = start("127.0.0.1:0", Bounds::agents(9), &pods(2)).await;
    let second = start("127.0.0.1:0", Bounds::agents(9), &pods(2)).await;
    let mut agent = follow(&[&first.address, &second.address]);
    agent.until_pods(2).await;
    let of_first = agent
        .health
        .view()
        .relay
        .unwrap()
        .starts_with(&first.address);
    let (used, other) = if of_first {
        (first, second)
    } else {
        (second, first)
    };
    drop(used);
    other.shared.take(change(2, "web"));
    agent.until_pods(3).await;
}

#[tokio::test]
async fn a_relay_that_is_stale_says_since_when_and_its_agents_show_it() {
    let relay = start("127.0.0.1:0", Bounds::agents(9), &pods(1)).await;
    let resource = RESOURCES.iter().find(|one| one.kind == "Pod").unwrap();
    let hour = Duration::from_secs(3600);
    relay
        .shared
        .health
        .set_stale_for(resource, hour, "the server is away".to_owned());
    let mut agent = follow(&[&relay.address]);
    agent.until_pods(1).await;
    agent.until_reason("the server is away").await;
    let watches = agent.health.watches();
    let pod = watches.iter().find(|watch| watch.kind == "Pod").unwrap();
    assert!(pod.stale_seconds >= 3600, "{pod:?}");
    assert!(
        watches
            .iter()
            .filter(|watch| watch.reason.is_some())
            .count()
            == 1
    );
}

#[tokio::test]
async fn a_relay_that_has_not_read_everything_or_is_full_says_so() {
    let relay = start("127.0.0.1:0", Bounds::agents(1), &pods(1)).await;
    let mut first = follow(&[&relay.address]);
    first.until_pods(1).await;
    let mut second = follow(&[&relay.address]);
    second
        .until_reason("serves 1 agents already; add a relay")
        .await;
    // The relay has room again once the first agent is gone.
    drop(first);
    second.until_fresh().await;

    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let health = ClusterHealth::new("server", RESOURCES);
    let shared = Shared::new("e".to_owned(), Bounds::agents(1), health, tasks, stop);
    shared
        .health
        .set_stale(&RESOURCES[0], "403: forbidden".to_owned());
    let refused = Service(Arc::new(shared)).follow(Request::new(FollowRequest::default()));
    let refused = refused.err().unwrap().message().to_owned();
    assert!(refused.starts_with("the relay is not ready: "), "{refused}");
}

/// A stream whose frames are not read yet.
async fn idle(relay: &Relay) -> tonic::Streaming<Frame> {
    let url = format!("http://{}", relay.address);
    let endpoint = Endpoint::from_shared(url).unwrap();
    let endpoint = endpoint.initial_stream_window_size(65_535);
    let client = ClusterRelayClient::new(endpoint.connect().await.unwrap());
    let mut client = client.max_decoding_message_size(64 << 20);
    client
        .follow(FollowRequest::default())
        .await
        .unwrap()
        .into_inner()
}

#[tokio::test]
async fn an_agent_that_does_not_read_is_cut_off_and_holds_up_no_other() {
    let bounds = Bounds {
        slow: Duration::from_secs(2),
        ..Bounds::agents(9)
    };
    let relay = start("127.0.0.1:0", bounds, &pods(9000)).await;
    let mut slow = idle(&relay).await;
    let mut agent = follow(&[&relay.address]);
    agent.until_pods(9000).await;
    // These are more bytes than the idle connection takes. The other agent is not held up meanwhile.
    relay
        .shared
        .take((0..9000).flat_map(|n| change(n, "another")).collect());
    relay.shared.take(change(9000, "web"));
    agent.until_pods(9001).await;
    let cut = async || relay.shared.counters.cut.load(Ordering::Relaxed);
    polling::until_awaited("it is cut off", cut, |cut| *cut > 0).await;
    let ended = loop {
        match slow.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("no reason"),
            Err(status) => break status,
        }
    };
    assert!(ended.message().contains("reads too slowly"), "{ended:?}");
    // The slow agent comes back, and gets everything.
    let mut back = follow(&[&relay.address]);
    back.until_pods(9001).await;
}
