//! TCP connections of one pod: a number per second with one query each, and some that stay open and
//! send query after query.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rand::Rng as _;
use shared_maps::user::monotonic_ns;
use socket2::{Domain, Socket, Type};

use super::names::{Asked, Names};
use super::{Common, Counts, Pace, Spec};

/// Pause of a lasting connection between an answer and the next query, milliseconds.
const THINKS_MS: std::ops::Range<u64> = 20..150;
/// Maximum number of connections that are opened at once after a pause.
const BURST: u64 = 16;
const DNS: u16 = 53;
/// Time after the end of a connection within which a reset shows that the peer had not read the
/// query.
const AFTERMATH: Duration = Duration::from_secs(3);

/// A TCP connection to a server, with at most one query in flight.
struct Connection {
    socket: Socket,
    server: IpAddr,
    lasting: bool,
    connecting: bool,
    asked: Option<Asked>,
    sent_at: u64,
    /// Time of the next query of a lasting connection.
    next: Instant,
    /// Until when an ended connection is watched.
    ended: Option<Instant>,
    input: Vec<u8>,
}

/// What happened to a connection.
enum Event {
    Nothing,
    /// The peer will send no more.
    End,
    Broken(std::io::Error),
}

/// Sender of all TCP queries of one pod.
pub(super) struct Sender {
    epoll: Epoll,
    servers: Vec<IpAddr>,
    connections: Vec<Option<Connection>>,
    names: Names,
    pace: Pace,
    lasting: u32,
    lost_after: Duration,
    counts: Counts,
    opened: u64,
}

