//! The link against a small agent in the same process.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping, Realised},
    name::Fqdn,
    rule::Transport,
    table::{PolicyHandle, Question},
    verdict::Verdict,
};
use fqdn_proto::native as wire;
use holdfast_sdp::{
    config::AgentAddress,
    link::{
        Link,
        state::{LinkState, LinkStatus, RulesOrigin},
    },
    mapping::{MappingSink, Release},
    maps::PinnedMaps,
    ready::{Need, Readiness},
    sink::LinkSink,
};
use parking_lot::Mutex;
use polling::{until, until_async};
use shared_maps::{EndpointId, IdentityId};
use tokio::{net::UnixListener, sync::mpsc};
use tokio_stream::{StreamExt, wrappers::ReceiverStream, wrappers::UnixListenerStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming, transport::Server};
use wire::fqdn_policy_server::{FqdnPolicy, FqdnPolicyServer};

const SERVER: IdentityId = IdentityId(300);

/// Behaviour of the agent, and the messages that it received.
#[derive(Default)]
struct Script {
    start: u64,
    snapshot: Vec<wire::DnsRulesUpdate>,
    /// Whether it answers mappings.
    answers: bool,
    acks: Mutex<Vec<wire::RulesAck>>,
    mappings: Mutex<Vec<wire::FqdnMapping>>,
    more_rules: Mutex<Option<mpsc::Sender<Result<wire::DnsRulesUpdate, Status>>>>,
}

#[derive(Clone)]
struct Agent {
    script: Arc<Script>,
    tasks: TaskTracker,
}

impl Script {
    fn epoch(&self) -> wire::AgentEpoch {
        wire::AgentEpoch {
            boot_id: "boot".into(),
            start: self.start,
        }
    }
}

#[tonic::async_trait]
impl FqdnPolicy for Agent {
    async fn hello(
        &self,
        _: Request<wire::HelloRequest>,
    ) -> Result<Response<wire::HelloResponse>, Status> {
        Ok(Response::new(wire::HelloResponse {
            version: "test".into(),
            epoch: Some(self.script.epoch()),
            proxy_port: 10094,
            state_dir: Some(wire::StateDir {
                path: "/elsewhere".into(),
                ..Default::default()
            }),
            ..Default::default()
        }))
    }

    type UpdateMappingsStream = ReceiverStream<Result<wire::MappingDown, Status>>;

