//! The lab's DNS server: UDP and TCP on chosen addresses of one namespace.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;

use crate::dns::zone::Zone;
use crate::listening::{self, listen};
use crate::netns::Netns;

/// How often a waiting thread checks whether it must end.
const TICK: Duration = Duration::from_millis(50);

/// A running server; stopped when dropped.
#[derive(Debug)]
pub struct DnsServer {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    askers: Askers,
}

/// Source addresses of queries, as in a server's log.
#[derive(Clone, Debug, Default)]
struct Askers(Arc<Mutex<BTreeSet<IpAddr>>>);

impl Askers {
    fn note(&self, from: SocketAddr) {
        self.0.lock().insert(from.ip());
    }
}

impl DnsServer {
    /// Serves `zone` on port 53 of each address.
    pub fn start(netns: &Netns, addresses: &[IpAddr], zone: &Zone) -> Result<Self> {
        Self::start_on(netns, addresses, 53, zone)
    }

    /// Like [`Self::start`], on another port.
    pub fn start_on(netns: &Netns, addresses: &[IpAddr], port: u16, zone: &Zone) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        let askers = Askers::default();
        for address in addresses {
            let at = SocketAddr::new(*address, port);
            let (udp, tcp) = netns.enter(|| -> Result<_> {
                let udp = UdpSocket::bind(at).with_context(|| format!("bind {at}/udp"))?;
                let tcp = listen(at).with_context(|| format!("bind {at}/tcp"))?;
                Ok((udp, tcp))
            })??;
            udp.set_read_timeout(Some(TICK))?;
            let (z, s, a) = (zone.clone(), stop.clone(), askers.clone());
            threads.push(std::thread::spawn(move || {
                serve_udp(&Arc::new(udp), &z, &s, &a)
            }));
            let (z, s, a) = (zone.clone(), stop.clone(), askers.clone());
            threads.push(std::thread::spawn(move || serve_tcp(&tcp, &z, &s, &a)));
        }
        Ok(Self {
            stop,
            threads,
            askers,
        })
    }

    /// Source addresses of queries since the last call.
    pub fn take_askers(&self) -> BTreeSet<IpAddr> {
        std::mem::take(&mut *self.askers.0.lock())
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve_udp(socket: &Arc<UdpSocket>, zone: &Zone, stop: &AtomicBool, askers: &Askers) {
    let mut buffer = vec![0; 65_535];
    while !stop.load(Ordering::Relaxed) {
        let Ok((length, peer)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        askers.note(peer);
        let Some(response) = buffer
            .get(..length)
            .and_then(|query| zone.respond(query, false))
        else {
            continue;
        };
        if response.delay.is_zero() {
            let _ = socket.send_to(&response.bytes, peer);
        } else {
            let socket = socket.clone();
            std::thread::spawn(move || {
                std::thread::sleep(response.delay);
                let _ = socket.send_to(&response.bytes, peer);
            });
        }
    }
}

fn serve_tcp(listener: &TcpListener, zone: &Zone, stop: &Arc<AtomicBool>, askers: &Askers) {
    while !stop.load(Ordering::Relaxed) {
        let Some((stream, peer)) = listening::accept(listener, TICK) else {
            continue;
        };
        let (zone, stop, askers) = (zone.clone(), stop.clone(), askers.clone());
        std::thread::spawn(move || {
            let _ = serve_stream(stream, &zone, &stop, || askers.note(peer));
        });
    }
}

fn serve_stream(
    mut stream: TcpStream,
    zone: &Zone,
    stop: &AtomicBool,
    note: impl Fn(),
) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(TICK))?;
    while !stop.load(Ordering::Relaxed) {
        let mut length = [0; 2];
        match stream.read(&mut length[..1]) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(e) => return Err(e),
        }
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.read_exact(&mut length[1..])?;
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut query)?;
        stream.set_read_timeout(Some(TICK))?;
        note();
        let Some(response) = zone.respond(&query, true) else {
            continue;
        };
        std::thread::sleep(response.delay);
        let size = u16::try_from(response.bytes.len()).unwrap_or(u16::MAX);
        let mut framed = size.to_be_bytes().to_vec();
        framed.extend_from_slice(&response.bytes);
        stream.write_all(&framed)?;
    }
    Ok(())
}
