//! A pod's view of the network: queries, connections, streams.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use socket2::{Domain, Protocol, Socket, Type};

use crate::dns::probe::{Query, Reply};
use crate::netns::Netns;
use crate::received_answers::ReceivedAnswers;
use crate::wait::{eventually, until};

/// A SYN is repeated after one second. A connection that is open before then has lost no packet.
pub const FIRST_SYN: Duration = Duration::from_millis(900);
/// Longest wait for a connection that must fail.
pub const REFUSED_AFTER: Duration = Duration::from_millis(350);

/// Longest wait for the echo of the last datagram.
const LAST_ECHO: Duration = Duration::from_secs(1);

/// One pod: a namespace with one interface, `eth0`.
#[derive(Debug)]
pub struct Pod {
    pub netns: Netns,
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
    /// Name of the node's end of its veth pair.
    pub host_side: String,
    /// Answers that the pod received by [`Pod::ask`].
    pub answers: ReceivedAnswers,
}

/// A process in a pod's namespace, which ends when this is dropped.
#[derive(Debug)]
pub struct PodProcess(Child);

impl PodProcess {
    pub fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for PodProcess {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _gone = self.0.wait();
    }
}

impl Pod {
    /// Starts a process that does nothing.
    pub fn process(&self) -> Result<PodProcess> {
        let mut sleep = self.netns.command("sleep");
        let sleep = sleep.arg("600").stdin(Stdio::null()).spawn()?;
        Ok(PodProcess(sleep))
    }

    /// Sends a query from inside the pod.
    pub fn ask(&self, query: &Query) -> Result<Reply> {
        let reply = self.netns.enter(|| query.send())??;
        self.answers.note(&reply);
        Ok(reply)
    }

    /// Connects from inside the pod. Fails after `limit`.
    pub fn connect(&self, to: SocketAddr, limit: Duration) -> Result<TcpStream> {
        let stream = self
            .netns
            .enter(|| TcpStream::connect_timeout(&to, limit))?;
        stream.with_context(|| format!("connect to {to}"))
    }

    /// Fails unless the first SYN opens a connection that echoes.
    pub fn expect_open(&self, to: SocketAddr) -> Result<()> {
        self.netns.enter(|| echo(to))?
    }

    /// Fails if a connection succeeds.
    pub fn expect_closed(&self, to: SocketAddr) -> Result<()> {
        match self.connect(to, REFUSED_AFTER) {
            Ok(_) => bail!("connected to {to}, which policy does not allow"),
            Err(_) => Ok(()),
        }
    }

