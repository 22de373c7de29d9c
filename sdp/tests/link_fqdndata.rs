//! The link against the FQDNData service of a small agent in the same process.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping, Realised, Refusal},
    name::Fqdn,
    rule::Transport,
    table::{PolicyHandle, Question},
    verdict::Verdict,
};
use fqdn_proto::fqdndata as wire;
use holdfast_sdp::{
    config::AgentAddress,
    link::{
        Link,
        state::{LinkState, Service},
    },
    mapping::{MappingSink, Release},
    maps::PinnedMaps,
    query_report::{Content, Event, QueryReport, Times},
    ready::Readiness,
    resolve::{QueryClient, Resolver},
    rules_journal::RulesJournal,
    sink::LinkSink,
};
use parking_lot::Mutex;
use polling::until_async;
use shared_maps::{EndpointId, IdentityId};
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::{Notify, mpsc, watch},
};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{ReceiverStream, TcpListenerStream, UnixListenerStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::Connected},
};
use wire::fqdn_data_server::{FqdnData, FqdnDataServer};

const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 53));

#[derive(Clone, Default)]
struct Agent {
    states: Arc<Mutex<Vec<wire::PolicyState>>>,
    acks: Arc<Mutex<Vec<wire::PolicyStateResponse>>>,
    mappings: Arc<Mutex<Vec<wire::FqdnMapping>>>,
    /// Whether it accepts mappings without answering them.
    busy: watch::Sender<bool>,
    /// Ends the open streams.
    end: Arc<Notify>,
    tasks: TaskTracker,
}

#[tonic::async_trait]
impl FqdnData for Agent {
    type StreamPolicyStateStream = ReceiverStream<Result<wire::PolicyState, Status>>;

    /// Like Cilium's agent, sends one state, and the next one only after the acknowledgement.
    async fn stream_policy_state(
        &self,
        request: Request<Streaming<wire::PolicyStateResponse>>,
    ) -> Result<Response<Self::StreamPolicyStateStream>, Status> {
        let (down, sent) = mpsc::channel(1);
        let mut acks = request.into_inner();
        let agent = self.clone();
        self.tasks.spawn(async move {
            let states: Vec<_> = agent.states.lock().drain(..).collect();
            for state in states {
                if down.send(Ok(state)).await.is_err() {
                    return;
                }
                let Some(Ok(ack)) = acks.next().await else {
                    return;
                };
                agent.acks.lock().push(ack);
            }
            let _open = down;
            agent.end.notified().await;
        });
        Ok(Response::new(ReceiverStream::new(sent)))
    }

    async fn update_mapping_request(
        &self,
        request: Request<wire::FqdnMapping>,
    ) -> Result<Response<wire::UpdateMappingResponse>, Status> {
        let mapping = request.into_inner();
        let unknown = mapping.fqdn.starts_with("unknown");
        self.mappings.lock().push(mapping);
        // An agent that has ended answers nothing.
        let _ = self.busy.subscribe().wait_for(|busy| !busy).await;
        if unknown {
            return Err(Status::unknown("no endpoint"));
        }
        let response = wire::ResponseCode::NoError.into();
        Ok(Response::new(wire::UpdateMappingResponse { response }))
    }
}

fn state(id: &str, endpoints: &[(u32, &str)]) -> wire::PolicyState {
    let policies = endpoints.iter().map(|(endpoint, pattern)| wire::DnsPolicy {
        source_endpoint_id: *endpoint,
        dns_pattern: vec![(*pattern).into()],
        dns_servers: vec![wire::DnsServer {
            dns_server_identity: 500,
            dns_server_port: 53,
            dns_server_proto: 17,
        }],
    });
    wire::PolicyState {
        egress_l7_dns_policy: policies.collect(),
        request_id: id.into(),
        identity_to_endpoint_mapping: vec![wire::IdentityToEndpointMapping {
            identity: 400,
            endpoint_info: vec![wire::EndpointInfo {
                id: 7,
                ip: vec![vec![10, 0, 0, 7]],
            }],
        }],
        identity_to_prefix_mapping: vec![wire::IdentityToPrefixMapping {
            identity: 500,
            prefix: vec![vec![10, 0, 0, 53, 32]],
        }],
    }
}

fn mapping(name: &str) -> Mapping {
    Mapping {
        endpoint: EndpointInstance {
            id: EndpointId(7),
            client: IpAddr::from([10, 0, 0, 7]),
            ifindex: 9,
        },
        name: Fqdn::normalise(name),
        addresses: vec![IpAddr::from([192, 0, 2, 1])],
        ttl: 60,
        seen_at: BootTime::now(),
        rcode: 0,
        server: SocketAddr::new(SERVER, 53),
        transport: Transport::Udp,
        replayed: false,
    }
}

