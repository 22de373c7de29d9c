//! UDP queries of one pod through raw sockets: one source port after another.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use rand::Rng as _;
use shared_maps::user::monotonic_ns;
use socket2::{Domain, Protocol, Socket, Type};

use super::names::{Asked, Names};
use super::{Common, Counts, Pace, Spec};
use crate::netns::Netns;

/// Lowest source port of a sender.
const FIRST_PORT: u16 = 10_000;
/// Number of source ports of one address. At the usual rates a port is used again after 20 s or
/// more.
const PORTS: u16 = 32_000;
/// Maximum number of queries that are sent at once after a pause.
const BURST: u64 = 64;
/// A sender that did not run for a while sends the missed queries of a `CATCH_UP`-th of a second at
/// most. A pod that sends seconds of queries at once would exceed its quota in the datapath.
const CATCH_UP: u64 = 4;
/// Size of the receive buffer in bytes: enough for the answers of some seconds.
const RECEIVE_BUFFER: usize = 16 << 20;
const IP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
const DNS: u16 = 53;
const UDP: u8 = 17;

/// A query on its way.
struct Flight {
    asked: Asked,
    sent_at: u64,
}

/// The queries of one family of the pod.
struct Lane {
    socket: UdpSocket,
    own: IpAddr,
    server: IpAddr,
    /// Queries in flight by source port, counted from [`FIRST_PORT`].
    flights: Vec<Option<Flight>>,
    next: u16,
    used: u16,
    open: usize,
}

/// Sender of all UDP queries of one pod.
pub(super) struct Sender {
    lanes: Vec<Lane>,
    names: Names,
    pace: Pace,
    lost_after: Duration,
    counts: Counts,
    buffer: Vec<u8>,
}

impl Sender {
    pub(super) fn new(spec: &Spec, number: usize) -> Result<Self> {
        let client = spec.clients.get(number).context("such a client")?;
        let netns = Netns::existing(&client.netns);
        let mut lanes = Vec::new();
        for server in &spec.servers {
            let same = |own: &&IpAddr| own.is_ipv4() == server.is_ipv4();
            let Some(own) = client.addresses.iter().find(same) else {
                continue;
            };
            let socket = netns.enter(|| raw(*own))??;
            lanes.push(Lane {
                socket,
                own: *own,
                server: *server,
                flights: (0..PORTS).map(|_| None).collect(),
                next: 0,
                used: 0,
                open: 0,
            });
        }
        Ok(Self {
            lanes,
            names: spec.names,
            pace: Pace {
                per_second: spec.udp_rate,
                among: spec.clients.len(),
            },
            lost_after: spec.lost_after,
            counts: Counts::default(),
            buffer: Vec::with_capacity(512),
        })
    }

    /// Sends until it is stopped. Returns the outcome, and the number of used ports.
    pub(super) fn run(mut self, common: &Common) -> (Counts, u64) {
        let mut rng = rand::rng();
        let start = Instant::now();
        let mut stopped = None;
        let mut counted = (0, 0);
        let mut turn = 0;
        let mut skipped = 0;
        while !self.lanes.is_empty() {
            if stopped.is_none() && common.stop.load(Ordering::Acquire) {
                stopped = Some(Instant::now());
            }
            match stopped {
                None => {
                    let behind = self
                        .pace
                        .due(start)
                        .saturating_sub(skipped + self.counts.sent);
                    let most = self.pace.of_a_second(CATCH_UP).max(BURST);
                    skipped += behind.saturating_sub(most);
                    let burst = behind.min(BURST);
                    for _ in 0..burst {
                        let lane = turn % self.lanes.len();
                        turn += 1;
                        let asked = Asked::new(rng.random(), self.names.pick(&mut rng));
                        self.send(lane, asked);
                    }
                }
                Some(since) => {
                    let open = self.lanes.iter().any(|lane| lane.open > 0);
                    if !open || since.elapsed() > self.lost_after {
                        break;
                    }
                }
            }
            let mut waiting: Vec<PollFd<'_>> = self
                .lanes
                .iter()
                .map(|lane| PollFd::new(lane.socket.as_fd(), PollFlags::POLLIN))
                .collect();
            // The result is ignored, because available data is read even after an interruption.
            let _ = poll(&mut waiting, PollTimeout::from(1u8));
            for lane in 0..self.lanes.len() {
                self.receive(lane);
            }
            common
                .sent
                .fetch_add(self.counts.sent - counted.0, Ordering::Relaxed);
            common
                .right
                .fetch_add(self.counts.right - counted.1, Ordering::Relaxed);
            counted = (self.counts.sent, self.counts.right);
        }
        let mut ports = 0;
        for lane in &mut self.lanes {
            ports += u64::from(lane.used);
            for flight in lane.flights.iter_mut().filter_map(Option::take) {
                let server = lane.server;
                self.counts
                    .lost(flight.sent_at, || format!("no answer from {server}"));
            }
        }
        (self.counts, ports)
    }

