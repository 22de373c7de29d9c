//! A forwarder that only copies datagrams, or the bytes of connections. It shows the highest rate
//! that one thread can reach on the benchmark's machine. Over UDP it replaces the two bytes of the
//! id, to find the client of an answer. It reads nothing else.

use std::io::{IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    MsgFlags, MultiHeaders, SockaddrIn, SockaddrIn6, SockaddrLike, recvmmsg, sendmmsg,
};
use tokio::net::{TcpListener, TcpStream};

const BATCH: usize = 64;
const LARGEST: usize = 4096;

/// Clients and their ids, by the id of the forwarded query.
type Asked<A> = Vec<Option<([u8; 2], A)>>;

/// Buffers for one batch of datagrams.
struct Batch<A> {
    buffers: Vec<[u8; LARGEST]>,
    /// Length and source of each datagram.
    got: Vec<(usize, Option<A>)>,
}

/// Both addresses are of one family.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Where clients ask
    listen: SocketAddr,
    /// Where answers come from
    server: SocketAddr,
    /// Over which protocol
    #[arg(value_enum, default_value_t = Protocol::Udp)]
    protocol: Protocol,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protocol {
    Udp,
    Tcp,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let Options {
        listen,
        server,
        protocol,
    } = *options;
    if protocol == Protocol::Tcp {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        return runtime.block_on(forward_connections(listen, server));
    }
    let clients = UdpSocket::bind(listen).with_context(|| format!("bind {listen}"))?;
    let any = match server {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let upstream = UdpSocket::bind(any)?;
    upstream.connect(server)?;
    for socket in [&clients, &upstream] {
        let socket = socket2::SockRef::from(socket);
        socket.set_recv_buffer_size(4 << 20)?;
        socket.set_send_buffer_size(4 << 20)?;
    }
    match server {
        SocketAddr::V4(_) => forward::<SockaddrIn>(&clients, &upstream),
        SocketAddr::V6(_) => forward::<SockaddrIn6>(&clients, &upstream),
    }
}

async fn forward_connections(listen: SocketAddr, server: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen).await?;
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (mut client, _) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            // An error ends this connection only.
            if let Ok(mut upstream) = TcpStream::connect(server).await {
                let _ = client.set_nodelay(true);
                let _ = upstream.set_nodelay(true);
                let _ = tokio::io::copy_bidirectional(&mut client, &mut upstream).await;
            }
        });
    }
}

fn forward<A: SockaddrLike + Copy>(clients: &UdpSocket, upstream: &UdpSocket) -> Result<()> {
    let mut asked: Asked<A> = vec![None; 1 << 16];
    let mut next: u16 = 0;
    let mut batch = Batch {
        buffers: vec![[0; LARGEST]; BATCH],
        got: Vec::with_capacity(BATCH),
    };
    loop {
        let mut ready = [
            PollFd::new(clients.as_fd(), PollFlags::POLLIN),
            PollFd::new(upstream.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut ready, PollTimeout::NONE)?;
        let [queries, answers] = ready.map(|fd| fd.any() == Some(true));
        if queries {
            batch.receive(clients)?;
            for (buffer, (_, source)) in batch.buffers.iter_mut().zip(&batch.got) {
                next = next.wrapping_add(1);
                let Some(source) = source else { continue };
                let [high, low, ..] = buffer;
                asked[usize::from(next)] = Some(([*high, *low], *source));
                [*high, *low] = next.to_be_bytes();
            }
            for (_, to) in &mut batch.got {
                *to = None;
            }
            batch.send(upstream);
        }
        if answers {
            batch.receive(upstream)?;
            for (buffer, (length, to)) in batch.buffers.iter_mut().zip(&mut batch.got) {
                let [high, low, ..] = buffer;
                let id = usize::from(u16::from_be_bytes([*high, *low]));
                match asked[id].take() {
                    Some((id, source)) => {
                        [*high, *low] = id;
                        *to = Some(source);
                    }
                    None => *length = 0,
                }
            }
            batch.send(clients);
        }
    }
}

impl<A: SockaddrLike + Copy> Batch<A> {
    fn receive(&mut self, socket: &UdpSocket) -> Result<()> {
        self.got.clear();
        let mut headers = MultiHeaders::<A>::preallocate(BATCH, None);
        let mut slices: Vec<[IoSliceMut<'_>; 1]> = self
            .buffers
            .iter_mut()
            .map(|buffer| [IoSliceMut::new(buffer)])
            .collect();
        let flags = MsgFlags::MSG_DONTWAIT;
        match recvmmsg(
            socket.as_raw_fd(),
            &mut headers,
            slices.iter_mut(),
            flags,
            None,
        ) {
            Ok(messages) => self.got.extend(messages.map(|m| (m.bytes, m.address))),
            // The socket is empty after all, or the server's port was closed.
            Err(Errno::EAGAIN | Errno::ECONNREFUSED) => {}
            Err(error) => return Err(error).context("receive"),
        }
        Ok(())
    }

    /// Sends as many datagrams as the socket takes. The rest are lost.
    fn send(&self, socket: &UdpSocket) {
        let (slices, to): (Vec<[IoSlice<'_>; 1]>, Vec<_>) = self
            .buffers
            .iter()
            .zip(&self.got)
            .filter_map(|(buffer, (length, to))| {
                let bytes = buffer.get(..*length).filter(|bytes| !bytes.is_empty())?;
                Some(([IoSlice::new(bytes)], *to))
            })
            .unzip();
        if slices.is_empty() {
            return;
        }
        let mut headers = MultiHeaders::<A>::preallocate(slices.len(), None);
        let _ = sendmmsg(
            socket.as_raw_fd(),
            &mut headers,
            &slices,
            &to,
            [],
            MsgFlags::MSG_DONTWAIT,
        );
    }
}
