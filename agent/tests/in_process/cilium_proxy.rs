//! A stand-in that uses this agent's FQDNData service as Cilium's standalone proxy does:
//! - It acknowledges without a request id.
//! - It finds endpoints by the first address of an entry only.
//! - It ends at a query from an address without an endpoint.
//! - It does not remove a rule that is absent from a later state.
//! - It rejects a whole batch if it cannot compile one pattern in it.
//! - It has no rule if no server is listed.
//! - It receives messages of at most 4 MiB.
//! - It pings a silent connection and waits one second for the answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use dns_policy::{name::Fqdn, pattern::SelectorMatcher, rule::NameRule};
use fqdn_proto::fqdndata::{
    FqdnMapping, PolicyState, PolicyStateResponse, ResponseCode, fqdn_data_client::FqdnDataClient,
};
use ipnet::IpNet;
use parking_lot::Mutex;
use polling::until_async;
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use crate::lab::TEST_TIMEOUT;

/// Default receive limit of grpc-go, bytes.
const RECEIVES: usize = 4 << 20;
/// Longest wait for the answer to a ping.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Port rules of one endpoint: servers by identity, names.
type Rules = Vec<(BTreeSet<u32>, Names)>;

/// Allowed names; `None` = every name.
#[derive(Debug)]
struct Names(Option<Vec<SelectorMatcher>>);

/// State of the process, over all connections.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    rules: BTreeMap<(u16, u32, u32), Rules>,
    endpoints: BTreeMap<IpAddr, u16>,
    prefixes: Vec<(IpNet, u32)>,
    /// Size of the last state.
    pub(crate) size: usize,
}

impl Memory {
    fn apply(&mut self, state: &PolicyState) {
        self.size = state.encoded_len();
        assert!(self.size < RECEIVES);
        let mut batch: BTreeMap<(u16, u32, u32), Rules> = BTreeMap::new();
        for policy in &state.egress_l7_dns_policy {
            let endpoint = u16::try_from(policy.source_endpoint_id).expect("16 bits");
            let mut by_port: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();
            for server in &policy.dns_servers {
                let port = (server.dns_server_port, server.dns_server_proto);
                by_port
                    .entry(port)
                    .or_default()
                    .insert(server.dns_server_identity);
            }
            for ((port, protocol), servers) in by_port {
                let compile = |pattern: &String| {
                    SelectorMatcher::compile(&NameRule::Pattern(pattern.clone()))
                        .unwrap_or_else(|error| panic!("the batch is reverted: {error}"))
                };
                let patterns = &policy.dns_pattern;
                let names = (!patterns.is_empty()).then(|| patterns.iter().map(compile).collect());
                let rules = batch.entry((endpoint, port, protocol)).or_default();
                rules.push((servers, Names(names)));
            }
        }
        // Rules that are absent from the batch stay.
        self.rules.extend(batch);
        self.endpoints.clear();
        for info in state
            .identity_to_endpoint_mapping
            .iter()
            .flat_map(|m| &m.endpoint_info)
        {
            let first = address(info.ip.first().expect("an address"));
            let id = u16::try_from(info.id).expect("16 bits");
            self.endpoints.insert(first, id);
        }
        let prefixes = state.identity_to_prefix_mapping.iter();
        let prefixes = prefixes.flat_map(|m| m.prefix.iter().map(|bytes| (bytes, m.identity)));
        self.prefixes = prefixes
            .map(|(bytes, identity)| {
                let (len, bytes) = bytes.split_last().unwrap();
                (IpNet::new(address(bytes), *len).unwrap(), identity)
            })
            .collect();
    }

    /// Whether the proxy would forward a pod's query. A query from an unknown source ends the proxy.
    pub(crate) fn allows(&self, client: &str, server: &str, protocol: u32, name: &str) -> bool {
        let client: IpAddr = client.parse().unwrap();
        let server: IpAddr = server.parse().unwrap();
        let endpoint = self.endpoints.get(&client);
        let endpoint = endpoint.unwrap_or_else(|| panic!("nil endpoint of {client}: it ended"));
        let covering = self
            .prefixes
            .iter()
            .filter(|(net, _)| net.contains(&server));
        let identity = covering.max_by_key(|(net, _)| net.prefix_len());
        let identity = identity.map_or(2, |(_, identity)| *identity);
        let name = Fqdn::normalise(name);
        let rules = self.rules.get(&(*endpoint, 53, protocol)).into_iter();
        rules.flatten().any(|(servers, Names(names))| {
            let named = names
                .as_ref()
                .is_none_or(|names| names.iter().any(|one| one.matches(&name)));
            servers.contains(&identity) && named
        })
    }

    /// Whether it has an endpoint with this address.
    pub(crate) fn has_client(&self, client: &str) -> bool {
        self.endpoints.contains_key(&client.parse().unwrap())
    }