    fn send(&mut self, number: usize, asked: Asked) {
        let lane = &mut self.lanes[number];
        let port = FIRST_PORT + lane.next;
        self.buffer.clear();
        self.buffer.extend_from_slice(&port.to_be_bytes());
        self.buffer.extend_from_slice(&DNS.to_be_bytes());
        self.buffer.extend_from_slice(&[0; 4]);
        asked.write(&mut self.buffer);
        let length = u16::try_from(self.buffer.len()).unwrap_or(u16::MAX);
        self.buffer[4..6].copy_from_slice(&length.to_be_bytes());
        let sum = checksum(lane.own, lane.server, &self.buffer);
        self.buffer[6..8].copy_from_slice(&sum.to_be_bytes());
        // A raw socket has no destination port: the field is the protocol or zero.
        let sent_at = monotonic_ns();
        if lane
            .socket
            .send_to(&self.buffer, SocketAddr::new(lane.server, 0))
            .is_err()
        {
            return; // Not sent: it stays due.
        }
        self.counts.sent += 1;
        let flight = Flight { asked, sent_at };
        match lane.flights[usize::from(lane.next)].replace(flight) {
            Some(old) => {
                let server = lane.server;
                self.counts
                    .lost(old.sent_at, || format!("no answer from {server}"));
            }
            None => lane.open += 1,
        }
        lane.next = (lane.next + 1) % PORTS;
        lane.used = lane
            .used
            .max(if lane.next == 0 { PORTS } else { lane.next });
    }

    fn receive(&mut self, number: usize) {
        let mut buffer = [0; 2048];
        loop {
            let lane = &mut self.lanes[number];
            let (length, from) = match lane.socket.recv_from(&mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => continue,
            };
            let header = if lane.own.is_ipv4() { IP_HEADER } else { 0 };
            let packet = buffer.get(header..length).unwrap_or_default();
            let port = |at: usize| {
                let bytes = packet.get(at..at + 2).and_then(|b| b.try_into().ok());
                bytes.map_or(0, u16::from_be_bytes)
            };
            let message = packet.get(UDP_HEADER..).unwrap_or_default();
            let place = port(2).checked_sub(FIRST_PORT).map(usize::from);
            let Some(place) = place.and_then(|place| lane.flights.get_mut(place)) else {
                self.counts.stray += 1;
                continue;
            };
            let Some(flight) = place.take() else {
                self.counts.stray += 1;
                self.counts
                    .sample(|| format!("an answer to port {} that asked nothing", port(2)));
                continue;
            };
            lane.open -= 1;
            let (source, server) = (port(0), lane.server);
            if from.ip() != server || source != DNS {
                let from = from.ip();
                self.counts
                    .wrong(|| format!("an answer from {from}, port {source}"));
                continue;
            }
            match flight.asked.check(message) {
                Ok(()) => self.counts.right(flight.sent_at),
                Err(why) => self.counts.wrong(|| format!("from {server}: {why}")),
            }
        }
    }
}

fn raw(own: IpAddr) -> Result<UdpSocket> {
    let address = SocketAddr::new(own, 0);
    let socket = Socket::new(Domain::for_address(address), Type::RAW, Some(Protocol::UDP))
        .context("a raw socket (this needs root)")?;
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    setsockopt(&socket, RcvBufForce, &RECEIVE_BUFFER).context("a large receive buffer")?;
    Ok(socket.into())
}

/// UDP checksum (RFC 768), with the pseudo header of the addresses' family.
fn checksum(from: IpAddr, to: IpAddr, udp: &[u8]) -> u16 {
    let mut sum = u32::from(UDP) + u32::try_from(udp.len()).unwrap_or(0);
    let mut add = |bytes: &[u8]| {
        for pair in bytes.chunks(2) {
            let low = pair.get(1).copied().unwrap_or(0);
            sum += u32::from(u16::from_be_bytes([pair[0], low]));
        }
    };
    for address in [from, to] {
        match address {
            IpAddr::V4(ip) => add(&ip.octets()),
            IpAddr::V6(ip) => add(&ip.octets()),
        }
    }
    add(udp);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !u16::try_from(sum).unwrap_or(u16::MAX) {
        0 => 0xffff,
        sum => sum,
    }
}
