//! For tests: relays and agents that talk over loopback. A relay here has no watches: the test gives it the objects.

use std::{sync::Arc, time::Duration};

use agent_core::{
    high_scale::scope::PodScope,
    policy::source::cluster::{Batch, ClusterDocuments, Seen},
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    bounds::Bounds,
    connections::Connections,
    credentials::Credentials,
    follow::Follower,
    record::{self, Item},
    renewal,
    serve::Shared,
};
use crate::{
    health::ClusterHealth,
    relay_settings::{RelaySettings, TlsFiles},
    resource::RESOURCES,
};

/// Time between two reads of the certificates' files.
const RENEWAL: Duration = Duration::from_millis(20);

/// A certificate authority that signs the certificates of relays and agents.
pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// Authority, certificate and key of one side, as the files of a Secret.
    pub(super) fn issue(&self) -> [(&'static str, String); 3] {
        let params = CertificateParams::new(vec!["holdfast-relay".to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        [
            ("ca.crt", self.0.pem()),
            ("tls.crt", certificate.pem()),
            ("tls.key", key.serialize_pem()),
        ]
    }
}

/// A Secret as the kubelet mounts it: files that are links through a link, which is replaced.
pub(super) struct Secret {
    directory: tempfile::TempDir,
    versions: u32,
}

impl Secret {
    pub(super) fn new(content: &[(&str, String)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, _) in content {
            let link = directory.path().join(name);
            std::os::unix::fs::symlink(format!("..data/{name}"), link).unwrap();
        }
        let mut secret = Self {
            directory,
            versions: 0,
        };
        secret.replace(content);
        secret
    }

    /// All files change at once.
    pub(super) fn replace(&mut self, content: &[(&str, String)]) {
        self.versions += 1;
        let (path, version) = (self.directory.path(), format!("..{}", self.versions));
        std::fs::create_dir(path.join(&version)).unwrap();
        for (name, text) in content {
            std::fs::write(path.join(&version).join(name), text).unwrap();
        }
        std::os::unix::fs::symlink(&version, path.join("..data_tmp")).unwrap();
        std::fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
    }

    pub(super) fn files(&self) -> TlsFiles {
        let file = |name: &str| self.directory.path().join(name);
        TlsFiles {
            authority: file("ca.crt"),
            certificate: file("tls.crt"),
            key: file("tls.key"),
        }
    }
}

/// A relay that gets its objects from the test.
pub(super) struct Relay {
    pub(super) shared: Arc<Shared>,
    pub(super) address: String,
    pub(super) stop: CancellationToken,
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

pub(super) fn change(n: u32, label: &str) -> Vec<Batch<Item>> {
    vec![Batch {
        kind: "Pod",
        seen: vec![put(n, label)],
    }]
}

/// Starts a relay without TLS on the address `at`.
pub(super) async fn start(at: &str, bounds: Bounds, pods: &[(u32, String)]) -> Relay {
    start_with(at, bounds, pods, None).await
}

/// Starts a relay, with TLS if there are files.
pub(super) async fn start_with(
    at: &str,
    bounds: Bounds,
    pods: &[(u32, String)],
    files: Option<&TlsFiles>,
) -> Relay {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let health = ClusterHealth::new("server", RESOURCES);
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
    let current = files.map(|files| {
        let credentials = Credentials::load(files).unwrap();
        let (send, current) = watch::channel(Arc::new(credentials));
        let stale = shared.certificates.clone();
        let report = move |problem| stale.set(problem);
        let renewed = renewal::follow(files.clone(), send, report, RENEWAL, tasks.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(renewed));
        current
    });
    let connections = Connections::new(Arc::clone(&shared), current, tasks.clone(), stop.clone());
    tasks.spawn(connections.serve(listener));
    Relay {
        shared,
        address,
        stop,
    }
}

/// The agent's side of a connection to relays.
pub(super) struct Agent {
    pub(super) batches: mpsc::Receiver<Batch>,
    pub(super) documents: ClusterDocuments,
    /// Listings that began since the start.
    pub(super) listings: usize,
    pub(super) health: ClusterHealth,
    _stop: tokio_util::sync::DropGuard,
}

/// Starts an agent that follows these relays without TLS.
pub(super) fn follow(addresses: &[&str]) -> Agent {
    follow_with(addresses, None)
}

/// Starts an agent, with TLS if there are files.
pub(super) fn follow_with(addresses: &[&str], files: Option<&TlsFiles>) -> Agent {
    let health = ClusterHealth::new("server", RESOURCES);
    let (send, batches) = mpsc::channel(8);
    let stop = CancellationToken::new();
    let follower = Follower {
        settings: RelaySettings {
            addresses: addresses.iter().map(|one| (*one).to_owned()).collect(),
            tls: files.cloned(),
            server_name: "holdfast-relay".to_owned(),
        },
        node: "n1".to_owned(),
        health: health.clone(),
        send,
        resources: RESOURCES,
        has_service_blocks: false,
        pods: PodScope::All,
        tasks: TaskTracker::new(),
        renewal: RENEWAL,
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
    /// Takes batches until there are this many pods.
    pub(super) async fn until_pods(&mut self, pods: usize) {
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

    pub(super) async fn until_reason(&self, text: &str) {
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
    pub(super) async fn until_fresh(&mut self) {
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

    pub(super) fn take(&mut self, batch: Batch) {
        let listings = batch
            .seen
            .iter()
            .filter(|seen| matches!(seen, Seen::Listing));
        self.listings += listings.count();
        self.documents.take(batch);
    }
}

pub(super) fn pods(count: u32) -> Vec<(u32, String)> {
    (0..count).map(|n| (n, "web".to_owned())).collect()
}
