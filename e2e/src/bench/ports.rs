//! Load from tens of thousands of source ports, which dnsperf cannot do: one
//! thread, one socket per port, each with one query at a time.

use std::fs::read_to_string;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::Throughput;

/// First port; all lie above the well-known and below what others may pick.
const FIRST: u16 = 10_000;
/// Queries without an answer at once.
const WINDOW: usize = 200;
/// A query without an answer for so long is lost.
const PATIENCE: Duration = Duration::from_secs(1);

/// As many queries for `names` (a file as dnsperf reads it) as the path to
/// `server` carries. Must run in the network namespace of `own`.
pub fn throughput(
    own: IpAddr,
    server: SocketAddr,
    ports: u16,
    names: &Path,
    seconds: u32,
) -> Result<Throughput> {
    let queries: Vec<Vec<u8>> = read_to_string(names)?
        .lines()
        .filter_map(|line| line.split(' ').next())
        .map(query)
        .collect();
    ensure!(!queries.is_empty(), "{} is empty", names.display());
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let ports = ports.min(allowed()?);
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let sockets = (0..ports)
        .map(|n| -> Result<UdpSocket> {
            let socket = UdpSocket::bind((own, FIRST + n)).context("a source port")?;
            socket.connect(server)?;
            socket.set_nonblocking(true)?;
            epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, n.into()))?;
            Ok(socket)
        })
        .collect::<Result<Vec<_>>>()?;
    Run {
        sockets: sockets.into_iter().map(|s| (s, None)).collect(),
        waiting: 0,
        result: Throughput::default(),
    }
    .load(&queries, &epoll, Duration::from_secs(seconds.into()))
}

/// Most source ports that this process may have descriptors for.
pub fn allowed() -> Result<u16> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(u16::try_from(hard.saturating_sub(1000)).unwrap_or(u16::MAX))
}

struct Run {
    /// Sockets, and since when each waits for an answer.
    sockets: Vec<(UdpSocket, Option<Instant>)>,
    waiting: usize,
    result: Throughput,
}

impl Run {
    fn load(mut self, queries: &[Vec<u8>], epoll: &Epoll, time: Duration) -> Result<Throughput> {
        let mut events = [EpollEvent::empty(); WINDOW];
        let (mut next, mut queries) = (0, queries.iter().cycle());
        let start = Instant::now();
        let mut now = start;
        while now.duration_since(start) < time {
            while self.waiting < WINDOW {
                let Some(query) = queries.next() else { break };
                self.ask(next % self.sockets.len(), query, now);
                next += 1;
            }
            let count = epoll.wait(&mut events, 100_u16)?;
            now = Instant::now();
            for event in events.iter().take(count) {
                self.answer(usize::try_from(event.data())?);
            }
            if count == 0 {
                self.give_up(now);
            }
        }
        let took = now.duration_since(start).as_secs_f64();
        self.result.qps = f64::from(u32::try_from(self.result.answered)?) / took;
        Ok(self.result)
    }

    fn ask(&mut self, at: usize, query: &[u8], now: Instant) {
        let Some((socket, since)) = self.sockets.get_mut(at) else {
            return;
        };
        // One that waits still, after all others had their turn, has lost its query.
        if since.replace(now).is_some() {
            self.result.lost += 1;
        } else {
            self.waiting += 1;
        }
        // What is not sent is not answered, and so counted.
        let _ = socket.send(query);
    }

    fn answer(&mut self, at: usize) {
        let mut answer = [0; 512];
        let Some((socket, since)) = self.sockets.get_mut(at) else {
            return;
        };
        if socket.recv(&mut answer).is_ok() && since.take().is_some() {
            self.waiting -= 1;
            self.result.answered += 1;
            let [_, _, _, code, ..] = answer;
            self.result.wrong += u64::from(code & 0xf != 0);
        }
    }

    fn give_up(&mut self, now: Instant) {
        let lost = |since: &Option<Instant>| since.is_some_and(|t| now - t >= PATIENCE);
        for (_, since) in self.sockets.iter_mut().filter(|(_, since)| lost(since)) {
            *since = None;
            self.waiting -= 1;
            self.result.lost += 1;
        }
    }
}

/// A query for the IPv4 address of `name`, id 0: the port tells answers apart.
fn query(name: &str) -> Vec<u8> {
    let mut message = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        message.push(u8::try_from(label.len()).unwrap_or(63));
        message.extend_from_slice(label.as_bytes());
    }
    message.extend_from_slice(&[0, 0, 1, 0, 1]);
    message
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
