//! Which ports of other pods a pod reaches: TCP handshakes, UDP datagrams and SCTP packets.
//!
//! SCTP packets are written by hand and sent through raw sockets, so that no kernel module is
//! needed: an INIT, answered by an INIT ACK.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use netpol::policy::Protocol;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rand::Rng as _;
use socket2::{Domain, Socket, Type};

use crate::listening::listen;
use crate::netns::Netns;

/// Longest wait for wanted answers.
const LIMIT: Duration = Duration::from_millis(700);
/// Wait for unwanted answers after the wanted answers have arrived. Packets between pods of one
/// node are delivered while they are sent.
const QUIET: Duration = Duration::from_millis(100);
/// How often a thread checks whether it must stop, milliseconds.
const TICK: u16 = 50;

const SCTP: i32 = 132;
const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const TAG: u32 = 1;

/// A port of a pod, with its protocol, that a probe tries to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    pub at: SocketAddr,
    pub protocol: Protocol,
}

/// Servers of one pod on TCP, UDP and SCTP ports; stopped when dropped.
#[derive(Debug)]
pub struct Servers {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Servers {
    /// Serves these ports on every address of the pod.
    pub fn start(netns: &Netns, ports: &[u16]) -> Result<Self> {
        let sockets = netns.enter(|| Sockets::bind(ports))??;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                wait(sockets.all(), PollFlags::POLLIN);
                sockets.serve();
            }
        });
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Sockets {
    tcp: Vec<TcpListener>,
    udp: Vec<UdpSocket>,
    sctp: [UdpSocket; 2],
    ports: Vec<u16>,
}

impl Sockets {
    fn bind(ports: &[u16]) -> Result<Self> {
        let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let (mut tcp, mut udp) = (Vec::new(), Vec::new());
        for port in ports {
            let listener = listen(SocketAddr::new(any, *port)).context("TCP server")?;
            tcp.push(listener);
            let socket = UdpSocket::bind((any, *port)).context("UDP server")?;
            socket.set_nonblocking(true)?;
            udp.push(socket);
        }
        Ok(Self {
            tcp,
            udp,
            sctp: [raw(Domain::IPV4)?, raw(Domain::IPV6)?],
            ports: ports.to_vec(),
        })
    }

    fn all(&self) -> Vec<BorrowedFd<'_>> {
        let tcp = self.tcp.iter().map(AsFd::as_fd);
        let datagrams = self.udp.iter().chain(&self.sctp).map(AsFd::as_fd);
        tcp.chain(datagrams).collect()
    }

    /// Answers everything that has arrived.
    fn serve(&self) {
        for listener in &self.tcp {
            while listener.accept().is_ok() {}
        }
        for socket in &self.udp {
            each_datagram(socket, |from, bytes| {
                let _ = socket.send_to(bytes, from);
            });
        }
        for socket in &self.sctp {
            each_datagram(socket, |from, bytes| {
                let packet = SctpPacket::parse(from, bytes);
                let asked = packet.filter(|p| p.chunk == INIT && self.ports.contains(&p.to));
                if let Some(SctpPacket {
                    from: client, to, ..
                }) = asked
                {
                    let answer = SctpPacket {
                        from: to,
                        to: client,
                        chunk: INIT_ACK,
                    };
                    let _ = socket.send_to(&answer.bytes(), SocketAddr::new(from.ip(), 0));
                }
            });
        }
    }
}

/// The targets that answer packets sent from inside `netns`. `wanted` are the targets that must
/// answer. Once they have answered, the other targets get only a tenth of a second more.
pub fn answering(
    netns: &Netns,
    targets: &BTreeSet<Target>,
    wanted: &BTreeSet<Target>,
) -> Result<BTreeSet<Target>> {
    netns.enter(|| -> Result<BTreeSet<Target>> {
        let mut probe = Probe::send(targets)?;
        let mut end = Instant::now() + LIMIT;
        let mut complete = false;
        while Instant::now() < end {
            probe.receive();
            if !complete && probe.answered.is_superset(wanted) {
                complete = true;
                end = Instant::now() + QUIET;
            }
        }
        Ok(probe.answered)
    })?
}

/// Unanswered packets of one client.
struct Probe {
    /// Connections that are neither established nor refused yet.
    tcp: Vec<(Socket, Target)>,
    udp: [UdpSocket; 2],
    sctp: [UdpSocket; 2],
    /// Source port of the client's SCTP packets.
    sctp_port: u16,
    answered: BTreeSet<Target>,
}