    /// Sends one datagram and waits for its echo. No packet is repeated.
    pub fn datagram(&self, to: SocketAddr, limit: Duration) -> Result<()> {
        self.netns.enter(|| -> Result<()> {
            let any: IpAddr = match to {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let socket = UdpSocket::bind((any, 0))?;
            socket.set_read_timeout(Some(limit))?;
            socket.connect(to)?;
            socket.send(b"hello")?;
            let mut echo = [0; 16];
            let length = socket
                .recv(&mut echo)
                .with_context(|| format!("echo from {to}"))?;
            ensure!(echo.get(..length) == Some(b"hello"), "wrong echo from {to}");
            Ok(())
        })?
    }

    /// Sends one ICMP echo request and waits for its reply.
    pub fn ping(&self, to: IpAddr, limit: Duration) -> Result<()> {
        self.netns
            .sysctl(&[("net.ipv4.ping_group_range", "0 2147483647")])?;
        self.netns.enter(|| -> Result<()> {
            let (domain, protocol, request, reply) = match to {
                IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
                IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
            };
            // The kernel writes checksum and identifier, and delivers only our own replies.
            let socket = Socket::new(domain, Type::DGRAM, Some(protocol))?;
            socket.set_read_timeout(Some(limit))?;
            socket.connect(&SocketAddr::new(to, 0).into())?;
            socket.send(&[request, 0, 0, 0, 0, 0, 0, 1, b'h', b'i'])?;
            let mut answer = [0; 64];
            let length = (&socket)
                .read(&mut answer)
                .with_context(|| format!("echo reply from {to}"))?;
            ensure!(
                length == 10 && answer[0] == reply,
                "wrong reply from {to}: {:?}",
                answer.get(..length)
            );
            Ok(())
        })?
    }

    /// Opens a connection that sends every few milliseconds until it is dropped.
    pub fn stream(&self, to: SocketAddr) -> Result<Stream> {
        Stream::start(self.connect(to, FIRST_SYN)?)
    }

    /// Sends a datagram to an echo every few milliseconds until [`Datagrams::finish`].
    pub fn datagrams(&self, to: SocketAddr) -> Result<Datagrams> {
        Datagrams::start(self.socket_towards(to)?, to)
    }

    /// Sends datagrams without waiting for answers until [`Flood::finish`].
    pub fn flood(&self, to: SocketAddr) -> Result<Flood> {
        Ok(Flood::start(self.socket_towards(to)?, to))
    }

    fn socket_towards(&self, to: SocketAddr) -> Result<UdpSocket> {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Ok(self.netns.enter(|| UdpSocket::bind((any, 0)))??)
    }
}

/// Eight datagrams every 100 µs, without waiting for answers. Even the shortest gap in the datapath
/// lets some of them through.
#[derive(Debug)]
pub struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Flood {
    /// Sends 8 datagrams every 100 µs until [`Flood::finish`].
    fn start(socket: UdpSocket, to: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let s = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut sent = 0;
            while !s.load(Ordering::Relaxed) {
                for _ in 0..8 {
                    sent += u64::from(socket.send_to(b"flood", to).is_ok());
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            sent
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Stops the flood. Returns the number of sent datagrams.
    pub fn finish(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().map(JoinHandle::join);
        thread.and_then(Result::ok).unwrap_or_default()
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One datagram every few milliseconds, none repeated. The number of echoes shows a gap in the
/// datapath that TCP would hide.
#[derive(Debug)]
pub struct Datagrams {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<(u64, u64)>>,
}

impl Datagrams {
    fn start(socket: UdpSocket, to: SocketAddr) -> Result<Self> {
        socket.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let s = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut sent, mut echoed) = (0, 0);
            let mut buffer = [0; 16];
            let mut last = Instant::now();
            while !s.load(Ordering::Relaxed) || (echoed < sent && last.elapsed() < LAST_ECHO) {
                if !s.load(Ordering::Relaxed) {
                    sent += u64::from(socket.send_to(b"hello", to).is_ok());
                    last = Instant::now();
                }
                std::thread::sleep(Duration::from_millis(2));
                while socket.recv(&mut buffer).is_ok() {
                    echoed += 1;
                }
            }
            (sent, echoed)
        });
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Stops sending. Returns the numbers of sent and of echoed datagrams.
    pub fn finish(mut self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().map(JoinHandle::join);
        thread.and_then(Result::ok).unwrap_or_default()
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A connection with one echo every few milliseconds.
#[derive(Debug)]
pub struct Stream {
    stop: Arc<AtomicBool>,
    echoes: Arc<AtomicU64>,
    failure: Arc<Mutex<Option<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    fn start(mut socket: TcpStream) -> Result<Self> {
        // Longer than any pause the system under test may cause.
        socket.set_read_timeout(Some(Duration::from_secs(3)))?;
        socket.set_nodelay(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let echoes = Arc::new(AtomicU64::new(0));
        let failure = Arc::new(Mutex::new(None));
        let (s, e, f) = (stop.clone(), echoes.clone(), failure.clone());
        let thread = std::thread::spawn(move || {
            while !s.load(Ordering::Relaxed) {
                let sent = e.load(Ordering::Relaxed).to_be_bytes();
                let mut echo = [0; 8];
                let done = socket
                    .write_all(&sent)
                    .and_then(|()| socket.read_exact(&mut echo));
                if let Err(error) = done {
                    *f.lock() = Some(error.to_string());
                    return;
                }
                if echo != sent {
                    *f.lock() = Some("wrong echo".to_owned());
                    return;
                }
                e.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Ok(Self {
            stop,
            echoes,
            failure,
            thread: Some(thread),
        })
    }

    /// Fails unless the stream has never failed and five more echoes arrive.
    pub fn expect_alive(&self) -> Result<()> {
        let before = self.echoes.load(Ordering::Relaxed);
        let limit = Duration::from_secs(4);
        let state = || {
            let echoes = self.echoes.load(Ordering::Relaxed);
            Ok((self.failure.lock().clone(), echoes - before))
        };
        until("six further echoes", limit, state, |(failure, echoes)| {
            failure.is_some() || *echoes > 5
        })?;
        match &*self.failure.lock() {
            Some(error) => bail!("the open stream broke: {error}"),
            None => Ok(()),
        }
    }

    /// Fails unless the stream breaks within `limit`.
    pub fn expect_cut(&self, limit: Duration) -> Result<()> {
        eventually("the open stream is cut", limit, || {
            let echoes = self.echoes.load(Ordering::Relaxed);
            ensure!(self.failure.lock().is_some(), "{echoes} echoes");
            Ok(())
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Fails unless the first SYN from this thread's namespace opens a connection that echoes.
pub(crate) fn echo(to: SocketAddr) -> Result<()> {
    let stream = TcpStream::connect_timeout(&to, FIRST_SYN);
    let mut stream = stream.with_context(|| format!("connect to {to}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(b"hello")?;
    let mut echo = [0; 5];
    stream
        .read_exact(&mut echo)
        .with_context(|| format!("echo from {to}"))?;
    ensure!(&echo == b"hello", "wrong echo from {to}");
    Ok(())
}
