//! Sockets with the options that a transparent DNS proxy needs.
//!
//! Errors name the step that failed, so that a missing capability can be distinguished from a port
//! that is taken.

pub(crate) mod sys;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt};
use shared_maps::{IdentityId, mark};
use socket2::{Domain, Protocol, SockAddr, SockFilter, Socket, Type};

/// Size of the receive buffer of a UDP listener, bytes. The kernel's default holds only about 30
/// queries of 4 kB.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// A failed socket call, with its purpose and its reason.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub(crate) struct SocketError {
    pub(crate) what: &'static str,
    pub(crate) source: io::Error,
}

/// Names the step of a failed call.
trait Step<T> {
    fn step(self, what: &'static str) -> Result<T, SocketError>;
}

impl<T> Step<T> for io::Result<T> {
    fn step(self, what: &'static str) -> Result<T, SocketError> {
        self.map_err(|source| SocketError { what, source })
    }
}

/// An unbound UDP socket for queries, which are redirected to it if `transparent`.
pub(crate) fn udp_listener(at: SocketAddr, transparent: bool) -> Result<OwnedFd, SocketError> {
    let socket = open(at, Type::DGRAM)?;
    // SO_REUSEADDR is not set: with it, a socket of any user could join a UDP port and take its
    // datagrams.
    socket
        .set_reuse_port(true)
        .step("cannot set SO_REUSEPORT")?;
    if transparent {
        refuse_local(&socket)?;
        make_transparent(&socket, at)?;
        sys::receive_original_destination(&socket, at.is_ipv6())
            .step("cannot ask for original destinations (IP_RECVORIGDSTADDR)")?;
    }
    // A buffer larger than rmem_max needs CAP_NET_ADMIN. Without it the buffer is smaller, which is
    // no failure.
    if sys::force_receive_buffer(&socket, RECEIVE_BUFFER).is_err() {
        socket
            .set_recv_buffer_size(RECEIVE_BUFFER)
            .step("cannot set the receive buffer")?;
    }
    sys::count_overflow(&socket).step("cannot count overflows (SO_RXQ_OVFL)")?;
    Ok(socket.into())
}

/// Binds a socket that [`udp_listener`] made.
pub(crate) fn bind_udp(socket: &OwnedFd, at: SocketAddr) -> Result<(), SocketError> {
    socket2::SockRef::from(socket)
        .bind(&SockAddr::from(at))
        .step("cannot bind UDP")
}

/// An unbound TCP socket for connections, which are redirected to it if `transparent`.
pub(crate) fn tcp_listener(at: SocketAddr, transparent: bool) -> Result<Socket, SocketError> {
    let socket = open(at, Type::STREAM)?;
    shared_port(&socket)?;
    // Accepted connections inherit the option.
    socket
        .set_tcp_nodelay(true)
        .step("cannot set TCP_NODELAY")?;
    if transparent {
        refuse_local(&socket)?;
        make_transparent(&socket, at)?;
    }
    Ok(socket)
}

/// Binds a socket that [`tcp_listener`] made, and listens.
pub(crate) fn listen(socket: &Socket, at: SocketAddr) -> Result<(), SocketError> {
    socket.bind(&SockAddr::from(at)).step("cannot bind TCP")?;
    socket.listen(BACKLOG).step("cannot listen on TCP")
}

/// A socket that sends answers from `port` of any address. The source address is given for each
/// packet.
///
/// It is bound to an address to which no client sends queries, so that it receives nothing that is
/// meant for other sockets.
pub(crate) fn udp_reply(ipv6: bool, port: u16, dummy: u16) -> Result<OwnedFd, SocketError> {
    let [high, low] = dummy.to_be_bytes();
    let at = if ipv6 {
        SocketAddr::from((Ipv6Addr::new(0xfd53, 0, 0, 0, 0, 0, 0, dummy), port))
    } else {
        SocketAddr::from((Ipv4Addr::new(127, 53, high, low), port))
    };
    let socket = open(at, Type::DGRAM)?;
    shared_port(&socket)?;
    make_transparent(&socket, at)?;
    // No process reads from it.
    socket
        .set_recv_buffer_size(1)
        .step("cannot set the receive buffer")?;
    socket
        .bind(&SockAddr::from(at))
        .step("cannot bind the reply socket")?;
    Ok(socket.into())
}

/// A raw socket that sends UDP datagrams with headers written by its user. It receives nothing.
pub(crate) fn raw_reply(ipv6: bool) -> Result<OwnedFd, SocketError> {
    let (domain, any) = if ipv6 {
        (Domain::IPV6, IpAddr::from(Ipv6Addr::UNSPECIFIED))
    } else {
        (Domain::IPV4, IpAddr::from(Ipv4Addr::UNSPECIFIED))
    };
    let socket = Socket::new(domain, Type::RAW, Some(Protocol::UDP))
        .step("cannot open a raw socket (needs CAP_NET_RAW)")?;
    // Without a filter, the socket would get a copy of every datagram of the node. This filter
    // accepts none (`ret 0`).
    let nothing = SockFilter::new(0x06, 0, 0, 0);
    socket
        .attach_filter(&[nothing])
        .step("cannot attach a filter")?;
    socket.set_nonblocking(true).step("cannot set O_NONBLOCK")?;
    make_transparent(&socket, SocketAddr::new(any, 0))?;
    if ipv6 {
        sys::udp_checksum_by_kernel(&socket).step("cannot set IPV6_CHECKSUM")?;
    }
    Ok(socket.into())
}

/// A UDP socket connected to `server`. It sends from `source`, which need not be an address of the
/// node (port 0: the kernel selects a random port). Without `source`, it sends from the address
/// that the route selects.
pub(crate) fn udp_upstream(
    server: SocketAddr,
    identity: Option<IdentityId>,
    source: Option<SocketAddr>,
) -> Result<OwnedFd, SocketError> {
    let socket = open(server, Type::DGRAM)?;
    set_mark(&socket, identity)?;
    bind_source(&socket, source)?;
    // The size is limited as for an unprivileged user: the kernel reduces it to net.core.rmem_max.
    socket
        .set_recv_buffer_size(RECEIVE_BUFFER)
        .step("cannot set the receive buffer")?;
    connect_udp(socket, server)
}

/// Whether other sockets may have the address and port of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlowPort {
    /// No other socket has it. Later sockets with [`Self::Shared`] can have it, too.
    New,
    /// The same worker has the address for other servers.
    Shared,
}

