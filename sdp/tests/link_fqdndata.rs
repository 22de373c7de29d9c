//! The link against the FQDNData service of a small agent in the same process.

use std::{
    net::{IpAddr, SocketAddr},
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
use shared_maps::{EndpointId, IdentityId};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::{Notify, mpsc, watch},
};
use tokio_stream::{
    StreamExt,
    wrappers::{ReceiverStream, TcpListenerStream, UnixListenerStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming, transport::Server};
use wire::fqdn_data_server::{FqdnData, FqdnDataServer};

const DEADLINE: Duration = Duration::from_secs(10);
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 53));

#[derive(Clone, Default)]
struct Agent {
    states: Arc<Mutex<Vec<wire::PolicyState>>>,
    acks: Arc<Mutex<Vec<wire::PolicyStateResponse>>>,
    mappings: Arc<Mutex<Vec<wire::FqdnMapping>>>,
    /// Whether it takes mappings and answers none.
    busy: watch::Sender<bool>,
    /// Ends the streams that there are.
    end: Arc<Notify>,
    tasks: TaskTracker,
}

#[tonic::async_trait]
impl FqdnData for Agent {
    type StreamPolicyStateStream = ReceiverStream<Result<wire::PolicyState, Status>>;

    /// As Cilium's: one state, then nothing until its answer came.
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
        // An agent that is gone answers nothing.
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

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(
        tokio::time::timeout(DEADLINE, wait).await.is_ok(),
        "never came true: {what}"
    );
}

fn allows(link: &Link, endpoint: u16, name: &str) -> bool {
    let question = Question {
        endpoint: EndpointId(endpoint),
        port: 53,
        transport: Transport::Udp,
        server: link.maps.server(SERVER),
        address: SERVER,
        name,
    };
    link.policy.load().check(&question) == Verdict::Allow
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

/// What becomes of an answer that waits.
type Fate = Arc<Mutex<Option<Realised>>>;

fn learn(link: &Link, name: &str) -> Fate {
    let (release, fate) = learn_reported(link, name, None);
    assert_eq!(release, Release::Held);
    fate
}

fn learn_reported(link: &Link, name: &str, report: Option<Box<QueryReport>>) -> (Release, Fate) {
    let fate = Fate::default();
    let set = Arc::clone(&fate);
    let on_realised = Box::new(move |realised| *set.lock() = Some(realised));
    let release = link.sink.learn_reported(mapping(name), report, on_realised);
    (release, fate)
}

/// What the agent logs of an answer.
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

fn link_to(address: AgentAddress, dir: &tempfile::TempDir) -> Link {
    Link {
        addresses: vec![address],
        instance: "test".into(),
        proxy_port: 10094,
        policy: Arc::new(PolicyHandle::new()),
        sink: Arc::new(LinkSink::new(0, Duration::from_millis(100))),
        maps: Arc::new(PinnedMaps::open(dir.path(), true)),
        reports: Arc::default(),
        rules_journal: Arc::default(),
        state: Arc::new(LinkState::new(Readiness::default())),
    }
}

#[tokio::test]
async fn an_agent_without_the_native_service_is_asked_for_the_other() {
    let agent = Agent::default();
    agent.states.lock().push(state("one", &[(7, "*.a.com")]));
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let tasks = TaskTracker::new();
    let server = Server::builder().add_service(FqdnDataServer::new(agent.clone()));
    tasks.spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    let link = link_to(AgentAddress::Unix(socket), &dir);
    let stop = CancellationToken::new();
    tasks.spawn(link.clone().run(stop.clone()));
    until("rules", || allows(&link, 7, "x.a.com.")).await;
    stop.cancel();
}

#[tokio::test]
async fn serves_from_a_cilium_agents_state_alone() {
    let agent = Agent::default();
    agent.states.lock().extend([
        state("one", &[(7, "*.a.com"), (8, "*.a.com")]),
        state("two", &[(7, "*.b.com")]),
    ]);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = TaskTracker::new();
    let server = Server::builder().add_service(FqdnDataServer::new(agent.clone()));
    tasks.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));

    let dir = tempfile::tempdir().unwrap();
    let link = link_to(AgentAddress::Tcp(address.to_string()), &dir);
    let stop = CancellationToken::new();
    tasks.spawn(link.clone().run(stop.clone()));

    until("both states answered", || agent.acks.lock().len() == 2).await;
    assert_eq!(agent.acks.lock()[1].request_id, "two");
    assert_eq!(
        link.state.status().connection.unwrap().service,
        Service::FqdnData
    );
    assert!(matches!(
        link.maps.client(IpAddr::from([10, 0, 0, 7])),
        QueryClient::Endpoint {
            id: EndpointId(7),
            identity: IdentityId(400),
            ..
        }
    ));
    assert!(allows(&link, 7, "x.b.com.") && !allows(&link, 7, "x.a.com."));
    assert!(!allows(&link, 8, "x.a.com."), "named before, absent now");

    let result = learn(&link, "x.b.com");
    until("realised", || *result.lock() == Some(Realised::Yes)).await;
    let sent = agent.mappings.lock()[0].clone();
    assert_eq!(sent.source_ip, b"10.0.0.7");
    assert_eq!(sent.source_identity, 400);
    let result = learn(&link, "unknown.b.com");
    until("refused", || {
        *result.lock() == Some(Realised::No(Refusal::EndpointUnknown))
    })
    .await;
    stop.cancel();
}

