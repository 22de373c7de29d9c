//! An agent whose parts the tests can reach.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use agent_core::{
    core::{Core, CoreConfig, Event, Restored},
    datapath::{
        map_query::{MapEntries, MapQuery},
        memory::MemoryDatapath,
        plan::{Datapath, Step, StepError},
    },
    endpoint::spec::{EndpointSpec, PodInterface},
    policy::{document::PolicyDocument, parse::parse_documents},
    source_event::SourceEvent,
};
use agent_datapath::files::StateFiles;
use dns_policy::{boot_time::BootTime, epoch::Epoch};
use fqdn_proto::native::{
    EndpointInstance, FqdnMapping, LeaseRevokedAck, MappingBatch, MappingDown, MappingResult,
    MappingUp, fqdn_policy_client::FqdnPolicyClient, mapping_down, mapping_up,
};
use holdfast_agent::{
    grpc::{
        peer::{self, Allowed},
        server::{About, Native},
    },
    proxies::Proxies,
    restore::{self, Found},
    runner::{self, CoreHandle, CoreThread, Feeds},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::{net::UnixStream, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{
    Streaming,
    transport::{Channel, Endpoint, Uri},
};

/// Longest wait in these tests.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Policy of endpoints with the label `app=web`. They may query and reach `pattern`.
pub(crate) fn policy(pattern: &str) -> PolicyDocument {
    policy_with(pattern, &reaches(pattern))
}

/// A rule that opens the addresses of `pattern`.
pub(crate) fn reaches(pattern: &str) -> String {
    format!("toFQDNs: [{{matchPattern: \"{pattern}\"}}]")
}

/// The same endpoints may query `pattern`, and `rule` opens addresses.
pub(crate) fn policy_with(pattern: &str, rule: &str) -> PolicyDocument {
    let text = policy_text(pattern, rule);
    parse_documents(&text, "test").pop().unwrap().unwrap()
}

/// YAML of the document that [`policy_with`] parses.
pub(crate) fn policy_text(pattern: &str, rule: &str) -> String {
    format!(
        r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {{name: web}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
  egress:
  - toEntities: [world]
    toPorts:
    - ports: [{{port: "53", protocol: UDP}}]
      rules: {{dns: [{{matchPattern: "{pattern}"}}]}}
  - {rule}
"#
    )
}

/// An endpoint with the label `app=web`.
pub(crate) fn pod() -> EndpointSpec {
    EndpointSpec {
        key: "dir/pod.yaml".to_owned(),
        labels: vec!["k8s:app=web".to_owned()],
        interface: PodInterface {
            ifindex: 42,
            ifname: "lxc42".to_owned(),
            mac: [2, 0, 0, 0, 0, 2],
            node_mac: [2, 0, 0, 0, 0, 1],
            on_bridge: false,
            link: Default::default(),
        },
        addresses: vec![IpAddr::from([10, 0, 0, 2])],
        netns: "pod".to_owned(),
        pod: None,
        pod_uid: None,
    }
}

/// A datapath with maps that the test can read, and real files.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) memory: Arc<Mutex<MemoryDatapath>>,
    /// Each step, and whether the core's thread carried it out.
    pub(crate) steps: Arc<Mutex<Vec<(Step, bool)>>>,
    /// If set, a step outside of the core's thread panics.
    pub(crate) panics: Arc<AtomicBool>,
    files: StateFiles,
}

impl Datapath for Shared {
    fn apply(&mut self, step: &Step) -> Result<(), StepError> {
        let by_core = thread::current().name() == Some("core");
        self.steps.lock().push((step.clone(), by_core));
        let panics = self.panics.load(Ordering::Relaxed);
        assert!(by_core || !panics, "on purpose");
        if let Some(done) = self.files.carry_out(step) {
            done?;
        }
        self.memory.lock().apply(step)
    }

    fn read_entries(&mut self, query: &MapQuery) -> Result<MapEntries, StepError> {
        self.memory.lock().read_entries(query)
    }
}

/// An agent in this process, with a datapath in memory.
pub(crate) struct Lab {
    pub(crate) dir: Arc<TempDir>,
    pub(crate) core: CoreHandle,
    pub(crate) proxies: Proxies,
    pub(crate) epoch: Epoch,
    pub(crate) datapath: Shared,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    thread: CoreThread,
    socket: PathBuf,
}

impl Lab {
    /// A first start in an empty directory.
    pub(crate) fn start() -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        Self::start_in(dir, MemoryDatapath::default())
    }

    /// A first start with a policy by which the pod may query and reach `*.example.com`.
    pub(crate) async fn start_synced() -> Self {
        let lab = Self::start();
        lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
        lab
    }

    /// A start with the state of an earlier run in `dir` and in the maps.
    pub(crate) fn start_in(dir: Arc<TempDir>, memory: MemoryDatapath) -> Self {
        let files = StateFiles::open(&dir.path().join("state")).unwrap();
        let epoch = holdfast_agent::epoch::begin(files.dir()).unwrap();
        let restored = found(&files, &memory).restored;
        let config = CoreConfig {
            boot_id: epoch.boot_id.clone(),
            start: epoch.start,
            ..CoreConfig::default()
        };
        let datapath = Shared {
            memory: Arc::new(Mutex::new(memory)),
            steps: Arc::default(),
            panics: Arc::default(),
            files,
        };
        let proxies = Proxies::default();
        let core = Core::new(config, restored);
        let (core, thread) = runner::start(
            runner::channel(),
            core,
            Box::new(datapath.clone()),
            proxies.clone(),
            Feeds::default(),
        )
        .unwrap();
        let tasks = TaskTracker::new();
        let stop = CancellationToken::new();
        let socket = dir
            .path()
            .join("run")
            .join(format!("sdp-{}.sock", epoch.start));
        let listener = peer::bind(&socket, None).unwrap();
        let about = About {
            epoch: epoch.clone(),
            proxy_port: 10094,
            min_ttl: 0,
            state_dir: dir.path().to_owned(),
        };
        let native = Native::new(
            about,
            core.clone(),
            proxies.clone(),
            tasks.clone(),
            stop.clone(),
        );
        tasks.spawn(native.serve(listener, Allowed { group: None }));
        Self {
            dir,
            core,
            proxies,
            epoch,
            datapath,
            tasks,
            stop,
            thread,
            socket,
        }
    }

    /// Both sources send their contents.
    pub(crate) async fn sync(&self, policies: Vec<PolicyDocument>, endpoints: Vec<EndpointSpec>) {
        let policies = policies.into_iter().map(SourceEvent::Apply);
        for event in wrap(policies) {
            self.core.send(Event::Policies(event)).await.unwrap();
        }
        let endpoints = endpoints.into_iter().map(SourceEvent::Apply);
        for event in wrap(endpoints) {
            self.core.send(Event::Endpoints(event)).await.unwrap();
        }
    }

    /// Opens another connection to the native service.
    pub(crate) async fn connect(&self) -> FqdnPolicyClient<Channel> {
        connect_to(&self.socket).await
    }

    /// A mapping stream, past its first message.
    pub(crate) async fn mappings(&self) -> Mappings {
        self.try_mappings().await.unwrap()
    }

    /// A mapping stream, if the agent accepts it.
    pub(crate) async fn try_mappings(&self) -> Result<Mappings, tonic::Status> {
        let stream = Mappings::open(self.connect().await).await?;
        assert_eq!(stream.start, self.epoch.start);
        Ok(stream)
    }

    /// Number of the only endpoint.
    pub(crate) async fn endpoint(&self) -> u32 {
        u32::from(self.core.snapshot().await.unwrap().endpoints[0].id)
    }

    /// Stops everything. Returns the state for a restart.
    pub(crate) async fn stop(self) -> (Arc<TempDir>, MemoryDatapath) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.thread.stop().await;
        let memory = self.datapath.memory.lock().clone();
        (self.dir, memory)
    }
}