impl Probe {
    fn send(targets: &BTreeSet<Target>) -> Result<Self> {
        let udp = |any: IpAddr| -> Result<UdpSocket> {
            let socket = UdpSocket::bind((any, 0))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let mut probe = Self {
            tcp: Vec::new(),
            udp: [
                udp(Ipv4Addr::UNSPECIFIED.into())?,
                udp(Ipv6Addr::UNSPECIFIED.into())?,
            ],
            sctp: [raw(Domain::IPV4)?, raw(Domain::IPV6)?],
            sctp_port: rand::rng().random_range(20_000..60_000),
            answered: BTreeSet::new(),
        };
        for target in targets {
            probe
                .start(*target)
                .with_context(|| format!("send to {target:?}"))?;
        }
        Ok(probe)
    }

    fn start(&mut self, target: Target) -> Result<()> {
        let family = usize::from(target.at.is_ipv6());
        match target.protocol {
            Protocol::Tcp => {
                let socket = Socket::new(Domain::for_address(target.at), Type::STREAM, None)?;
                socket.set_nonblocking(true)?;
                socket.set_linger(Some(Duration::ZERO))?;
                match socket.connect(&target.at.into()) {
                    Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error)?,
                    _ => self.tcp.push((socket, target)),
                }
            }
            Protocol::Udp => {
                self.udp[family].send_to(b"ask", target.at)?;
            }
            Protocol::Sctp => {
                let packet = SctpPacket {
                    from: self.sctp_port,
                    to: target.at.port(),
                    chunk: INIT,
                };
                let to = SocketAddr::new(target.at.ip(), 0);
                self.sctp[family].send_to(&packet.bytes(), to)?;
            }
        }
        Ok(())
    }

    /// Waits one tick at most, then records the packets that have arrived.
    fn receive(&mut self) {
        let datagrams = self.udp.iter().chain(&self.sctp).map(AsFd::as_fd);
        let datagrams = datagrams.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let tcp = self.tcp.iter();
        let tcp = tcp.map(|(socket, _)| PollFd::new(socket.as_fd(), PollFlags::POLLOUT));
        let mut all: Vec<PollFd<'_>> = datagrams.chain(tcp).collect();
        let _ = poll(&mut all, PollTimeout::from(TICK));
        let answered = &mut self.answered;
        self.tcp
            .retain(|(socket, target)| match socket.peer_addr() {
                Ok(_) => {
                    answered.insert(*target);
                    false
                }
                Err(_) => matches!(socket.take_error(), Ok(None)),
            });
        for socket in &self.udp {
            each_datagram(socket, |at, _| {
                answered.insert(Target {
                    at,
                    protocol: Protocol::Udp,
                });
            });
        }
        for socket in &self.sctp {
            each_datagram(socket, |from, bytes| {
                let packet = SctpPacket::parse(from, bytes);
                let own = |p: &SctpPacket| p.chunk == INIT_ACK && p.to == self.sctp_port;
                if let Some(packet) = packet.filter(own) {
                    answered.insert(Target {
                        at: SocketAddr::new(from.ip(), packet.from),
                        protocol: Protocol::Sctp,
                    });
                }
            });
        }
    }
}

/// Ports and first chunk of an SCTP packet (RFC 9260 section 3).
struct SctpPacket {
    from: u16,
    to: u16,
    chunk: u8,
}

impl SctpPacket {
    /// The packet in the bytes from a raw socket. IPv4 packets begin with their IP header.
    fn parse(from: SocketAddr, bytes: &[u8]) -> Option<Self> {
        let header = match from {
            SocketAddr::V4(_) => usize::from(bytes.first()? & 0x0f) * 4,
            SocketAddr::V6(_) => 0,
        };
        let packet = bytes.get(header..)?;
        let [a, b, c, d] = *packet.first_chunk::<4>()?;
        Some(Self {
            from: u16::from_be_bytes([a, b]),
            to: u16::from_be_bytes([c, d]),
            chunk: *packet.get(12)?,
        })
    }

    /// The bytes of the packet in a form that conntrack accepts. The chunk has the minimal length.
    /// Both sides use the same verification tag, except that an INIT must have 0.
    fn bytes(&self) -> Vec<u8> {
        let known = match self.chunk {
            INIT => 0,
            _ => TAG,
        };
        let mut bytes = Vec::new();
        bytes.extend(self.from.to_be_bytes());
        bytes.extend(self.to.to_be_bytes());
        bytes.extend(known.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend([self.chunk, 0, 0, 20]);
        bytes.extend(TAG.to_be_bytes());
        // Window, numbers of streams in both directions, and the first sequence number.
        bytes.extend([0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
        let checksum = crc32c(&bytes).to_le_bytes();
        bytes[8..12].copy_from_slice(&checksum);
        bytes
    }
}

/// The checksum of SCTP (RFC 9260 appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        let crc = crc ^ u32::from(*byte);
        (0..8).fold(crc, |crc, _| match crc & 1 {
            0 => crc >> 1,
            _ => crc >> 1 ^ 0x82f6_3b78,
        })
    });
    !crc
}

fn raw(domain: Domain) -> Result<UdpSocket> {
    let socket = Socket::new(domain, Type::RAW, Some(SCTP.into()));
    let socket = socket.context("raw SCTP socket (this needs root)")?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn wait(sockets: Vec<BorrowedFd<'_>>, what: PollFlags) {
    let sockets = sockets.into_iter().map(|fd| PollFd::new(fd, what));
    let mut sockets: Vec<PollFd<'_>> = sockets.collect();
    let _ = poll(&mut sockets, PollTimeout::from(TICK));
}

/// Calls `each` for every datagram that has arrived at a socket.
fn each_datagram(socket: &UdpSocket, mut each: impl FnMut(SocketAddr, &[u8])) {
    let mut buffer = [0; 2048];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((length, from)) => each(from, buffer.get(..length).unwrap_or_default()),
            // This is an ICMP error about an earlier datagram.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            Err(_) => return,
        }
    }
}