impl Sender {
    pub(super) fn new(spec: &Spec, number: usize) -> Result<Self> {
        let client = spec.clients.get(number).context("such a client")?;
        let has = |server: &&IpAddr| {
            let own = &client.addresses;
            own.iter().any(|own| own.is_ipv4() == server.is_ipv4())
        };
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            servers: spec.servers.iter().filter(has).copied().collect(),
            connections: Vec::new(),
            names: spec.names,
            pace: Pace {
                per_second: spec.tcp_rate,
                among: spec.clients.len(),
            },
            lasting: spec.lasting,
            lost_after: spec.lost_after,
            counts: Counts::default(),
            opened: 0,
        })
    }

    /// Sends until it is stopped, from the calling thread's namespace.
    pub(super) fn run(mut self, common: &Common) -> Counts {
        let start = Instant::now();
        for server in self.servers.clone() {
            for _ in 0..self.lasting {
                self.open(server, true);
            }
        }
        let mut stopped = None;
        let mut counted = (0, 0);
        let mut turn = 0;
        let mut events = [EpollEvent::empty(); 64];
        while !self.servers.is_empty() {
            if stopped.is_none() && common.stop.load(Ordering::Acquire) {
                stopped = Some(Instant::now());
            }
            match stopped {
                None => {
                    let due = self.pace.due(start);
                    for _ in 0..due.saturating_sub(self.opened).min(BURST) {
                        let server = self.servers[turn % self.servers.len()];
                        turn += 1;
                        self.opened += 1;
                        self.open(server, false);
                    }
                }
                Some(since) => {
                    let waits = |c: &Connection| c.asked.is_some();
                    let open = self.connections.iter().flatten().any(waits);
                    if !open || since.elapsed() > self.lost_after {
                        break;
                    }
                }
            }
            let count = self
                .epoll
                .wait(&mut events, EpollTimeout::from(2u8))
                .unwrap_or(0);
            for event in &events[..count] {
                self.on_event(usize::try_from(event.data()).unwrap_or(usize::MAX));
            }
            self.on_time(stopped.is_some());
            let sent = self.counts.sent.wrapping_sub(counted.0);
            common.sent.fetch_add(sent, Ordering::Relaxed);
            common
                .right
                .fetch_add(self.counts.right - counted.1, Ordering::Relaxed);
            counted = (self.counts.sent, self.counts.right);
        }
        for connection in self.connections.iter().flatten() {
            if connection.asked.is_some() {
                let server = connection.server;
                let what = if connection.connecting {
                    "connection"
                } else {
                    "answer"
                };
                let lost = || format!("no {what} from {server} over TCP");
                self.counts.lost(connection.sent_at, lost);
            }
        }
        self.counts
    }

    fn open(&mut self, server: IpAddr, lasting: bool) {
        self.counts.sent += 1;
        let sent_at = monotonic_ns();
        let connection = match connect(server) {
            Ok(socket) => Connection {
                socket,
                server,
                lasting,
                connecting: true,
                asked: Some(self.asked()),
                sent_at,
                next: Instant::now(),
                ended: None,
                input: Vec::new(),
            },
            Err(error) => {
                let why = || format!("no connection to {server}: {error}");
                return self.counts.lost(sent_at, why);
            }
        };
        let free = self.connections.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let both = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT;
        let event = EpollEvent::new(both, place as u64);
        if let Err(error) = self.epoll.add(&connection.socket, event) {
            let why = || format!("epoll: {error}");
            return self.counts.lost(sent_at, why);
        }
        self.connections[place] = Some(connection);
    }

    fn asked(&self) -> Asked {
        let mut rng = rand::rng();
        Asked::new(rng.random(), self.names.pick(&mut rng))
    }

    fn on_event(&mut self, place: usize) {
        let Some(Some(connection)) = self.connections.get_mut(place) else {
            return;
        };
        if connection.ended.is_some() {
            return; // Looked at when its time has come.
        }
        if connection.connecting {
            if let Ok(Some(error)) = connection.socket.take_error() {
                return self.broken(place, &error);
            }
            connection.connecting = false;
            let mut event = EpollEvent::new(EpollFlags::EPOLLIN, place as u64);
            let _ = self.epoll.modify(&connection.socket, &mut event);
            if let Err(error) = connection.ask() {
                return self.broken(place, &error);
            }
        }
        let event = connection.receive();
        while let Some(answer) = connection.take() {
            match connection.asked.take() {
                None => self.counts.stray += 1,
                Some(asked) => match asked.check(&answer) {
                    Ok(()) => self.counts.right(connection.sent_at),
                    Err(why) => {
                        let server = connection.server;
                        self.counts
                            .wrong(|| format!("from {server} over TCP: {why}"));
                    }
                },
            }
            let think = rand::rng().random_range(THINKS_MS);
            connection.next = Instant::now() + Duration::from_millis(think);
        }
        if !connection.lasting && connection.asked.is_none() {
            self.connections[place] = None;
            return;
        }
        match event {
            Event::Nothing => {}
            Event::Broken(error) => self.broken(place, &error),
            Event::End => {
                if connection.lasting && connection.asked.is_some() {
                    connection.ended = Some(Instant::now() + AFTERMATH);
                    let _ = self.epoll.delete(&connection.socket);
                    return;
                }
                let Some(connection) = self.connections[place].take() else {
                    return;
                };
                let server = connection.server;
                if connection.lasting {
                    self.counts.reopened += 1;
                    self.open(server, true);
                } else {
                    let why = || format!("{server} closed a TCP connection without an answer");
                    self.counts.lost(connection.sent_at, why);
                }
            }
        }
    }

    /// Handles a connection that broke, with or without an open query.
    fn broken(&mut self, place: usize, error: &std::io::Error) {
        let Some(connection) = self.connections[place].take() else {
            return;
        };
        let server = connection.server;
        if connection.asked.is_some() {
            let when = if connection.connecting {
                "connecting"
            } else {
                "asking"
            };
            let kind = if connection.lasting { "lasting" } else { "new" };
            let why = || format!("{server} over TCP, {when} ({kind} connection): {error}");
            self.counts.lost(connection.sent_at, why);
        }
        if connection.lasting {
            self.open(server, true);
        }
    }

    fn on_time(&mut self, stopped: bool) {
        let now = Instant::now();
        for place in 0..self.connections.len() {
            let Some(connection) = &mut self.connections[place] else {
                continue;
            };
            if connection.ended.is_some_and(|until| now >= until) {
                self.aftermath(place);
                continue;
            }
            let due = connection.lasting
                && connection.asked.is_none()
                && !stopped
                && now >= connection.next;
            if !due {
                continue;
            }
            let asked = Asked::new(rand::rng().random(), self.names.pick(&mut rand::rng()));
            connection.asked = Some(asked);
            connection.sent_at = monotonic_ns();
            self.counts.sent += 1;
            // Data that arrived since the last check decides, because it may contain an orderly
            // end.
            let end = matches!(connection.receive(), Event::End);
            if end {
                connection.asked = None;
                self.counts.sent -= 1;
                self.counts.reopened += 1;
                let server = connection.server;
                self.connections[place] = None;
                self.open(server, true);
            } else if let Err(error) = connection.ask() {
                self.broken(place, &error);
            }
        }
    }

    /// Handles a lasting connection that ended while a query was on its way. If the query arrived
    /// after the peer had closed, the peer resets the connection (the kernel then returns EPIPE).
    /// Without a reset the peer read the query.
    fn aftermath(&mut self, place: usize) {
        let Some(connection) = self.connections[place].take() else {
            return;
        };
        let server = connection.server;
        let error = connection.socket.take_error().ok().flatten();
        let pipe = |e: &std::io::Error| e.raw_os_error() == Some(Errno::EPIPE as i32);
        if error.as_ref().is_some_and(pipe) {
            self.counts.crossed += 1;
            self.counts.sent -= 1;
        } else {
            let why = || format!("{server} closed a TCP connection that had a query ({error:?})");
            self.counts.lost(connection.sent_at, why);
        }
        self.open(server, true);
    }
}

impl Connection {
    fn ask(&mut self) -> std::io::Result<()> {
        let mut message = vec![0; 2];
        if let Some(asked) = &self.asked {
            asked.write(&mut message);
        }
        let length = u16::try_from(message.len() - 2).unwrap_or(u16::MAX);
        message[..2].copy_from_slice(&length.to_be_bytes());
        // This does not block: a query is far smaller than any send buffer.
        self.socket.write_all(&message)
    }

    fn receive(&mut self) -> Event {
        let mut buffer = [0; 2048];
        loop {
            match self.socket.read(&mut buffer) {
                Ok(0) => return Event::End,
                Ok(length) => self.input.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Event::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Event::Broken(error),
            }
        }
    }

    /// Removes the next complete message from the input. `None` if it has not arrived completely.
    fn take(&mut self) -> Option<Vec<u8>> {
        let length = self.input.first_chunk::<2>()?;
        let end = 2 + usize::from(u16::from_be_bytes(*length));
        let message = self.input.get(2..end)?.to_vec();
        self.input.drain(..end);
        Some(message)
    }
}

fn connect(server: IpAddr) -> std::io::Result<Socket> {
    let to = SocketAddr::new(server, DNS);
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::EINPROGRESS as i32) => Err(error),
        _ => Ok(socket),
    }
}