/// The state that a start reads from files and maps.
pub(crate) fn found(files: &StateFiles, memory: &MemoryDatapath) -> Found {
    let mut found = Found::default();
    restore::read_files(files, &mut found).unwrap();
    let policy_maps = memory.policy.iter();
    found.restored = Restored {
        now: BootTime::now(),
        ipcache: memory.ipcache.iter().map(|(k, v)| (*k, *v)).collect(),
        lxc: memory.lxc.iter().map(|(k, v)| (*k, *v)).collect(),
        policy_maps: policy_maps
            .map(|(id, map)| (*id, map.iter().map(|(k, v)| (*k, *v)).collect()))
            .collect(),
        interfaces: [pod().interface.ifindex].into(),
        ..found.restored
    };
    found
}

/// A new connection to the native service.
pub(crate) async fn connect_to(socket: &Path) -> FqdnPolicyClient<Channel> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://agent")
        .connect_with_connector(connector)
        .await
        .unwrap();
    FqdnPolicyClient::new(channel)
}

fn wrap<T>(events: impl Iterator<Item = SourceEvent<T>>) -> Vec<SourceEvent<T>> {
    std::iter::once(SourceEvent::Init)
        .chain(events)
        .chain(std::iter::once(SourceEvent::InitDone))
        .collect()
}

