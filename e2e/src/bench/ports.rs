//! Load from tens of thousands of source ports, which dnsperf cannot do: one
//! thread and one raw socket; each port has one query at a time.

use std::fs::read_to_string;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use socket2::{Domain, Protocol, Socket, Type};

use super::{Throughput, query};

/// First port, above the well-known ones.
const FIRST: u16 = 10_000;
/// Maximum number of queries that wait for an answer at the same time.
const WINDOW: usize = 200;
/// A query without an answer after this time is lost.
const LOST_AFTER: Duration = Duration::from_secs(1);
/// Size of the receive buffer in bytes: enough for all answers that can be on their way.
const RECEIVE_BUFFER: usize = 4 << 20;
const IP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;

/// Sends as many queries for `names` (a file in dnsperf's format) as the path to `server` can
/// carry, over IPv4. Must run in the network namespace of `own`, as root.
pub fn throughput(
    own: IpAddr,
    server: SocketAddr,
    ports: u16,
    names: &Path,
    seconds: u32,
) -> Result<Throughput> {
    ensure!(own.is_ipv4() && server.is_ipv4(), "IPv4 only");
    let queries: Vec<Vec<u8>> = read_to_string(names)?
        .lines()
        .filter_map(|line| line.split(' ').next())
        .map(query)
        .collect();
    ensure!(!queries.is_empty(), "{} is empty", names.display());
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP))
        .context("a raw socket (this needs root)")?;
    socket.bind(&SocketAddr::new(own, 0).into())?;
    socket.set_nonblocking(true)?;
    setsockopt(&socket, RcvBufForce, &RECEIVE_BUFFER).context("a large receive buffer")?;
    Run {
        socket: socket.into(),
        server,
        since: vec![None; ports.into()],
        waiting: 0,
        result: Throughput::default(),
    }
    .load(&queries, Duration::from_secs(seconds.into()))
}

struct Run {
    socket: UdpSocket,
    server: SocketAddr,
    /// For each port: since when it waits for an answer.
    since: Vec<Option<Instant>>,
    waiting: usize,
    result: Throughput,
}

impl Run {
    fn load(mut self, queries: &[Vec<u8>], time: Duration) -> Result<Throughput> {
        let (mut next, mut queries) = (0, queries.iter().cycle());
        let start = Instant::now();
        let mut now = start;
        while now.duration_since(start) < time {
            while self.waiting < WINDOW {
                let Some(query) = queries.next() else { break };
                self.ask(next % self.since.len(), query, now)?;
                next += 1;
            }
            let mut readable = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            let count = poll(&mut readable, PollTimeout::from(100u8))?;
            now = Instant::now();
            while self.answer()? {}
            if count == 0 {
                self.give_up(now);
            }
        }
        let took = now.duration_since(start).as_secs_f64();
        self.result.qps = f64::from(u32::try_from(self.result.answered)?) / took;
        Ok(self.result)
    }

    fn ask(&mut self, at: usize, query: &[u8], now: Instant) -> Result<()> {
        // A port that still waits after all others had their turn has lost its query.
        if self.since[at].replace(now).is_some() {
            self.result.lost += 1;
        } else {
            self.waiting += 1;
        }
        let from = FIRST + u16::try_from(at)?;
        let length = u16::try_from(UDP_HEADER + query.len())?;
        let mut packet = Vec::with_capacity(length.into());
        // Over IPv4 the checksum may be left out (RFC 768).
        for field in [from, self.server.port(), length, 0] {
            packet.extend_from_slice(&field.to_be_bytes());
        }
        packet.extend_from_slice(query);
        // A raw socket's destination has no port. A query that is not sent gets no answer and
        // counts as lost.
        let to = SocketAddr::new(self.server.ip(), 0);
        let _ = self.socket.send_to(&packet, to);
        Ok(())
    }

    /// Receives one packet. Returns whether there was one.
    fn answer(&mut self) -> Result<bool> {
        let mut buffer = [0; 2048];
        let (length, from) = match self.socket.recv_from(&mut buffer) {
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let packet = buffer.get(IP_HEADER..length).unwrap_or_default();
        let [s1, s2, d1, d2, _, _, _, _, _, _, _, code, ..] = packet else {
            return Ok(true);
        };
        let source = SocketAddr::new(from.ip(), u16::from_be_bytes([*s1, *s2]));
        let at = u16::from_be_bytes([*d1, *d2]).checked_sub(FIRST);
        let since = at.and_then(|at| self.since.get_mut(usize::from(at)));
        if source == self.server && since.and_then(Option::take).is_some() {
            self.waiting -= 1;
            self.result.answered += 1;
            self.result.wrong += u64::from(code & 0xf != 0);
        }
        Ok(true)
    }

    fn give_up(&mut self, now: Instant) {
        let lost = |since: &Option<Instant>| since.is_some_and(|t| now - t >= LOST_AFTER);
        for since in self.since.iter_mut().filter(|since| lost(since)) {
            *since = None;
            self.waiting -= 1;
            self.result.lost += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_and_every_loss_is_counted() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let answering = std::thread::spawn(move || {
            let mut buffer = [0; 512];
            let mut ports = std::collections::HashSet::new();
            server
                .set_read_timeout(Some(Duration::from_secs(3)))
                .unwrap();
            while let Ok((length, from)) = server.recv_from(&mut buffer) {
                // One port is never answered.
                if from.port() != FIRST {
                    server.send_to(&buffer[..length], from).unwrap();
                }
                ports.insert(from.port());
            }
            ports.len()
        });
        let names = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(names.path(), "a.test A\nb.test A\n").unwrap();
        let own = IpAddr::from([127, 0, 0, 1]);
        let result = throughput(own, address, 300, names.path(), 2).unwrap();
        assert!(result.answered > 0 && result.lost > 0, "{result:?}");
        assert_eq!(result.wrong, 0);
        assert_eq!(answering.join().unwrap(), 300);
    }
}