    async fn update_mappings(
        &self,
        request: Request<Streaming<wire::MappingUp>>,
    ) -> Result<Response<Self::UpdateMappingsStream>, Status> {
        let (down, sent) = mpsc::channel(16);
        let mut up = request.into_inner();
        let script = Arc::clone(&self.script);
        self.tasks.spawn(async move {
            let epoch = wire::mapping_down::Kind::Epoch(script.epoch());
            let _ = down.send(Ok(wire::MappingDown { kind: Some(epoch) })).await;
            while let Some(Ok(message)) = up.next().await {
                let Some(wire::mapping_up::Kind::Batch(batch)) = message.kind else {
                    continue;
                };
                // The order is as with a real agent: first realised, later durable.
                let results = [false, true].map(|durable| {
                    let result = |mapping: &wire::FqdnMapping| wire::MappingResult {
                        sequence: mapping.sequence,
                        realised: true,
                        durable,
                        lease_end: BootTime::now().plus_secs(3600).nanos(),
                        revision: 1,
                        refusal: 0,
                    };
                    batch.mappings.iter().map(result).collect()
                });
                script.mappings.lock().extend(batch.mappings);
                for results in results {
                    if script.answers {
                        let results = wire::MappingResults { results };
                        let kind = Some(wire::mapping_down::Kind::Results(results));
                        let _ = down.send(Ok(wire::MappingDown { kind })).await;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(sent)))
    }

    type UpdateDNSRulesStream = ReceiverStream<Result<wire::DnsRulesUpdate, Status>>;

    async fn update_dns_rules(
        &self,
        request: Request<Streaming<wire::RulesAck>>,
    ) -> Result<Response<Self::UpdateDNSRulesStream>, Status> {
        let (down, sent) = mpsc::channel(16);
        let mut acks = request.into_inner();
        let script = Arc::clone(&self.script);
        *script.more_rules.lock() = Some(down.clone());
        self.tasks.spawn(async move {
            for update in script.snapshot.clone() {
                let _ = down.send(Ok(update)).await;
            }
            drop(down);
            while let Some(Ok(ack)) = acks.next().await {
                script.acks.lock().push(ack);
            }
        });
        Ok(Response::new(ReceiverStream::new(sent)))
    }
}

/// A running agent. Dropping it has the effect of kill -9.
struct Running {
    script: Arc<Script>,
    stop: CancellationToken,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Running {
    fn start(socket: &Path, script: Script) -> Self {
        let script = Arc::new(script);
        let stop = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let _ = std::fs::remove_file(socket);
        let agent = Agent {
            script: Arc::clone(&script),
            tasks: TaskTracker::new(),
        };
        let _inside = runtime.enter();
        let listener = UnixListenerStream::new(UnixListener::bind(socket).expect("a free path"));
        let serving = Server::builder()
            .add_service(FqdnPolicyServer::new(agent))
            .serve_with_incoming_shutdown(listener, stop.clone().cancelled_owned());
        TaskTracker::new().spawn(serving);
        Self {
            script,
            stop,
            runtime: Some(runtime),
        }
    }

    fn ack_of(&self, revision: u64) -> Option<wire::RulesAck> {
        self.script
            .acks
            .lock()
            .iter()
            .find(|ack| ack.revision == revision)
            .cloned()
    }

    /// The first `number` mappings that it received.
    async fn until_sent(&self, number: usize) -> Vec<wire::FqdnMapping> {
        let sent = || self.script.mappings.lock().clone();
        until_async("mappings at the agent", sent, |sent| sent.len() >= number).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Proxy {
    link: Link,
    ready: Readiness,
    stop: CancellationToken,
    _dir: tempfile::TempDir,
    socket: PathBuf,
}

impl Proxy {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("agent.sock");
        let ready = Readiness::default();
        ready.block(Need::Rules, "none");
        let link = Link {
            addresses: vec![AgentAddress::Unix(socket.clone())],
            instance: "test".into(),
            proxy_port: 10094,
            state_dir: dir.path().join("state"),
            policy: Arc::new(PolicyHandle::new()),
            sink: Arc::new(LinkSink::new(0, Duration::from_millis(100))),
            maps: Arc::new(PinnedMaps::open(dir.path(), true)),
            reports: Arc::default(),
            rules_journal: Arc::default(),
            state: Arc::new(LinkState::new(ready.clone())),
        };
        Self {
            link,
            ready,
            stop: CancellationToken::new(),
            _dir: dir,
            socket,
        }
    }

    fn run(self) -> Self {
        let started = self.link.clone().start(self.stop.clone());
        started.expect("a thread");
        self
    }

    fn allows(&self, endpoint: u16, name: &str) -> bool {
        let question = Question {
            endpoint: EndpointId(endpoint),
            port: 53,
            transport: Transport::Udp,
            server: SERVER,
            address: IpAddr::from([10, 0, 0, 53]),
            name,
        };
        self.link.policy.load().check(&question) == Verdict::Allow
    }

    fn learn(&self, name: &str) -> (Release, Arc<Mutex<Option<Realised>>>) {
        let result = Arc::new(Mutex::new(None));
        let set = Arc::clone(&result);
        let mapping = Mapping {
            endpoint: EndpointInstance {
                id: EndpointId(7),
                client: IpAddr::from([10, 0, 0, 7]),
                ifindex: 3,
            },
            name: Fqdn::normalise(name),
            addresses: vec![IpAddr::from([192, 0, 2, 1])],
            ttl: 60,
            seen_at: BootTime::now(),
            rcode: 0,
            server: SocketAddr::from(([10, 0, 0, 53], 53)),
            transport: Transport::Udp,
            replayed: false,
        };
        let release = self.link.sink.learn(
            mapping,
            Box::new(move |realised| *set.lock() = Some(realised)),
        );
        (release, result)
    }

    async fn until_ready(&self) {
        let seen = || (self.ready.is_ready(), self.link.state.status());
        until_async("the proxy is ready", seen, |(ready, _)| *ready).await;
    }

    async fn until_allowed(&self, endpoint: u16, name: &str) {
        let what = format!("{name} is allowed to endpoint {endpoint}");
        let seen = || (self.allows(endpoint, name), self.link.state.status());
        until_async(&what, seen, |(allowed, _)| *allowed).await;
    }

    /// Waits until the state of the link is `wanted`.
    async fn until_link(&self, what: &str, wanted: impl Fn(&LinkStatus) -> bool) {
        until_async(what, || self.link.state.status(), wanted).await;
    }

    async fn until_connected_to(&self, start: u64) {
        self.until_link(&format!("connected to start {start}"), |status| {
            let connection = status.connection.as_ref();
            connection.is_some_and(|connection| connection.epoch.start == start)
        })
        .await;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn until_told(told: &Mutex<Option<Realised>>, wanted: Realised) {
    let seen = || *told.lock();
    until_async(&format!("{wanted:?}"), seen, |seen| *seen == Some(wanted)).await;
}

fn chunk(
    start: u64,
    revision: u64,
    rules: &[(u32, &str)],
    removed: &[u32],
    more: bool,
) -> wire::DnsRulesUpdate {
    let endpoints = rules.iter().map(|(id, pattern)| wire::EndpointDnsRules {
        endpoint_id: *id,
        ports: vec![wire::PortDnsRules {
            port: 53,
            protocol: 17,
            rules: vec![wire::DnsSelectorRule {
                selector: "dns".into(),
                server_identities: vec![SERVER.0],
                any_server: false,
                names: vec![wire::FqdnSelector {
                    match_pattern: (*pattern).into(),
                    ..Default::default()
                }],
            }],
        }],
    });
    update(
        start,
        revision,
        wire::dns_rules_update::Kind::Endpoints(wire::EndpointRulesChunk {
            endpoints: endpoints.collect(),
            removed: removed.to_vec(),
            more,
        }),
    )
}

fn done(start: u64, revision: u64) -> wire::DnsRulesUpdate {
    update(
        start,
        revision,
        wire::dns_rules_update::Kind::SnapshotDone(wire::SnapshotDone {}),
    )
}

fn update(start: u64, revision: u64, kind: wire::dns_rules_update::Kind) -> wire::DnsRulesUpdate {
    let epoch = wire::AgentEpoch {
        boot_id: "boot".into(),
        start,
    };
    wire::DnsRulesUpdate {
        epoch: Some(epoch),
        revision,
        kind: Some(kind),
    }
}

#[tokio::test]
async fn a_snapshot_then_deltas_each_acknowledged() {
    let proxy = Proxy::new();
    let script = Script {
        start: 1,
        snapshot: vec![
            chunk(1, 4, &[(7, "*.a.com")], &[], true),
            chunk(1, 4, &[(8, "*.b.com")], &[], false),
            done(1, 4),
        ],
        ..Script::default()
    };
    let agent = Running::start(&proxy.socket, script);
    let proxy = proxy.run();
    proxy.until_ready().await;
    let connection = proxy.link.state.status().connection.unwrap();
    let noted = connection.other_state_dir.map(|dirs| dirs.agent);
    assert_eq!(noted.as_deref(), Some("/elsewhere"));
    assert!(proxy.allows(7, "x.a.com.") && proxy.allows(8, "x.b.com."));
    assert!(!proxy.allows(7, "x.b.com."));
    until_async(
        "revision 4 is acknowledged",
        || agent.ack_of(4),
        |ack| ack.as_ref().is_some_and(|ack| ack.nack.is_empty()),
    )
    .await;

    let more = agent.script.more_rules.lock().clone().unwrap();
    more.send(Ok(chunk(1, 5, &[(7, "*.c.com")], &[8], false)))
        .await
        .unwrap();
    proxy.until_allowed(7, "x.c.com.").await;
    assert!(!proxy.allows(8, "x.b.com.") && !proxy.allows(7, "x.a.com."));

    more.send(Ok(chunk(1, 6, &[(8, "*.d.com")], &[], true)))
        .await
        .unwrap();
    more.send(Ok(chunk(1, 6, &[(7, "a{1,2}.x")], &[], false)))
        .await
        .unwrap();
    until_async(
        "revision 6 is refused",
        || agent.ack_of(6),
        |ack| {
            ack.as_ref()
                .is_some_and(|ack| ack.nack.contains("a{1,2}.x"))
        },
    )
    .await;
    assert!(
        !proxy.allows(8, "x.d.com."),
        "no part of a refused revision is in force"
    );
    assert!(proxy.allows(7, "x.c.com."), "the old rules stay");
    let RulesOrigin::Agent { revision, .. } = proxy.link.state.status().rules else {
        panic!("not from the agent")
    };
    assert_eq!(revision, 5);
}

#[tokio::test]
async fn answers_are_held_realised_and_then_leased() {
    let proxy = Proxy::new();
    let script = Script {
        start: 1,
        answers: true,
        snapshot: vec![done(1, 1)],
        ..Script::default()
    };
    let agent = Running::start(&proxy.socket, script);
    let proxy = proxy.run();
    proxy.until_ready().await;
    let (release, result) = proxy.learn("a.com");
    assert_eq!(release, Release::Held);
    until_told(&result, Realised::Yes).await;
    assert_eq!(proxy.learn("a.com").0, Release::Leased);
    let mappings = agent.until_sent(2).await;
    assert!(!mappings[0].leased && mappings[1].leased);
    assert_eq!(mappings[0].addresses, [vec![192, 0, 2, 1]]);
    assert_eq!(mappings[0].endpoint.as_ref().unwrap().ifindex, 3);
}

/// The situation is like a flood of TCP connections, when the runtime of clients has no time for
/// other tasks.
#[tokio::test]
async fn a_proxy_that_is_busy_with_clients_still_handles_the_agents_results() {
    let proxy = Proxy::new();
    let script = Script {
        start: 1,
        answers: true,
        snapshot: vec![done(1, 1)],
        ..Script::default()
    };
    let _agent = Running::start(&proxy.socket, script);
    let proxy = proxy.run();
    proxy.until_ready().await;
    // No `await` after this line: nothing else runs on this runtime.
    for n in 0..100 {
        let (release, result) = proxy.learn(&format!("n{n}.com"));
        assert_eq!(release, Release::Held);
        until(
            "realised",
            || *result.lock(),
            |result| *result == Some(Realised::Yes),
        );
    }
    assert_eq!(proxy.link.sink.stats().agent_hung.get(), 0);
}

#[tokio::test]
async fn an_agent_that_accepts_mappings_and_answers_none_counts_as_hung_after_some() {
    let proxy = Proxy::new();
    let script = Script {
        start: 1,
        snapshot: vec![done(1, 1)],
        ..Script::default()
    };
    let _agent = Running::start(&proxy.socket, script);
    let proxy = proxy.run();
    proxy.until_ready().await;
    until_async(
        "answers are released at once",
        || proxy.learn("a.com").0,
        |release| *release == Release::AgentAway,
    )
    .await;
    assert!(proxy.link.sink.status().agent_hung);
}

#[tokio::test]
async fn mappings_learned_without_an_agent_reach_the_next_one() {
    let proxy = Proxy::new();
    let script = Script {
        start: 1,
        snapshot: vec![done(1, 1)],
        ..Script::default()
    };
    let agent = Running::start(&proxy.socket, script);
    let proxy = proxy.run();
    proxy.until_connected_to(1).await;
    let (release, result) = proxy.learn("held.com");
    assert_eq!(release, Release::Held);
    drop(agent);
    until_told(&result, Realised::AgentAway).await;
    let before = BootTime::now();
    assert_eq!(proxy.learn("away.com").0, Release::AgentAway);
    let after = BootTime::now();

    let script = Script {
        start: 2,
        snapshot: vec![done(2, 1)],
        ..Script::default()
    };
    let agent = Running::start(&proxy.socket, script);
    let mappings = agent.until_sent(2).await;
    assert!(mappings.iter().all(|mapping| mapping.replayed));
    let away = mappings
        .iter()
        .find(|mapping| mapping.name == "away.com.")
        .unwrap();
    assert!(
        (before.nanos()..=after.nanos()).contains(&away.seen_at),
        "the instant is the original one"
    );
}

#[tokio::test]
async fn rules_outlive_the_agent_until_the_next_snapshot_is_done() {
    let proxy = Proxy::new();
    let snapshot = vec![
        chunk(1, 1, &[(7, "*.a.com"), (8, "*.a.com")], &[], false),
        done(1, 1),
    ];
    let agent = Running::start(
        &proxy.socket,
        Script {
            start: 1,
            snapshot,
            ..Script::default()
        },
    );
    let proxy = proxy.run();
    proxy.until_allowed(7, "x.a.com.").await;
    drop(agent);
    proxy
        .until_link("disconnected", |status| status.connection.is_none())
        .await;
    assert!(proxy.allows(7, "x.a.com."));
    let snapshot = vec![chunk(2, 1, &[(7, "*.b.com")], &[], false)];
    let agent = Running::start(
        &proxy.socket,
        Script {
            start: 2,
            snapshot,
            ..Script::default()
        },
    );
    proxy.until_connected_to(2).await;
    assert!(proxy.allows(8, "x.a.com."), "not named yet is not gone");
    let more = until_async(
        "the stream of rules is open",
        || agent.script.more_rules.lock().clone(),
        Option::is_some,
    );
    let more = more.await.unwrap();
    more.send(Ok(done(2, 1))).await.unwrap();
    proxy.until_allowed(7, "x.b.com.").await;
    assert!(!proxy.allows(8, "x.a.com.") && !proxy.allows(7, "x.a.com."));
}

#[tokio::test]
async fn a_process_that_accepts_but_never_answers_is_no_agent() {
    let proxy = Proxy::new();
    let _mute = UnixListener::bind(&proxy.socket).unwrap();
    let proxy = proxy.run();
    proxy
        .until_link("the error is reported", |status| {
            let error = status.last_error.as_ref();
            error.is_some_and(|error| error.contains("no answer"))
        })
        .await;
    assert_eq!(proxy.learn("a.com").0, Release::AgentAway);
}
