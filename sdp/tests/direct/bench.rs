//! Fixture of the tests: the proxy under test, its server and its sink.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use daemon::descriptors::Descriptors;
use dns_policy::{
    mapping::Mapping,
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
    table::PolicyHandle,
};
use hickory_proto::{
    op::{Message, Query, ResponseCode},
    rr::{Name, RData, Record, RecordType, rdata},
};
use holdfast_sdp::{
    listener::{ListenConfig, Listeners, SocketOptions, Sockets},
    mapping::{MappingSink, OnRealised, Release},
    proxy::{Proxy, ProxyConfig},
    query_report::QueryReports,
    resolve::{QueryClient, Resolver},
    stats::Stats,
};
use parking_lot::{Condvar, Mutex};
use shared_maps::{EndpointId, IdentityId};
use socket2::{Domain, Socket, Type};

/// Time limit for anything that should happen at once.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// An address of endpoint 8.
pub(crate) const NEIGHBOUR: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 8));

/// All addresses are of endpoint 7, except [`NEIGHBOUR`] and the address in `unknown`.
struct Everyone {
    unknown: Option<IpAddr>,
}

impl Resolver for Everyone {
    fn client(&self, client: IpAddr) -> QueryClient {
        if self.unknown == Some(client) {
            return QueryClient::Unknown;
        }
        let number = if client == NEIGHBOUR { 8 } else { 7 };
        QueryClient::Endpoint {
            id: EndpointId(number),
            identity: IdentityId(1000 + u32::from(number)),
            ifindex: u32::from(number) - 4,
        }
    }

    fn server(&self, _server: IpAddr) -> IdentityId {
        IdentityId(1053)
    }
}

/// Stores the mappings, and answers them with the release that the test has set.
#[derive(Default)]
pub(crate) struct Sink {
    release: Mutex<Option<Release>>,
    version: Mutex<Option<u64>>,
    learned: Mutex<Vec<(Mapping, Option<OnRealised>)>>,
    changed: Condvar,
}

impl Sink {
    /// Sets the release of the answers from now on. At first it is `Leased`.
    pub(crate) fn set_release(&self, release: Release) {
        *self.release.lock() = Some(release);
    }

    /// Sets the version of the leases. There is none at first, so that every answer reaches the sink.
    pub(crate) fn set_leases_version(&self, version: u64) {
        *self.version.lock() = Some(version);
    }

    /// Waits for the next mapping.
    pub(crate) fn next(&self) -> (Mapping, Option<OnRealised>) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut learned = self.learned.lock();
        while learned.is_empty() {
            assert!(
                !self.changed.wait_until(&mut learned, deadline).timed_out(),
                "nothing learned"
            );
        }
        learned.remove(0)
    }

    /// Number of learned mappings that the test has not taken.
    pub(crate) fn len(&self) -> usize {
        self.learned.lock().len()
    }

    /// Whether there is no learned mapping that the test has not taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.learned.lock().is_empty()
    }
}

impl MappingSink for Sink {
    fn learn(&self, mapping: Mapping, on_realised: OnRealised) -> Release {
        let release = self.release.lock().unwrap_or(Release::Leased);
        let callback = (release == Release::Held).then_some(on_realised);
        self.learned.lock().push((mapping, callback));
        self.changed.notify_all();
        release
    }

    fn leases_version(&self) -> Option<u64> {
        *self.version.lock()
    }
}

/// Settings of a [`Bench`] and its proxy.
pub(crate) struct Options {
    pub v6: bool,
    pub(crate) workers: usize,
    /// Maximum number of TCP connections of clients.
    pub(crate) tcp_connections: usize,
    pub(crate) config: ProxyConfig,
    pub(crate) unknown: Option<IpAddr>,
    /// Patterns allowed besides `*.good.example` and `exact.example`.
    pub(crate) allow: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        let config = ProxyConfig {
            loopback_servers: true,
            // The delay is so long that no test depends on it.
            max_delay: Duration::from_secs(60),
            ..ProxyConfig::default()
        };
        Self {
            v6: false,
            workers: 1,
            tcp_connections: 8,
            config,
            unknown: None,
            allow: Vec::new(),
        }
    }
}

