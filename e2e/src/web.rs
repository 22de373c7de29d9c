//! TCP and UDP echo servers that count connections and datagrams.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;

use crate::listening::{self, listen};
use crate::netns::Netns;

const TICK: Duration = Duration::from_millis(50);

/// How often each local address was reached, by TCP connection or datagram.
type Visits = Arc<Mutex<HashMap<SocketAddr, u64>>>;

/// Running echo servers; stopped when dropped.
#[derive(Debug)]
pub struct Web {
    stop: Arc<AtomicBool>,
    visits: Visits,
    threads: Vec<JoinHandle<()>>,
}

impl Web {
    /// TCP echo on `tcp` ports of every address of the namespace, UDP echo on
    /// `udp` ports of the given addresses.
    pub fn start(netns: &Netns, addresses: &[IpAddr], tcp: &[u16], udp: &[u16]) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let visits = Visits::default();
        let mut threads = Vec::new();
        for port in tcp {
            let at = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), *port);
            let listener = netns.enter(|| listen(at))?.context("bind web server")?;
            let (v, s) = (visits.clone(), stop.clone());
            threads.push(std::thread::spawn(move || accept(&listener, &v, &s)));
        }
        for address in addresses {
            for port in udp {
                let at = SocketAddr::new(*address, *port);
                let socket = netns
                    .enter(|| UdpSocket::bind(at))?
                    .context("bind UDP echo")?;
                socket.set_read_timeout(Some(TICK))?;
                let (v, s) = (visits.clone(), stop.clone());
                threads.push(std::thread::spawn(move || {
                    echo_datagrams(&socket, at, &v, &s)
                }));
            }
        }
        Ok(Self {
            stop,
            visits,
            threads,
        })
    }

    /// How often `at` was reached.
    pub fn visits(&self, at: SocketAddr) -> u64 {
        self.visits.lock().get(&at).copied().unwrap_or(0)
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, visits: &Visits, stop: &Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let Some((stream, _)) = listening::accept(listener, TICK) else {
            continue;
        };
        if let Ok(local) = stream.local_addr() {
            let local = SocketAddr::new(local.ip().to_canonical(), local.port());
            *visits.lock().entry(local).or_default() += 1;
        }
        let stop = stop.clone();
        std::thread::spawn(move || echo_stream(stream, &stop));
    }
}

fn echo_stream(mut stream: TcpStream, stop: &AtomicBool) {
    let mut buffer = [0; 4096];
    if stream.set_nonblocking(false).is_err() || stream.set_read_timeout(Some(TICK)).is_err() {
        return;
    }
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => {
                if stream
                    .write_all(buffer.get(..length).unwrap_or_default())
                    .is_err()
                {
                    return;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

fn echo_datagrams(socket: &UdpSocket, at: SocketAddr, visits: &Visits, stop: &AtomicBool) {
    let mut buffer = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((length, peer)) = socket.recv_from(&mut buffer) {
            *visits.lock().entry(at).or_default() += 1;
            let _ = socket.send_to(buffer.get(..length).unwrap_or_default(), peer);
        }
    }
}
