//! A relay and agents, over loopback.

use fqdn_proto::relay::{Frame, cluster_relay_client::ClusterRelayClient};
use serde_json::json;
use tokio::net::TcpListener;
use tonic::transport::Endpoint;

use super::*;
use crate::{
    policy::source::cluster::{ClusterDocuments, Seen},
    relay::{connections::Connections, follow::Follower, record, settings::RelaySettings},
};

/// A relay whose watches are the test.
struct Relay {
    shared: Arc<Shared>,
    address: String,
    stop: CancellationToken,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn list(kind: &'static str, pods: &[(u32, String)]) -> Batch<Item> {
    let puts = pods.iter().map(|(n, label)| put(*n, label));
    let begin = std::iter::once(Seen::Listing);
    Batch {
        kind,
        seen: begin.chain(puts).chain([Seen::Listed]).collect(),
    }
}

fn put(n: u32, label: &str) -> Seen<Item> {
    let object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("p{n}"), "namespace": "shop", "labels": {"app": label}},
        "status": {"podIP": format!("10.{}.{}.1", n / 250, n % 250 + 1)},
    });
    let key = format!("Pod/shop/p{n}");
    Seen::Put {
        digest: (u64::from(n) << 32) + u64::try_from(label.len()).unwrap(),
        document: record::read(&object, &key),
        key,
        is_marked: false,
        json: None,
    }
}

fn change(n: u32, label: &str) -> Vec<Batch<Item>> {
    vec![Batch {
        kind: "Pod",
        seen: vec![put(n, label)],
    }]
}

async fn start(at: &str, bounds: Bounds, pods: &[(u32, String)]) -> Relay {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let health = ClusterHealth::new("server");
    for resource in RESOURCES {
        health.set_fresh(resource);
    }
    let listener = TcpListener::bind(at).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let epoch = format!("of {address} {:?}", std::time::Instant::now());
    let shared = Shared::new(epoch, bounds, health, tasks.clone(), stop.clone());
    let shared = Arc::new(shared);
    let all = RESOURCES.iter().map(|resource| match resource.kind {
        "Pod" => list("Pod", pods),
        kind => list(kind, &[]),
    });
    shared.take(all.collect());
    let connections = Connections::new(Arc::clone(&shared), None, tasks.clone(), stop.clone());
    tasks.spawn(connections.serve(listener));
    Relay {
        shared,
        address,
        stop,
    }
}

/// An agent's side.
struct Agent {
    batches: mpsc::Receiver<Batch>,
    documents: ClusterDocuments,
    /// What came, in short.
    listings: usize,
    health: ClusterHealth,
    _stop: tokio_util::sync::DropGuard,
}

fn follow(addresses: &[&str]) -> Agent {
    let health = ClusterHealth::new("server");
    let (send, batches) = mpsc::channel(8);
    let stop = CancellationToken::new();
    let follower = Follower {
        settings: RelaySettings {
            addresses: addresses.iter().map(|one| (*one).to_owned()).collect(),
            tls: None,
            server_name: "relay".to_owned(),
        },
        node: "n1".to_owned(),
        health: health.clone(),
        send,
        has_service_blocks: false,
        tasks: TaskTracker::new(),
    };
    TaskTracker::new().spawn(follower.run(stop.clone()));
    Agent {
        batches,
        documents: ClusterDocuments::new(RESOURCES.iter().map(|one| one.kind)),
        listings: 0,
        health,
        _stop: stop.drop_guard(),
    }
}

impl Agent {
    /// Takes batches until there are so many pods.
    async fn until_pods(&mut self, pods: usize) {
        let take = async {
            while self.documents.count("Pod") != pods || !self.documents.is_complete() {
                let batch = self.batches.recv().await.unwrap();
                self.take(batch);
            }
        };
        let taken = tokio::time::timeout(Duration::from_secs(60), take).await;
        let count = self.documents.count("Pod");
        assert!(
            taken.is_ok(),
            "{count} pods, not {pods}: {:?}",
            self.health.view()
        );
    }

    async fn until_reason(&self, text: &str) {
        let reasons = async || {
            let watches = self.health.watches().into_iter();
            watches.filter_map(|watch| watch.reason).collect::<Vec<_>>()
        };
        polling::until_awaited(text, reasons, |reasons| {
            reasons.iter().any(|reason| reason.contains(text))
        })
        .await;
    }

    /// Takes batches until nothing is stale.
    async fn until_fresh(&mut self) {
        let is_fresh = |health: &ClusterHealth| {
            let watches = health.watches();
            watches.iter().all(|watch| watch.reason.is_none())
        };
        let take = async {
            while !is_fresh(&self.health) {
                let next = tokio::time::timeout(Duration::from_millis(10), self.batches.recv());
                if let Ok(Some(batch)) = next.await {
                    self.take(batch);
                }
            }
        };
        let taken = tokio::time::timeout(Duration::from_secs(60), take).await;
        assert!(taken.is_ok(), "{:?}", self.health.view());
        while let Ok(batch) = self.batches.try_recv() {
            self.take(batch);
        }
    }

    fn take(&mut self, batch: Batch) {
        let listings = batch
            .seen
            .iter()
            .filter(|seen| matches!(seen, Seen::Listing));
        self.listings += listings.count();
        self.documents.take(batch);
    }
}

fn pods(count: u32) -> Vec<(u32, String)> {
    (0..count).map(|n| (n, "web".to_owned())).collect()
}

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
    // It has room again once the first one is gone.
    drop(first);
    second.until_fresh().await;

    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let health = ClusterHealth::new("server");
    let shared = Shared::new("e".to_owned(), Bounds::agents(1), health, tasks, stop);
    shared
        .health
        .set_stale(&RESOURCES[0], "403: forbidden".to_owned());
    let refused = Service(Arc::new(shared)).follow(Request::new(FollowRequest::default()));
    let refused = refused.unwrap_err().message().to_owned();
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
    // More than its connection takes. The other one is not held up meanwhile.
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
    // It comes back, and gets everything.
    let mut back = follow(&[&relay.address]);
    back.until_pods(9001).await;
}