/// The proxy under test with its server.
pub(crate) struct Bench {
    pub(crate) server: UdpSocket,
    pub(crate) tcp_server: TcpListener,
    pub(crate) server_address: SocketAddr,
    pub(crate) proxy: SocketAddr,
    pub(crate) stats: Stats,
    pub(crate) sink: Arc<Sink>,
    pub(crate) reports: Arc<QueryReports>,
    policy: Arc<PolicyHandle>,
    pub(crate) listeners: Listeners,
    pub(crate) runtime: tokio::runtime::Runtime,
}

impl Bench {
    pub(crate) fn new(options: Options) -> Self {
        let Options {
            v6,
            workers,
            tcp_connections,
            config,
            unknown,
            allow,
        } = options;
        let localhost: IpAddr = if v6 {
            Ipv6Addr::LOCALHOST.into()
        } else {
            Ipv4Addr::LOCALHOST.into()
        };
        Descriptors::raise();
        let (server, tcp_server) = server_sockets(localhost);
        server.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let server_address = server.local_addr().unwrap();
        let listen = |port| ListenConfig {
            port,
            ipv4: !v6,
            ipv6: v6,
            workers,
            options: SocketOptions::Plain {
                server: server_address,
            },
            steering: None,
            tcp_connections,
        };
        // Finds a port that no proxy of another test still has, because sockets with SO_REUSEPORT
        // would share it.
        let mut tries = (0..64).map(|_| {
            let free = server_sockets(localhost).0.local_addr().unwrap();
            Sockets::bind(&listen(free.port()))
        });
        let sockets = tries.find_map(Result::ok).unwrap();
        let policy = Arc::new(PolicyHandle::new());
        let errors = policy.replace_all(&[7, 8].map(|id| {
            let rules = rules(server_address.port(), allow.clone());
            RulesOf {
                endpoint: EndpointId(id),
                rules,
            }
        }));
        assert!(errors.is_empty());
        let sink = Arc::new(Sink::default());
        let stats = Stats::default();
        let config = ProxyConfig {
            port: sockets.port(),
            ..config
        };
        let resolver = Arc::new(Everyone { unknown });
        let reports = Arc::new(QueryReports::default());
        let proxy = Proxy::new(
            config,
            resolver,
            Arc::clone(&policy),
            Arc::clone(&sink) as _,
            stats.clone(),
        );
        let proxy = Arc::new(proxy.with_reports(Arc::clone(&reports)));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listeners = Listeners::start(&proxy, sockets, runtime.handle()).unwrap();
        let proxy = SocketAddr::new(localhost, listeners.port());
        Self {
            server,
            tcp_server,
            server_address,
            proxy,
            stats,
            sink,
            reports,
            policy,
            listeners,
            runtime,
        }
    }

    /// Removes the rules of endpoint 8, which has the address [`NEIGHBOUR`].
    pub(crate) fn remove_neighbour_rules(&self) {
        self.policy.apply(&[], &[EndpointId(8)]);
    }

    /// Gives endpoint 8 its initial rules.
    pub(crate) fn set_neighbour_rules(&self) {
        let rules = RulesOf {
            endpoint: EndpointId(8),
            rules: rules(self.server_address.port(), Vec::new()),
        };
        assert!(self.policy.apply(&[rules], &[]).is_empty());
    }

    /// A client with its own port.
    pub(crate) fn client(&self) -> UdpSocket {
        self.client_from(self.proxy.ip())
    }

    pub(crate) fn tcp_client(&self) -> TcpStream {
        patient(TcpStream::connect(self.proxy).unwrap())
    }