/// A UDP socket of one flow: from `source`, the address and port of a client, to `server`.
pub(crate) fn udp_flow(
    server: SocketAddr,
    identity: Option<IdentityId>,
    source: SocketAddr,
    port: FlowPort,
) -> Result<OwnedFd, SocketError> {
    let socket = open(server, Type::DGRAM)?;
    set_mark(&socket, identity)?;
    let share = || {
        let shared = socket.set_reuse_port(true);
        shared.step("cannot set SO_REUSEPORT")
    };
    if port == FlowPort::Shared {
        share()?;
    }
    bind_source(&socket, Some(source))?;
    // Set only after binding, so that a second socket of the same flow cannot be bound: the kernel
    // would give all answers to one of them.
    if port == FlowPort::New {
        share()?;
    }
    connect_udp(socket, server)
}

fn connect_udp(socket: Socket, server: SocketAddr) -> Result<OwnedFd, SocketError> {
    let reported = if server.is_ipv6() {
        setsockopt(&socket, sockopt::Ipv6RecvErr, &true)
    } else {
        setsockopt(&socket, sockopt::Ipv4RecvErr, &true)
    };
    reported
        .map_err(io::Error::from)
        .step("cannot ask for ICMP errors (IP_RECVERR)")?;
    socket
        .connect(&SockAddr::from(server))
        .step("cannot connect to the server")?;
    Ok(socket.into())
}

/// An unconnected TCP socket for a connection to `server`; `source` as in [`udp_upstream`].
pub(crate) fn tcp_upstream(
    server: SocketAddr,
    identity: Option<IdentityId>,
    source: Option<SocketAddr>,
) -> Result<Socket, SocketError> {
    let socket = open(server, Type::STREAM)?;
    set_mark(&socket, identity)?;
    match source.map(|source| source.port()) {
        None => {}
        // The kernel chooses the port when the socket connects, so the port is taken only for this
        // server and not for all servers.
        Some(0) => setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)
            .map_err(io::Error::from)
            .step("cannot set IP_BIND_ADDRESS_NO_PORT")?,
        // Connections to other servers may have the port, too. No two connections have the same
        // flow.
        Some(_) => socket
            .set_reuse_address(true)
            .step("cannot set SO_REUSEADDR")?,
    }
    bind_source(&socket, source)?;
    socket
        .set_tcp_nodelay(true)
        .step("cannot set TCP_NODELAY")?;
    if source.is_none() {
        // The connection ends with a reset, so that its port is free at once. Otherwise the port
        // would stay in TIME_WAIT for a minute. The connection is closed only when no client waits
        // for an answer on it. With a pod's address it takes no port of the node.
        socket
            .set_linger(Some(Duration::ZERO))
            .step("cannot set SO_LINGER")?;
    }
    Ok(socket)
}

