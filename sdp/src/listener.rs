//! Sockets that clients send queries to, and the workers that serve them.

mod control;
mod delayed;
mod held;
mod in_flight;
mod releases;
mod reply_sender;
mod send_all;
pub mod tcp;
mod udp;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

#[cfg(test)]
pub(crate) use self::{
    delayed::MAX_BYTES as DELAYED_BYTES, held::MAX_BYTES as HELD_BYTES,
    tcp::ALLOWANCE as TCP_ALLOWANCE,
};
use daemon::port_hold;
use parking_lot::Mutex;
use socket2::Socket;

use self::{control::Control, in_flight::InFlight, tcp::TcpServer, udp::Worker};
use crate::{
    proxy::Proxy,
    socket::{self, SocketError},
    steering::{Member, MemberSockets, SharedStatus, SteeringConfig, SteeringStatus},
};

/// Kernel features that the listening and sending sockets use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketOptions {
    /// Redirected packets: transparent sockets, marks, original destinations,
    /// answers from the server's own address. Needs CAP_NET_ADMIN or CAP_NET_RAW.
    Transparent,
    /// Plain sockets for tests without root. Every query counts as addressed to this server.
    Plain { server: SocketAddr },
}

/// Settings of the listeners and their workers.
#[derive(Clone, Debug)]
pub struct ListenConfig {
    /// Proxy port; 0: the kernel selects one.
    pub port: u16,
    /// Whether to listen on 127.0.0.1.
    pub ipv4: bool,
    /// Whether to listen on ::1.
    pub ipv6: bool,
    /// UDP workers (threads); at least 1.
    pub workers: usize,
    pub options: SocketOptions,
    /// Settings of steering. `None`: the kernel's hash selects the socket of a packet.
    pub steering: Option<SteeringConfig>,
    /// Maximum number of TCP connections of clients.
    pub tcp_connections: usize,
}

/// Why the listeners could not start.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// A socket could not be set up.
    #[error("{what} on {address}: {source}")]
    Socket {
        /// Step that failed, as text for the message.
        what: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    /// A worker could not start.
    #[error("cannot start a DNS worker: {0}")]
    Worker(io::Error),
    #[error("nothing to listen on: --enable-ipv4 and --enable-ipv6 are both false")]
    NoFamily,
}

/// Sockets without a port. All sockets of one port must be made by one user, so they are made
/// before privileges are dropped.
#[derive(Debug)]
pub(crate) struct Unbound {
    config: ListenConfig,
    workers: Vec<WorkerSockets>,
}

/// Bound sockets that no worker reads yet.
#[derive(Debug)]
pub struct Sockets {
    config: ListenConfig,
    port: u16,
    workers: Vec<WorkerSockets>,
}

/// Sockets of one worker. The flag of each tells whether it is for IPv6.
#[derive(Debug, Default)]
struct WorkerSockets {
    udp: Vec<(OwnedFd, bool)>,
    tcp: Vec<(Socket, bool)>,
}

/// Maximum number of ports that are tried if the kernel selects the port and another socket already
/// has it.
const PORT_TRIES: usize = 16;

impl Unbound {
    /// Makes all sockets without binding them. Fails if both families are disabled.
    pub(crate) fn open(config: &ListenConfig) -> Result<Self, ListenError> {
        if !config.ipv4 && !config.ipv6 {
            return Err(ListenError::NoFamily);
        }
        let transparent = config.options == SocketOptions::Transparent;
        let worker = || -> Result<WorkerSockets, ListenError> {
            let mut sockets = WorkerSockets::default();
            for ip in config.addresses() {
                let at = SocketAddr::new(ip, config.port);
                let tcp = socket::tcp_listener(at, transparent).map_err(|e| failed(at, e))?;
                let udp = socket::udp_listener(at, transparent).map_err(|e| failed(at, e))?;
                sockets.tcp.push((tcp, ip.is_ipv6()));
                sockets.udp.push((udp, ip.is_ipv6()));
            }
            Ok(sockets)
        };
        let workers = (0..config.workers.max(1)).map(|_| worker());
        Ok(Self {
            config: config.clone(),
            workers: workers.collect::<Result<_, _>>()?,
        })
    }