    /// Number of prefixes in the last state.
    pub(crate) fn prefixes(&self) -> usize {
        self.prefixes.len()
    }
}

fn address(bytes: &[u8]) -> IpAddr {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).unwrap().into(),
        16 => <[u8; 16]>::try_from(bytes).unwrap().into(),
        other => panic!("an address of {other} bytes"),
    }
}

/// The stand-in proxy, with one connection to the agent.
pub(crate) struct CiliumProxy {
    pub(crate) memory: Memory,
    link: Link,
}

struct Link {
    client: FqdnDataClient<Channel>,
    states: Streaming<PolicyState>,
    acks: mpsc::Sender<PolicyStateResponse>,
    pings: Arc<AtomicUsize>,
}

impl CiliumProxy {
    /// Connects for the first time.
    pub(crate) async fn start(agent: SocketAddr) -> Self {
        Self {
            memory: Memory::default(),
            link: connect(agent).await,
        }
    }

    /// Closes its connection and opens another.
    pub(crate) async fn reconnect(self, agent: SocketAddr) -> Self {
        let memory = self.memory;
        drop(self.link);
        let link = connect(agent).await;
        Self { memory, link }
    }

    /// Takes one state and acknowledges it.
    async fn take(&mut self) {
        self.receive().await;
        self.acknowledge().await;
    }

    /// Receives and applies one state.
    pub(crate) async fn receive(&mut self) {
        let state = self.link.states.message().await.unwrap();
        let state = state.expect("the agent keeps the stream");
        assert!(!state.request_id.is_empty());
        self.memory.apply(&state);
    }

    /// Acknowledges the last state, without a request id.
    pub(crate) async fn acknowledge(&mut self) {
        let ack = PolicyStateResponse {
            response: ResponseCode::NoError.into(),
            request_id: String::new(),
        };
        self.link.acks.send(ack).await.unwrap();
    }

    /// Takes states until `wanted` holds.
    pub(crate) async fn until(&mut self, what: &str, wanted: impl Fn(&Memory) -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !wanted(&self.memory) {
            let left = deadline.saturating_duration_since(Instant::now());
            let taken = timeout(left, self.take()).await;
            assert!(taken.is_ok(), "{what} does not come: {:?}", self.memory);
        }
    }

    /// Waits until the agent has sent this many pings.
    pub(crate) async fn pinged(&self, times: usize) {
        let pings = || self.link.pings.load(Ordering::Relaxed);
        until_async("pings of the agent", pings, |pings| *pings >= times).await;
    }

    /// Reports an answer, and returns the agent's refusal.
    pub(crate) async fn report(&mut self, answer: FqdnMapping) -> Result<(), tonic::Status> {
        let answered = self.link.client.update_mapping_request(answer).await;
        answered.map(|_| ())
    }
}

/// Connects through a relay that counts the agent's pings.
async fn connect(agent: SocketAddr) -> Link {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let pings = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&pings);
    let relays = TaskTracker::new();
    relays.spawn(async move {
        let (down, _) = listener.accept().await.unwrap();
        let up = TcpStream::connect(agent).await.unwrap();
        relay(down, up, counted).await;
    });
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .http2_keep_alive_interval(Duration::from_millis(500))
        .keep_alive_timeout(SIGN_OF_LIFE)
        .keep_alive_while_idle(true);
    let client = FqdnDataClient::new(channel.connect().await.unwrap());
    let mut client = client.max_decoding_message_size(RECEIVES);
    let (acks, requests) = mpsc::channel(1);
    let states = client
        .stream_policy_state(ReceiverStream::new(requests))
        .await;
    Link {
        states: states.unwrap().into_inner(),
        client,
        acks,
        pings,
    }
}

async fn relay(down: TcpStream, up: TcpStream, pings: Arc<AtomicUsize>) {
    let (mut from_client, to_client) = down.into_split();
    let (mut from_agent, mut to_agent) = up.into_split();
    let to_client = Mutex::new(to_client);
    let requests = async {
        let _closed = tokio::io::copy(&mut from_client, &mut to_agent).await;
    };
    let answers = async {
        let mut to_client = to_client.into_inner();
        let mut frames = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from_agent.read(&mut buffer).await {
            let bytes = &buffer[..read];
            if to_client.write_all(bytes).await.is_err() {
                return;
            }
            frames.extend_from_slice(bytes);
            // Frame header: length, type, flags, stream (RFC 9113, 4.1); 6 is PING, flag 1 ACK.
            while let Some(header) = frames.first_chunk::<9>() {
                let [a, b, c, kind, flags, ..] = *header;
                let whole = 9 + u32::from_be_bytes([0, a, b, c]) as usize;
                if frames.len() < whole {
                    break;
                }
                if kind == 6 && flags & 1 == 0 {
                    pings.fetch_add(1, Ordering::Relaxed);
                }
                frames.drain(..whole);
            }
        }
    };
    tokio::select! {
        () = requests => {}
        () = answers => {}
    }
}
