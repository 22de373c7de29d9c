//! Keeps the proxy port for root while no proxy runs.
//!
//! All sockets of one port must belong to one user. A local user who binds the port first could
//! therefore prevent every proxy from starting, and would get the pods' queries under TPROXY. A
//! bound socket that receives nothing prevents this: root's proxies share the port with it
//! (`SO_REUSEPORT`), and the kernel refuses other users.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use socket2::{Domain, SockAddr, SockRef, Socket, Type};

shared_maps::words! {
    /// The two transports of DNS.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Transport {
        Udp => "UDP",
        Tcp => "TCP",
    }
}

impl Transport {
    fn table(self, address: IpAddr) -> &'static str {
        match (self, address) {
            (Self::Udp, IpAddr::V4(_)) => "/proc/thread-self/net/udp",
            (Self::Udp, IpAddr::V6(_)) => "/proc/thread-self/net/udp6",
            (Self::Tcp, IpAddr::V4(_)) => "/proc/thread-self/net/tcp",
            (Self::Tcp, IpAddr::V6(_)) => "/proc/thread-self/net/tcp6",
        }
    }
}

/// Why the port is not held.
#[derive(Debug, thiserror::Error)]
#[error(
    "--tofqdns-proxy-port: {transport} port {at}{user}: {source}; while another user has it no \
     DNS proxy can start: `ss -lntup sport = :{port}` shows the process, end it",
    transport = .transport.as_str(), port = .at.port(),
    user = .user.map(|uid| format!(" is bound by uid {uid}")).unwrap_or_default()
)]
pub struct HoldError {
    transport: Transport,
    at: SocketAddr,
    /// Uid of the socket's owner, if the kernel lists the socket.
    user: Option<u32>,
    source: io::Error,
}

/// The sockets that hold the port.
#[derive(Debug)]
pub struct PortHold {
    wanted: Vec<(Transport, SocketAddr)>,
    held: BTreeMap<(Transport, SocketAddr), OwnedFd>,
}

impl PortHold {
    /// Holds no port until [`Self::take`] is called.
    pub fn new(port: u16, ipv4: bool, ipv6: bool) -> Self {
        let v4 = ipv4.then_some(IpAddr::from(Ipv4Addr::LOCALHOST));
        let v6 = ipv6.then_some(IpAddr::from(Ipv6Addr::LOCALHOST));
        let addresses = v4.into_iter().chain(v6);
        let wanted =
            addresses.flat_map(|ip| Transport::ALL.map(|of| (of, SocketAddr::new(ip, port))));
        Self {
            wanted: wanted.collect(),
            held: BTreeMap::new(),
        }
    }

    /// Binds the ports that are not bound yet. Returns the first error.
    pub fn take(&mut self) -> Result<(), HoldError> {
        let mut first = Ok(());
        for (transport, at) in &self.wanted {
            if self.held.contains_key(&(*transport, *at)) {
                continue;
            }
            let held = match transport {
                Transport::Udp => hold_udp(*at),
                Transport::Tcp => hold_tcp(*at),
            };
            match held {
                Ok(socket) => {
                    self.held.insert((*transport, *at), socket);
                }
                Err(error) if first.is_ok() => {
                    first = Err(HoldError {
                        transport: *transport,
                        at: *at,
                        user: user_of(*transport, *at),
                        source: error,
                    });
                }
                Err(_) => {}
            }
        }
        first
    }
}

/// A UDP socket that keeps a port for this user and receives nothing.
fn hold_udp(at: SocketAddr) -> io::Result<OwnedFd> {
    let socket = bound(at, Type::DGRAM)?.into();
    deafen(&socket, at.is_ipv6())?;
    Ok(socket)
}

/// A TCP socket that keeps a port for this user: it is bound but does not listen.
///
/// # Errors
/// Another user has the port, or the limit on open descriptors is reached.
pub fn hold_tcp(at: SocketAddr) -> io::Result<OwnedFd> {
    Ok(bound(at, Type::STREAM)?.into())
}

/// A bound socket without SO_REUSEADDR: with it, other users could bind the port, too.
fn bound(at: SocketAddr, kind: Type) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), kind.nonblocking(), None)?;
    if at.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_port(true)?;
    socket.bind(&SockAddr::from(at))?;
    Ok(socket)
}

/// Stops a UDP socket from receiving: connected to a peer that never sends, it gets no new
/// datagrams while its queue stays readable.
///
/// # Errors
/// The errors of connect(2).
pub fn deafen(socket: &OwnedFd, ipv6: bool) -> io::Result<()> {
    let peer: IpAddr = if ipv6 {
        Ipv6Addr::LOCALHOST.into()
    } else {
        Ipv4Addr::LOCALHOST.into()
    };
    // No client sends from port 9 (discard, RFC 863).
    SockRef::from(socket).connect(&SockAddr::from(SocketAddr::from((peer, 9))))
}

/// Uid of the socket that is bound to `at`, from the list of proc(5).
fn user_of(transport: Transport, at: SocketAddr) -> Option<u32> {
    let table = fs::read_to_string(transport.table(at.ip())).ok()?;
    user_in(&table, at)
}

fn user_in(table: &str, at: SocketAddr) -> Option<u32> {
    let bytes = match at.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let words = bytes
        .chunks_exact(4)
        .filter_map(|word| word.try_into().ok());
    let address: String = words
        .map(|word| format!("{:08X}", u32::from_ne_bytes(word)))
        .collect();
    let place = format!("{address}:{:04X}", at.port());
    table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        (fields.nth(1)? == place).then(|| fields.nth(5)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn the_owner_of_a_port_is_read_from_the_kernels_list() {
        let v4 = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
             7: 0100007F:276E 00000000:0000 07 00000000:00000000 00:00000000 00000000  4711        0 9 2 0 0\n";
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 10094);
        assert_eq!(user_in(v4, at("127.0.0.1")), Some(4711));
        assert_eq!(user_in(v4, at("127.0.0.2")), None);
        let v6 = "7: 00000000000000000000000001000000:276E 0:0 07 0:0 00:0 0 12 0 9 2 0 0\n";
        assert_eq!(user_in(v6, at("::1")), Some(12));
    }
}