/// One mapping stream, as a proxy has it.
#[derive(Debug)]
pub(crate) struct Mappings {
    /// Which start of the agent serves it.
    pub(crate) start: u64,
    sender: mpsc::Sender<MappingUp>,
    answers: Streaming<MappingDown>,
}

impl Mappings {
    /// Opens a stream and reads its first message.
    pub(crate) async fn open(mut client: FqdnPolicyClient<Channel>) -> Result<Self, tonic::Status> {
        let (sender, requests) = mpsc::channel(16);
        let answer = client.update_mappings(ReceiverStream::new(requests));
        let mut answers = answer.await?.into_inner();
        let first = answers.message().await?.unwrap();
        let Some(mapping_down::Kind::Epoch(epoch)) = first.kind else {
            panic!("{first:?}");
        };
        Ok(Self {
            start: epoch.start,
            sender,
            answers,
        })
    }

    /// Sends one batch; panics if the stream is closed.
    pub(crate) async fn send(&self, mappings: Vec<FqdnMapping>) {
        assert!(self.offer(mappings).await);
    }

    /// Sends one batch; false if the stream is closed.
    pub(crate) async fn offer(&self, mappings: Vec<FqdnMapping>) -> bool {
        let kind = mapping_up::Kind::Batch(MappingBatch { mappings });
        let sent = self.sender.send(MappingUp { kind: Some(kind) });
        sent.await.is_ok()
    }

    /// The first result for `sequence`.
    pub(crate) async fn result(&mut self, sequence: u64) -> MappingResult {
        tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let message = self.answers.message().await.unwrap().unwrap();
                if let Some(mapping_down::Kind::Results(results)) = message.kind
                    && let Some(found) =
                        results.results.into_iter().find(|r| r.sequence == sequence)
                {
                    return found;
                }
            }
        })
        .await
        .unwrap()
    }

    /// Waits for a revocation and acknowledges it. Returns its name.
    pub(crate) async fn give_back(&mut self) -> String {
        let revoked = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let message = self.answers.message().await.unwrap().unwrap();
                if let Some(mapping_down::Kind::Revoked(revoked)) = message.kind {
                    return revoked;
                }
            }
        });
        let revoked = revoked.await.unwrap();
        let kind = mapping_up::Kind::RevokedAck(LeaseRevokedAck { id: revoked.id });
        let message = MappingUp { kind: Some(kind) };
        self.sender.send(message).await.unwrap();
        revoked.name
    }
}

/// An answer to the pod.
pub(crate) fn mapping(endpoint: u32, sequence: u64, name: &str, address: [u8; 4]) -> FqdnMapping {
    FqdnMapping {
        sequence,
        endpoint: Some(EndpointInstance {
            id: endpoint,
            client_ip: vec![10, 0, 0, 2],
            ifindex: 42,
        }),
        name: name.to_owned(),
        addresses: vec![address.to_vec()],
        ttl: 300,
        seen_at: BootTime::now().nanos(),
        server_ip: vec![9, 9, 9, 9],
        server_port: 53,
        protocol: 17,
        ..FqdnMapping::default()
    }
}