/// The result of an answer that is held.
type Fate = Arc<Mutex<Option<Realised>>>;

/// The agent's log entry of an answer.
fn report(name: &str, port: u16) -> Option<Box<QueryReport>> {
    Some(Box::new(QueryReport {
        name: Fqdn::normalise(name),
        qtype: 1,
        client: SocketAddr::from(([10, 0, 0, 7], port)),
        identity: IdentityId(400),
        server: SocketAddr::new(SERVER, 53),
        server_identity: IdentityId(500),
        transport: Transport::Udp,
        allowed: true,
        times: Times::default(),
        event: Event::Answer(Content {
            addresses: mapping(name).addresses,
            ttl: 60,
            types: vec![1],
            ..Content::default()
        }),
    }))
}

fn directory() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

/// A proxy's link, and the agent that serves it.
struct Proxy {
    agent: Agent,
    link: Link,
    dir: TempDir,
    stop: CancellationToken,
}

impl Proxy {
    /// A link over TCP to an agent that has these states.
    async fn start(states: &[wire::PolicyState]) -> Self {
        Self::start_with(states, |_, _| {}).await
    }

    /// Like [`Self::start`], with a function that changes the link and gets the directory of its
    /// files.
    async fn start_with(
        states: &[wire::PolicyState],
        change: impl FnOnce(&mut Link, &Path),
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = AgentAddress::Tcp(listener.local_addr().expect("an address").to_string());
        let mut proxy = Self::new(states, directory(), address);
        change(&mut proxy.link, proxy.dir.path());
        proxy.run(TcpListenerStream::new(listener));
        proxy
    }

