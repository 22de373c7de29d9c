//! The compared paths from a pod to the server.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;

use holdfast_e2e::{Lab, Pod};

/// Number of suffixes of the names. Each suffix has a pattern.
pub(super) const PATTERNS: u32 = 100;
/// IPv4 address of the DNS server under load.
pub(super) const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
/// IPv6 address of the DNS server under load.
pub(super) const SERVER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x53, 0, 0, 0, 0, 2));

/// The server's port, with 100 patterns in the proxy's policy.
pub(crate) const PORT: u16 = 53;
/// The server's other port, with 10,000 patterns.
pub(crate) const PORT_MANY: u16 = 5353;
/// IPv4 address that the forwarders listen on.
pub(crate) const FORWARDER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));
/// IPv6 address that the forwarders listen on.
pub(crate) const FORWARDER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1));
/// Port of the raw forwarder, UDP and TCP.
pub(crate) const RAW_PORT: u16 = 5300;
pub(crate) const DNSDIST_PORT: u16 = 5301;

/// The program between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// No program: the pod queries the server itself.
    Direct,
    /// A forwarder that only moves datagrams.
    Raw,
    /// A forwarder that only copies the bytes of connections.
    RawTcp,
    /// dnsdist as a plain forwarder.
    Dnsdist,
    /// The proxy, with 100 patterns in its policy.
    Proxy,
    /// The proxy, with 10,000 patterns in its policy.
    ProxyMany,
    /// The proxy in transparent mode, 100 patterns.
    ProxyTransparent,
    /// The proxy under a stand-in Cilium agent, 100 patterns, in a lab of its own.
    ProxyUnderCilium,
}

impl Route {
    /// Whether the path includes holdfast-sdp.
    pub(crate) fn is_proxy(self) -> bool {
        matches!(
            self,
            Self::Proxy | Self::ProxyMany | Self::ProxyTransparent | Self::ProxyUnderCilium
        )
    }
}

/// Transport, source ports and rate of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// UDP, IPv4, few source ports; also latency at a steady rate.
    Main,
    /// Only latency at a steady rate, for names that were never queried before.
    New,
    /// Queries over UDP and IPv6.
    Ipv6,
    /// UDP from tens of thousands of source ports.
    ManyPorts,
    /// Many queries on each TCP connection.
    TcpPipelined,
    /// TCP connections with one query each.
    TcpSingle,
}

/// A compared path, which is one row of the report.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) name: &'static str,
    pub(crate) route: Route,
    pub(crate) kind: Kind,
}

const fn path(name: &'static str, route: Route, kind: Kind) -> Path {
    Path { name, route, kind }
}

/// All paths in the order of one round. Compared paths are next to each other.
pub(crate) const PATHS: [Path; 23] = [
    path("direct", Route::Direct, Kind::Main),
    path("raw_forwarder", Route::Raw, Kind::Main),
    path("sdp", Route::Proxy, Kind::Main),
    path("sdp_under_cilium", Route::ProxyUnderCilium, Kind::Main),
    path("sdp_10000_patterns", Route::ProxyMany, Kind::Main),
    path("sdp_transparent", Route::ProxyTransparent, Kind::Main),
    path("dnsdist", Route::Dnsdist, Kind::Main),
    path("direct_new_names", Route::Direct, Kind::New),
    path("sdp_new_names", Route::Proxy, Kind::New),
    path("direct_ipv6", Route::Direct, Kind::Ipv6),
    path("raw_forwarder_ipv6", Route::Raw, Kind::Ipv6),
    path("sdp_ipv6", Route::Proxy, Kind::Ipv6),
    path("direct_many_ports", Route::Direct, Kind::ManyPorts),
    path("raw_forwarder_many_ports", Route::Raw, Kind::ManyPorts),
    path("sdp_many_ports", Route::Proxy, Kind::ManyPorts),
    path(
        "sdp_under_cilium_many_ports",
        Route::ProxyUnderCilium,
        Kind::ManyPorts,
    ),
    path("direct_tcp_pipelined", Route::Direct, Kind::TcpPipelined),
    path(
        "raw_forwarder_tcp_pipelined",
        Route::RawTcp,
        Kind::TcpPipelined,
    ),
    path("sdp_tcp_pipelined", Route::Proxy, Kind::TcpPipelined),
    path(
        "sdp_transparent_tcp_pipelined",
        Route::ProxyTransparent,
        Kind::TcpPipelined,
    ),
    path("direct_tcp_single", Route::Direct, Kind::TcpSingle),
    path("raw_forwarder_tcp_single", Route::RawTcp, Kind::TcpSingle),
    path("sdp_tcp_single", Route::Proxy, Kind::TcpSingle),
];

impl Path {
    /// Address to which the pod sends its queries.
    pub(crate) fn address(&self) -> SocketAddr {
        let v6 = self.kind == Kind::Ipv6;
        let server = if v6 { SERVER6 } else { SERVER };
        let forwarder = if v6 { FORWARDER6 } else { FORWARDER };
        match self.route {
            Route::Direct | Route::Proxy | Route::ProxyTransparent | Route::ProxyUnderCilium => {
                SocketAddr::new(server, PORT)
            }
            Route::ProxyMany => SocketAddr::new(server, PORT_MANY),
            Route::Raw | Route::RawTcp => SocketAddr::new(forwarder, RAW_PORT),
            Route::Dnsdist => SocketAddr::new(forwarder, DNSDIST_PORT),
        }
    }

    /// Whether queries go over TCP.
    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self.kind, Kind::TcpPipelined | Kind::TcpSingle)
    }

    /// Pod that the client runs in.
    pub(crate) fn pod<'a>(&self, lab: &'a Lab) -> &'a Pod {
        match self.route {
            route if route.is_proxy() => &lab.a,
            _ => &lab.b,
        }
    }

    /// The load, without the options for its size.
    pub(crate) fn dnsperf(&self, lab: &Lab) -> Command {
        let to = self.address();
        let mut command = self.pod(lab).netns.command("dnsperf");
        command.arg(format!("-s{}", to.ip()));
        command.arg(format!("-p{}", to.port()));
        if self.is_tcp() {
            command.arg("-mtcp");
        }
        command
    }
}