/// What the agent has acknowledged goes out while it answers nothing; what is new waits for it.
#[tokio::test]
async fn a_busy_agent_delays_only_what_it_has_not_acknowledged() {
    let agent = Agent::default();
    let rules = [(7, "*.a.com")];
    agent.states.lock().push(state("one", &rules));
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = TaskTracker::new();
    let server = Server::builder().add_service(FqdnDataServer::new(agent.clone()));
    tasks.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let dir = tempfile::tempdir().unwrap();
    let link = Link {
        sink: Arc::new(LinkSink::new(0, Duration::from_secs(60))),
        ..link_to(AgentAddress::Tcp(address.to_string()), &dir)
    };
    let stop = CancellationToken::new();
    tasks.spawn(link.clone().run(stop.clone()));
    until("rules", || allows(&link, 7, "x.a.com.")).await;

    let first = learn(&link, "x.a.com");
    until("realised", || *first.lock() == Some(Realised::Yes)).await;
    agent.busy.send_replace(true);
    for port in [5001, 5002] {
        let again = learn_reported(&link, "x.a.com", report("x.a.com", port)).0;
        assert_eq!(again, Release::Leased);
    }
    let new = learn(&link, "new.a.com");
    until("all sent", || agent.mappings.lock().len() == 4).await;
    assert_eq!(*new.lock(), None, "nobody has plumbed it");
    let sent = agent.mappings.lock().clone();
    let of = |port| {
        let metrics = |m: &wire::FqdnMapping| m.metrics_data.clone().unwrap_or_default();
        let found = sent.iter().find(|m| metrics(m).source_port == port);
        found.map(|m| (m.fqdn.as_str(), m.record_ip.len(), m.ttl))
    };
    assert_eq!(of(5001), Some(("x.a.com.", 1, 60)));
    assert_eq!(of(5002), Some(("x.a.com.", 1, 60)));
    agent.busy.send_replace(false);
    until("realised", || *new.lock() == Some(Realised::Yes)).await;

    // Another session may be another agent's, which acknowledges what is sent again.
    agent.busy.send_replace(true);
    agent.states.lock().push(state("two", &rules));
    agent.end.notify_waiters();
    until("another session", || agent.acks.lock().len() == 2).await;
    let first = learn(&link, "x.a.com");
    agent.busy.send_replace(false);
    until("realised", || *first.lock() == Some(Realised::Yes)).await;
    assert_eq!(learn_reported(&link, "x.a.com", None).0, Release::Leased);
    stop.cancel();
}

/// A proxy that is killed right after its first answer under new rules leaves them in the file.
#[tokio::test]
async fn rules_are_on_disk_before_they_allow_anything() {
    let agent = Agent::default();
    agent.states.lock().push(state("one", &[(7, "*.a.com")]));
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = TaskTracker::new();
    let server = Server::builder().add_service(FqdnDataServer::new(agent.clone()));
    tasks.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let dir = tempfile::tempdir().unwrap();
    let link = link_to(AgentAddress::Tcp(address.to_string()), &dir);
    link.rules_journal.open(dir.path(), "one");
    let stop = CancellationToken::new();
    tasks.spawn(link.clone().run(stop.clone()));
    until("rules", || allows(&link, 7, "x.a.com.")).await;
    let next = RulesJournal::default();
    next.open(dir.path(), "two");
    let (content, _) = next.read().unwrap().expect("a file");
    let server = content.prefixes.get(&SERVER.into());
    assert_eq!(server, Some(&IdentityId(500)));
    stop.cancel();
}