fn open(at: SocketAddr, kind: Type) -> Result<Socket, SocketError> {
    let protocol = if kind == Type::DGRAM {
        Protocol::UDP
    } else {
        Protocol::TCP
    };
    let socket = Socket::new(Domain::for_address(at), kind.nonblocking(), Some(protocol))
        .step("cannot open a socket")?;
    if at.is_ipv6() {
        socket.set_only_v6(true).step("cannot set IPV6_V6ONLY")?;
    }
    Ok(socket)
}

fn shared_port(socket: &Socket) -> Result<(), SocketError> {
    socket
        .set_reuse_address(true)
        .step("cannot set SO_REUSEADDR")?;
    socket.set_reuse_port(true).step("cannot set SO_REUSEPORT")
}

fn bind_source(socket: &Socket, source: Option<SocketAddr>) -> Result<(), SocketError> {
    let Some(source) = source else {
        return Ok(());
    };
    allow_any_source(socket, source)?;
    socket
        .bind(&SockAddr::from(source))
        .step("cannot bind to the pod's address")
}

/// Drops every packet that a process of the node sends by the loopback interface, before the packet
/// takes a place in the queue. Redirected packets come by the interface of a pod. Where steering
/// runs, it drops these packets earlier, and their senders get an error.
fn refuse_local(socket: &Socket) -> Result<(), SocketError> {
    /// `LOOPBACK_IFINDEX` of the kernel.
    const LOOPBACK: u32 = 1;
    /// `SKF_AD_OFF + SKF_AD_IFINDEX`.
    const INTERFACE: u32 = 0_u32.wrapping_sub(0x1000).wrapping_add(8);
    let program = [
        // Load the index of the interface.
        SockFilter::new(0x20, 0, 0, INTERFACE),
        // Skip one instruction if it is another interface.
        SockFilter::new(0x15, 0, 1, LOOPBACK),
        SockFilter::new(0x06, 0, 0, 0),
        SockFilter::new(0x06, 0, 0, u32::MAX),
    ];
    match socket.attach_filter(&program) {
        // Newer kernels require CAP_NET_ADMIN for TCP. A proxy without it has an agent that steers.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::debug!(%error, "no filter on a listener: only steering drops packets of local processes");
            Ok(())
        }
        result => result.step("cannot attach a filter (SO_ATTACH_FILTER)"),
    }
}

/// Lets the socket be bound to an address that is not the node's own, of the same family as `of`.
fn allow_any_source(socket: &Socket, of: SocketAddr) -> Result<(), SocketError> {
    let made = if of.is_ipv6() {
        socket.set_ip_transparent_v6(true)
    } else {
        socket.set_ip_transparent_v4(true)
    };
    made.step("cannot make a socket transparent (needs CAP_NET_ADMIN or CAP_NET_RAW)")
}

fn make_transparent(socket: &Socket, at: SocketAddr) -> Result<(), SocketError> {
    allow_any_source(socket, at)?;
    socket
        .set_mark(mark::MAGIC_FROM_EGRESS_PROXY)
        .step("cannot mark a socket (needs CAP_NET_ADMIN or CAP_NET_RAW)")
}

fn set_mark(socket: &Socket, identity: Option<IdentityId>) -> Result<(), SocketError> {
    match identity {
        None => Ok(()),
        Some(identity) => socket
            .set_mark(mark::from_proxy(identity))
            .step("cannot mark a socket (needs CAP_NET_ADMIN or CAP_NET_RAW)"),
    }
}

#[cfg(test)]
mod tests {
    use daemon::port_hold::PortHold;

    use super::*;

    #[test]
    fn proxies_of_the_same_user_share_a_held_port_and_get_all_of_it() {
        let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = free.local_addr().unwrap();
        drop(free);
        let mut hold = PortHold::new(at.port(), true, false);
        hold.take().unwrap();
        hold.take().unwrap();
        let udp = udp_listener(at, false).unwrap();
        bind_udp(&udp, at).unwrap();
        let tcp = tcp_listener(at, false).unwrap();
        listen(&tcp, at).unwrap();
        let proxy = std::net::UdpSocket::from(udp);
        proxy.set_nonblocking(false).unwrap();
        proxy
            .set_read_timeout(Some(std::time::Duration::from_secs(5)))
            .unwrap();
        for _ in 0..64 {
            let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            client.send_to(b"x", at).unwrap();
            proxy.recv(&mut [0; 8]).unwrap();
            std::net::TcpStream::connect(at).unwrap();
            tcp.set_nonblocking(false).unwrap();
            tcp.accept().unwrap();
        }
    }
}