    /// A link over the unix socket of a native agent.
    fn start_at_native_socket(states: &[wire::PolicyState]) -> Self {
        let dir = directory();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).expect("a free path");
        let proxy = Self::new(states, dir, AgentAddress::Unix(socket));
        proxy.run(UnixListenerStream::new(listener));
        proxy
    }

    fn new(states: &[wire::PolicyState], dir: TempDir, address: AgentAddress) -> Self {
        let agent = Agent::default();
        agent.states.lock().extend_from_slice(states);
        let link = Link {
            addresses: vec![address],
            instance: "test".into(),
            proxy_port: 10094,
            state_dir: dir.path().join("state"),
            policy: Arc::new(PolicyHandle::new()),
            sink: Arc::new(LinkSink::new(0, Duration::from_millis(100))),
            maps: Arc::new(PinnedMaps::open(dir.path(), true)),
            reports: Arc::default(),
            rules_journal: Arc::default(),
            state: Arc::new(LinkState::new(Readiness::default())),
        };
        Self {
            agent,
            link,
            dir,
            stop: CancellationToken::new(),
        }
    }

    fn run<C>(&self, connections: impl Stream<Item = std::io::Result<C>> + Send + 'static)
    where
        C: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static,
    {
        let tasks = TaskTracker::new();
        let server = Server::builder().add_service(FqdnDataServer::new(self.agent.clone()));
        tasks.spawn(server.serve_with_incoming(connections));
        tasks.spawn(self.link.clone().run(self.stop.clone()));
    }

    fn allows(&self, endpoint: u16, name: &str) -> bool {
        let question = Question {
            endpoint: EndpointId(endpoint),
            port: 53,
            transport: Transport::Udp,
            server: self.link.maps.server(SERVER),
            address: SERVER,
            name,
        };
        self.link.policy.load().check(&question) == Verdict::Allow
    }

    async fn until_allowed(&self, endpoint: u16, name: &str) {
        let what = format!("{name} is allowed to endpoint {endpoint}");
        let seen = || (self.allows(endpoint, name), self.link.state.status());
        until_async(&what, seen, |(allowed, _)| *allowed).await;
    }

    /// Waits until the agent has received acknowledgements of this many states.
    async fn until_acknowledged(&self, states: usize) {
        let acks = || self.agent.acks.lock().clone();
        until_async("acknowledged states", acks, |acks| acks.len() == states).await;
    }

    fn learn(&self, name: &str) -> Fate {
        let (release, fate) = self.learn_reported(name, None);
        assert_eq!(release, Release::Held);
        fate
    }

    fn learn_reported(&self, name: &str, report: Option<Box<QueryReport>>) -> (Release, Fate) {
        let fate = Fate::default();
        let tell = Arc::clone(&fate);
        let on_realised = Box::new(move |realised| *tell.lock() = Some(realised));
        let sink = &self.link.sink;
        let release = sink.learn_reported(mapping(name), report, on_realised);
        (release, fate)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn until_fate(fate: &Fate, wanted: Realised) {
    let seen = || *fate.lock();
    until_async(&format!("{wanted:?}"), seen, |seen| *seen == Some(wanted)).await;
}

#[tokio::test]
async fn the_link_uses_fqdndata_if_the_agent_has_no_native_service() {
    let proxy = Proxy::start_at_native_socket(&[state("one", &[(7, "*.a.com")])]);
    proxy.until_allowed(7, "x.a.com.").await;
}

#[tokio::test]
async fn serves_from_a_cilium_agents_state_alone() {
    let proxy = Proxy::start(&[
        state("one", &[(7, "*.a.com"), (8, "*.a.com")]),
        state("two", &[(7, "*.b.com")]),
    ])
    .await;
    proxy.until_acknowledged(2).await;
    assert_eq!(proxy.agent.acks.lock()[1].request_id, "two");
    assert_eq!(
        proxy.link.state.status().connection.unwrap().service,
        Service::FqdnData
    );
    assert!(matches!(
        proxy.link.maps.client(IpAddr::from([10, 0, 0, 7])),
        QueryClient::Endpoint {
            id: EndpointId(7),
            identity: IdentityId(400),
            ..
        }
    ));
    assert!(proxy.allows(7, "x.b.com.") && !proxy.allows(7, "x.a.com."));
    assert!(!proxy.allows(8, "x.a.com."), "named before, absent now");

    until_fate(&proxy.learn("x.b.com"), Realised::Yes).await;
    let sent = proxy.agent.mappings.lock()[0].clone();
    assert_eq!(sent.source_ip, b"10.0.0.7");
    assert_eq!(sent.source_identity, 400);
    let refused = Realised::No(Refusal::EndpointUnknown);
    until_fate(&proxy.learn("unknown.b.com"), refused).await;
}

/// Acknowledged mappings are answered at once while the agent answers nothing. New mappings wait
/// for its answer.
#[tokio::test]
async fn a_busy_agent_delays_only_unacknowledged_answers() {
    let rules = [(7, "*.a.com")];
    let proxy = Proxy::start_with(&[state("one", &rules)], |link, _| {
        link.sink = Arc::new(LinkSink::new(0, Duration::from_secs(60)));
    })
    .await;
    proxy.until_allowed(7, "x.a.com.").await;

    until_fate(&proxy.learn("x.a.com"), Realised::Yes).await;
    proxy.agent.busy.send_replace(true);
    for port in [5001, 5002] {
        let again = proxy.learn_reported("x.a.com", report("x.a.com", port)).0;
        assert_eq!(again, Release::Leased);
    }
    let new = proxy.learn("new.a.com");
    let sent = || proxy.agent.mappings.lock().clone();
    let sent = until_async("all four are sent", sent, |sent| sent.len() == 4).await;
    assert_eq!(*new.lock(), None, "the agent has not plumbed it");
    let of = |port| {
        let metrics = |m: &wire::FqdnMapping| m.metrics_data.clone().unwrap_or_default();
        let found = sent.iter().find(|m| metrics(m).source_port == port);
        found.map(|m| (m.fqdn.as_str(), m.record_ip.len(), m.ttl))
    };
    assert_eq!(of(5001), Some(("x.a.com.", 1, 60)));
    assert_eq!(of(5002), Some(("x.a.com.", 1, 60)));
    proxy.agent.busy.send_replace(false);
    until_fate(&new, Realised::Yes).await;

    // Another session may belong to another agent, which must acknowledge the repeated mappings.
    proxy.agent.busy.send_replace(true);
    proxy.agent.states.lock().push(state("two", &rules));
    proxy.agent.end.notify_waiters();
    proxy.until_acknowledged(2).await;
    let first = proxy.learn("x.a.com");
    proxy.agent.busy.send_replace(false);
    until_fate(&first, Realised::Yes).await;
    assert_eq!(proxy.learn_reported("x.a.com", None).0, Release::Leased);
}

/// A proxy that is killed right after its first answer under new rules has stored them in the file.
#[tokio::test]
async fn rules_are_on_disk_before_they_allow_anything() {
    let proxy = Proxy::start_with(&[state("one", &[(7, "*.a.com")])], |link, dir| {
        link.rules_journal.open(dir, "one");
    })
    .await;
    proxy.until_allowed(7, "x.a.com.").await;
    let next = RulesJournal::default();
    next.open(proxy.dir.path(), "two");
    let (content, _) = next.read().unwrap().expect("a file");
    let server = content.prefixes.get(&SERVER.into());
    assert_eq!(server, Some(&IdentityId(500)));
}