    /// Binds the sockets. From then on, queries wait in them.
    pub(crate) fn bind(self) -> Result<Sockets, ListenError> {
        let mut port = self.config.port;
        for sockets in &self.workers {
            let both = sockets.tcp.iter().zip(&sockets.udp);
            for (ip, ((tcp, _), (udp, _))) in self.config.addresses().zip(both) {
                let at = SocketAddr::new(ip, port);
                socket::listen(tcp, at).map_err(|e| failed(at, e))?;
                if port == 0 {
                    let bound = tcp.local_addr().ok().and_then(|a| a.as_socket());
                    port = bound.map_or(0, |a| a.port());
                }
                let at = SocketAddr::new(ip, port);
                socket::bind_udp(udp, at).map_err(|e| failed(at, e))?;
            }
        }
        Ok(Sockets {
            config: self.config,
            port,
            workers: self.workers,
        })
    }
}

impl ListenConfig {
    /// Checks whether this user can bind the port. It finds errors of `Unbound::bind` early, even
    /// if binding has to wait. It uses TCP sockets that do not listen, so that they receive no
    /// queries.
    pub fn check_port(&self) -> Result<(), ListenError> {
        for ip in self.addresses() {
            let at = SocketAddr::new(ip, self.port);
            port_hold::hold_tcp(at).map_err(|source| ListenError::Socket {
                what: "cannot bind TCP",
                address: at,
                source,
            })?;
        }
        Ok(())
    }

    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let v4 = self.ipv4.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let v6 = self.ipv6.then_some(IpAddr::V6(Ipv6Addr::LOCALHOST));
        v4.into_iter().chain(v6)
    }
}

impl Sockets {
    /// Makes and binds all sockets.
    pub fn bind(config: &ListenConfig) -> Result<Self, ListenError> {
        let mut tries = if config.port == 0 { PORT_TRIES } else { 1 };
        loop {
            tries -= 1;
            match Unbound::open(config)?.bind() {
                Err(_) if tries > 0 => {}
                outcome => return outcome,
            }
        }
    }

    /// Port to which the sockets are bound.
    pub fn port(&self) -> u16 {
        self.port
    }
}

fn failed(address: SocketAddr, error: SocketError) -> ListenError {
    ListenError::Socket {
        what: error.what,
        address,
        source: error.source,
    }
}

impl WorkerSockets {
    /// Duplicates of the sockets, for the steering maps.
    fn duplicate(&self) -> io::Result<MemberSockets> {
        let mut copies = MemberSockets::default();
        for (fd, ipv6) in &self.udp {
            let place = if *ipv6 {
                &mut copies.udp6
            } else {
                &mut copies.udp4
            };
            *place = Some(fd.try_clone()?);
        }
        for (socket, ipv6) in &self.tcp {
            let place = if *ipv6 {
                &mut copies.tcp6
            } else {
                &mut copies.tcp4
            };
            *place = Some(socket.try_clone()?.into());
        }
        Ok(copies)
    }
}

/// Unfinished work after a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Queries in flight that were dropped at the deadline.
    pub abandoned: u64,
    /// TCP connections of clients that were cut at the deadline.
    pub cut: u64,
}

/// The running listeners and workers.
#[derive(Debug)]
pub struct Listeners {
    port: u16,
    workers: Vec<Running>,
    steering: Vec<SharedStatus>,
    tcp: TcpServer,
}