    /// A TCP client with an address of its own.
    pub(crate) fn tcp_client_from(&self, from: IpAddr) -> TcpStream {
        let domain = Domain::for_address(self.proxy);
        let socket = Socket::new(domain, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::new(from, 0).into()).unwrap();
        // A proxy that refuses the connection may end it before this call returns.
        if let Err(error) = socket.connect(&self.proxy.into()) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        }
        patient(socket.into())
    }

    /// A UDP client with an address of its own.
    pub(crate) fn client_from(&self, from: IpAddr) -> UdpSocket {
        let client = UdpSocket::bind((from, 0)).unwrap();
        client.connect(self.proxy).unwrap();
        client.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        client
    }

    /// Waits for a connection at the server.
    pub(crate) fn tcp_at_server(&self) -> TcpStream {
        patient(self.tcp_server.accept().unwrap().0)
    }

    /// Waits for a query at the server.
    pub(crate) fn at_server(&self) -> (Vec<u8>, SocketAddr) {
        let mut buffer = vec![0; 65_535];
        let (len, from) = self.server.recv_from(&mut buffer).unwrap();
        buffer.truncate(len);
        (buffer, from)
    }

    /// Waits for a query at the server and answers it with one address.
    pub(crate) fn serve(&self, address: &str) -> Vec<u8> {
        let (query, from) = self.at_server();
        self.server
            .send_to(&answer(&query, &[address]), from)
            .unwrap();
        query
    }
}

/// UDP and TCP on one port that is free for both.
fn server_sockets(ip: IpAddr) -> (UdpSocket, TcpListener) {
    for _ in 0..64 {
        let udp = UdpSocket::bind((ip, 0)).unwrap();
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()) {
            return (udp, tcp);
        }
    }
    panic!("no port is free for UDP and TCP");
}

fn rules(port: u16, allow: Vec<String>) -> EndpointRules {
    let mut names = vec![
        NameRule::Pattern("*.good.example".to_owned()),
        NameRule::Name("exact.example".to_owned()),
    ];
    names.extend(allow.into_iter().map(NameRule::Pattern));
    let at = |transport| PortRules {
        port,
        transport,
        rules: vec![SelectorRule {
            selector: "servers".to_owned(),
            servers: Servers::Identities([IdentityId(1053)].into()),
            names: NameRules::Names(names.clone()),
        }],
    };
    EndpointRules {
        ports: vec![at(Transport::Udp), at(Transport::Tcp)],
    }
}

/// A recursive query in wire format.
pub(crate) fn query(id: u16, name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::query();
    message.metadata.id = id;
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

/// An answer to `query` with addresses of TTL 300.
pub(crate) fn answer(query: &[u8], addresses: &[&str]) -> Vec<u8> {
    let query = Message::from_vec(query).unwrap();
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    let question = query.queries[0].clone();
    let name = question.name().clone();
    message.add_query(question);
    for address in addresses {
        let data = match address.parse().unwrap() {
            IpAddr::V4(ip) => RData::A(rdata::A(ip)),
            IpAddr::V6(ip) => RData::AAAA(rdata::AAAA(ip)),
        };
        message.add_answer(Record::from_rdata(name.clone(), 300, data));
    }
    message.to_vec().unwrap()
}

/// Response code of a message.
pub(crate) fn rcode(message: &[u8]) -> ResponseCode {
    Message::from_vec(message).unwrap().metadata.response_code
}

pub(crate) fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65_535];
    let len = socket.recv(&mut buffer).unwrap();
    buffer.truncate(len);
    buffer
}

fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Sends messages with their lengths, in one write.
pub(crate) fn send_frames(mut stream: &TcpStream, messages: &[&[u8]]) {
    let mut bytes = Vec::new();
    for message in messages {
        bytes.extend_from_slice(&u16::try_from(message.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(message);
    }
    stream.write_all(&bytes).unwrap();
}

/// Receives one message; `None` when the peer closed.
pub(crate) fn receive_frame(mut stream: &TcpStream) -> Option<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).ok()?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut message).ok()?;
    Some(message)
}
