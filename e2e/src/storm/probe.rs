//! Repeated new connections to one address, which is open or closed.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;
use socket2::{Domain, Socket, Type};

use crate::lab::{UDP_PORT, at};
use crate::pod::{FIRST_SYN, Pod};

/// Longest time of an echo on a busy machine.
const ECHO: Duration = Duration::from_secs(2);
/// Number of datagrams for each TCP connection.
const TCP_EVERY: u64 = 4;
const PAUSE: Duration = Duration::from_millis(4);

/// Repeated attempts to reach one address, each with a new source port.
#[derive(Debug)]
pub struct Probe {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Seen {
    tried: u64,
    failed: Option<String>,
}

impl Probe {
    /// Every datagram must be echoed, and every first SYN must open its connection.
    pub fn open(pod: &Pod, address: IpAddr) -> Result<Self> {
        Self::start(pod, move |number| {
            if number.is_multiple_of(TCP_EVERY) {
                connect(at(address, 80))
            } else {
                datagram(at(address, UDP_PORT))
            }
        })
    }

    /// Nothing may be delivered. The servers count connections and datagrams
    /// ([`crate::web::Web::visits`]).
    pub fn closed(pod: &Pod, address: IpAddr) -> Result<Self> {
        Self::start(pod, move |number| {
            if number.is_multiple_of(TCP_EVERY) {
                syn(at(address, 80))
            } else {
                Ok(socket(at(address, UDP_PORT)).map(|socket| drop(socket.send(b"closed")))?)
            }
        })
    }

    fn start(pod: &Pod, mut once: impl FnMut(u64) -> Result<()> + Send + 'static) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (s, t) = (stop.clone(), seen.clone());
        let thread = pod.netns.spawn(move || {
            while !s.load(Ordering::Relaxed) {
                let number = t.lock().tried;
                let tried = once(number);
                let mut seen = t.lock();
                seen.tried += 1;
                if let Err(error) = tried {
                    seen.failed = Some(format!("attempt {number}: {error:#}"));
                    return;
                }
                drop(seen);
                std::thread::sleep(PAUSE);
            }
        })?;
        Ok(Self {
            stop,
            seen,
            thread: Some(thread),
        })
    }

    /// Stops the probe. Returns the number of attempts, or the error of one.
    pub fn finish(mut self) -> Result<u64> {
        self.end();
        let seen = self.seen.lock();
        match &seen.failed {
            Some(error) => bail!("{error}"),
            None => Ok(seen.tried),
        }
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.end();
    }
}

fn socket(to: SocketAddr) -> Result<UdpSocket> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(ECHO))?;
    socket.connect(to)?;
    Ok(socket)
}

fn datagram(to: SocketAddr) -> Result<()> {
    let socket = socket(to)?;
    socket
        .send(b"hello")
        .with_context(|| format!("send to {to}"))?;
    let mut echo = [0; 16];
    socket
        .recv(&mut echo)
        .with_context(|| format!("no echo of a datagram to {to}"))?;
    Ok(())
}

fn connect(to: SocketAddr) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, FIRST_SYN)
        .with_context(|| format!("the first SYN to {to}"))?;
    stream.set_read_timeout(Some(ECHO))?;
    stream.write_all(b"hello")?;
    let mut echo = [0; 5];
    stream
        .read_exact(&mut echo)
        .with_context(|| format!("echo from {to}"))
}

/// Sends a SYN and does not wait.
fn syn(to: SocketAddr) -> Result<()> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let _in_progress = socket.connect(&to.into());
    Ok(())
}