#[derive(Debug)]
struct Running {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl Listeners {
    /// Starts the UDP workers (threads) and the TCP listeners (tasks on `runtime`).
    pub fn start(
        proxy: &Arc<Proxy>,
        sockets: Sockets,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Self, ListenError> {
        let Sockets {
            config,
            port,
            workers,
        } = sockets;
        let all = proxy.stats().in_flight.clone();
        let in_flight = InFlight::new(proxy.config().in_flight, workers.len(), all);
        let tcp = TcpServer::new(
            Arc::clone(proxy),
            config.options,
            (config.tcp_connections, in_flight.clone()),
            runtime,
        );
        let mut running = Self {
            port,
            workers: Vec::new(),
            steering: Vec::new(),
            tcp,
        };
        for (number, sockets) in workers.into_iter().enumerate() {
            let member = match &config.steering {
                None => None,
                Some(steering) => Some(running.member(steering, &sockets)?),
            };
            for (socket, _) in sockets.tcp {
                running.tcp.listen(socket.into())?;
            }
            let control = Arc::new(Control::new().map_err(ListenError::Worker)?);
            let worker = Worker::new(
                Arc::clone(proxy),
                Arc::clone(&control),
                config.options,
                sockets.udp,
                in_flight.clone(),
                member,
            )
            .map_err(ListenError::Worker)?;
            let thread = std::thread::Builder::new()
                .name(format!("dns-udp-{number}"))
                .spawn(move || worker.run())
                .map_err(ListenError::Worker)?;
            running.workers.push(Running {
                control,
                thread: Some(thread),
            });
        }
        Ok(running)
    }

    /// Makes a worker a member of the steering group. Its status becomes part of
    /// [`Self::steering`].
    fn member(
        &mut self,
        steering: &SteeringConfig,
        sockets: &WorkerSockets,
    ) -> Result<Member, ListenError> {
        let status = Arc::new(Mutex::new(SteeringStatus::Off));
        self.steering.push(Arc::clone(&status));
        let copies = sockets.duplicate().map_err(ListenError::Worker)?;
        Ok(Member::new(
            steering.clone(),
            self.port,
            copies,
            status,
            Instant::now(),
        ))
    }

    /// Port the listeners are bound to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// State of steering: joined with the slots of all workers, or the first problem.
    pub fn steering(&self) -> SteeringStatus {
        let mut slots = Vec::new();
        for status in &self.steering {
            match &*status.lock() {
                SteeringStatus::Joined(own) => slots.extend_from_slice(own),
                other => return other.clone(),
            }
        }
        if slots.is_empty() {
            SteeringStatus::Off
        } else {
            SteeringStatus::Joined(slots)
        }
    }

    /// For each worker, a number that grows at least every five seconds while the worker runs.
    pub(crate) fn turns(&self) -> Vec<u64> {
        let workers = self.workers.iter();
        workers.map(|worker| worker.control.turns()).collect()
    }

    /// Drains the listeners:
    /// - gives up the slots and reads the sockets until they are empty;
    /// - finishes the queries in flight and the held answers;
    /// - closes TCP connections between queries;
    /// - after half of `limit`, reads no more from TCP connections that are never between queries,
    ///   and closes them when their queries in flight are answered.
    ///
    /// Returns when all is done, after `limit` at the latest.
    pub async fn drain(mut self, limit: Duration) -> DrainReport {
        let deadline = Instant::now() + limit;
        let last_queries = Instant::now() + limit / 2;
        for worker in &self.workers {
            worker.control.drain();
        }
        // While a slot contains their sockets, the listeners get new connections.
        let all_left = |workers: &[Running]| workers.iter().all(|w| w.control.has_left());
        while !all_left(&self.workers) && Instant::now() < deadline {
            tokio::time::sleep(control::Leaving::POLL_INTERVAL).await;
        }
        self.tcp.drain();
        let all_done = |workers: &[Running]| workers.iter().all(|w| w.control.is_done());
        let workers = async {
            while !all_done(&self.workers) && Instant::now() < deadline {
                tokio::time::sleep(control::Leaving::TICK).await;
            }
        };
        let connections = async {
            let drained_by = |end: Instant| tokio::time::timeout_at(end.into(), self.tcp.drained());
            if drained_by(last_queries).await.is_err() {
                self.tcp.close();
                if drained_by(deadline).await.is_err() {
                    self.tcp.stop();
                    self.tcp.drained().await;
                }
            }
        };
        tokio::join!(workers, connections);
        self.stop();
        let abandoned = self.workers.iter().map(|w| w.control.abandoned()).sum();
        DrainReport {
            abandoned,
            cut: self.tcp.cut(),
        }
    }

    /// Stops the worker threads. They never wait for other threads, so this takes no time.
    fn stop(&mut self) {
        self.tcp.stop();
        for worker in &self.workers {
            worker.control.stop();
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take()
                && thread.join().is_err()
            {
                tracing::error!("DNS worker panicked");
            }
        }
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.stop();
    }
}
