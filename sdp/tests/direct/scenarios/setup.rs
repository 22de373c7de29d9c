//! Clients, server and proxy of one case with their real sockets, and the received messages.

use std::{
    collections::HashMap,
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use socket2::SockRef;

use super::{
    message,
    script::{Ask, End},
};
use crate::bench::{Bench, NEIGHBOUR, Options, TEST_TIMEOUT};

/// Pause between two looks at the server's sockets.
const TICK: Duration = Duration::from_millis(1);

pub(super) struct Setup {
    pub(super) bench: Bench,
    clients: HashMap<String, Client>,
    connections: Vec<Connection>,
    /// Messages at the server that no line of the case has mentioned yet.
    unclaimed: Vec<Received>,
}

struct Client {
    udp: UdpSocket,
    tcp: Option<TcpStream>,
}

/// A connection at the server.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The proxy has closed it.
    is_over: bool,
}

/// A query at the server.
#[derive(Clone, Debug)]
pub(super) struct Received {
    pub(super) bytes: Vec<u8>,
    pub(super) from: From,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum From {
    Udp(SocketAddr),
    Tcp(usize),
}

/// Source of a datagram to the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Server,
    OtherPort,
    OtherAddress,
}

impl Setup {
    pub(super) fn new(options: Options) -> Self {
        let bench = Bench::new(options);
        bench.server.set_nonblocking(true).unwrap();
        bench.tcp_server.set_nonblocking(true).unwrap();
        Self {
            bench,
            clients: HashMap::new(),
            connections: Vec::new(),
            unclaimed: Vec::new(),
        }
    }

    fn client(&mut self, name: &str) -> &mut Client {
        let bench = &self.bench;
        self.clients
            .entry(name.to_owned())
            .or_insert_with(|| Client {
                udp: bench.client(),
                tcp: None,
            })
    }

    /// Sends a query. Over TCP it uses the client's connection, and opens one if there is none.
    pub(super) fn ask(&mut self, ask: &Ask, bytes: &[u8]) -> Result<(), String> {
        self.client(&ask.client);
        let (bench, client) = (&self.bench, self.clients.get_mut(&ask.client));
        let client = client.ok_or("no client")?;
        if !ask.tcp {
            return client.udp.send(bytes).map(drop).map_err(said("sending"));
        }
        let open = || match ask.client.as_str() {
            "neighbour" => bench.tcp_client_from(NEIGHBOUR),
            _ => bench.tcp_client(),
        };
        let stream = client.tcp.get_or_insert_with(open);
        if ask.bare {
            return stream.write_all(bytes).map_err(said("sending"));
        }
        write(stream, bytes, ask.bytewise)
    }

    /// The next message at a client. `None` if its connection was closed.
    pub(super) fn receive(&mut self, client: &str, tcp: bool) -> Result<Option<Vec<u8>>, String> {
        let client = self.client(client);
        if tcp {
            let mut stream = client.tcp.as_ref().ok_or("the client has no connection")?;
            let mut length = [0; 2];
            return match stream.read_exact(&mut length) {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    Err("nothing came".to_owned())
                }
                Err(_) => Ok(None),
                Ok(()) => {
                    let mut bytes = vec![0; usize::from(u16::from_be_bytes(length))];
                    stream
                        .read_exact(&mut bytes)
                        .map_err(said("reading an answer"))?;
                    Ok(Some(bytes))
                }
            };
        }
        let mut bytes = vec![0; 65_535];
        let length = client.udp.recv(&mut bytes).map_err(|e| match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => "nothing came".to_owned(),
            _ => format!("receiving: {e}"),
        })?;
        bytes.truncate(length);
        Ok(Some(bytes))
    }

    /// A client ends its connection.
    pub(super) fn hangup(&mut self, client: &str, end: End) -> Result<(), String> {
        let tcp = &mut self.client(client).tcp;
        let stream = tcp.as_ref().ok_or("the client has no connection")?;
        match end {
            End::OfSending => return stream.shutdown(Shutdown::Write).map_err(said("closing")),
            End::Reset => SockRef::from(stream)
                .set_linger(Some(Duration::ZERO))
                .map_err(said("closing"))?,
            End::Both => {}
        }
        *tcp = None;
        Ok(())
    }

    /// Waits until the server has received `body`, a query without its id.
    pub(super) fn receive_query(&mut self, body: &[u8]) -> Result<Received, String> {
        let found = polling::eventually("the query as it was sent", TEST_TIMEOUT, || {
            self.poll()?;
            let mut all = self.unclaimed.iter();
            all.position(|received| received.bytes.get(2..) == Some(body))
                .ok_or_else(|| self.told_unheard())
        });
        let at = found.map_err(|late| format!("at the server: {late}"))?;
        Ok(self.unclaimed.remove(at))
    }

    /// Reads all messages that have arrived at the server.
    fn poll(&mut self) -> Result<(), String> {
        let mut bytes = vec![0; 65_535];
        while let Ok((length, from)) = self.bench.server.recv_from(&mut bytes) {
            let bytes = bytes[..length].to_vec();
            let from = From::Udp(from);
            self.unclaimed.push(Received { bytes, from });
        }
        while let Ok((stream, _)) = self.bench.tcp_server.accept() {
            stream.set_nodelay(true).map_err(said("accepting"))?;
            let buffer = Vec::new();
            let is_over = false;
            self.connections.push(Connection {
                stream,
                buffer,
                is_over,
            });
        }
        for (number, connection) in self.connections.iter_mut().enumerate() {
            let stream = &mut connection.stream;
            stream.set_nonblocking(true).map_err(said("reading"))?;
            connection.is_over |= loop {
                match stream.read(&mut bytes) {
                    Ok(0) => break true,
                    Ok(length) => connection.buffer.extend_from_slice(&bytes[..length]),
                    Err(error) => break error.kind() == ErrorKind::ConnectionReset,
                }
            };
            while let Some((length, rest)) = connection.buffer.split_first_chunk::<2>()
                && let Some(message) = rest.get(..usize::from(u16::from_be_bytes(*length)))
            {
                let bytes = message.to_vec();
                connection.buffer.drain(..2 + bytes.len());
                let from = From::Tcp(number);
                self.unclaimed.push(Received { bytes, from });
            }
        }
        Ok(())
    }

    /// Sends to the source of a query.
    pub(super) fn reply(
        &self,
        to: From,
        bytes: &[u8],
        bytewise: bool,
        source: Source,
    ) -> Result<(), String> {
        match to {
            From::Tcp(number) => {
                let connection = self.connections.get(number).ok_or("no connection")?;
                let stream = &connection.stream;
                stream.set_nonblocking(false).map_err(said("sending"))?;
                write(stream, bytes, bytewise)
            }
            From::Udp(to) => {
                let server = self.bench.server_address;
                let sent = match source {
                    Source::Server => self.bench.server.send_to(bytes, to),
                    Source::OtherPort => other((server.ip(), 0).into())?.send_to(bytes, to),
                    Source::OtherAddress => {
                        other(([127, 0, 0, 2], server.port()).into())?.send_to(bytes, to)
                    }
                };
                sent.map(drop).map_err(said("sending"))
            }
        }
    }

    /// Closes the server's UDP port, or opens it again.
    pub(super) fn port(&mut self, open: bool) -> Result<(), String> {
        let (ip, port) = (
            self.bench.server_address.ip(),
            self.bench.server_address.port(),
        );
        self.bench.server = other((ip, if open { port } else { 0 }).into())?;
        self.bench
            .server
            .set_nonblocking(true)
            .map_err(said("binding"))
    }

    /// The server closes the connection of a query.
    pub(super) fn close(&mut self, on: From) -> Result<(), String> {
        let From::Tcp(number) = on else {
            return Err("the query came over UDP: there is nothing to close".to_owned());
        };
        let connection = self.connections.get(number).ok_or("no connection")?;
        let stream = &connection.stream;
        stream.shutdown(Shutdown::Both).map_err(said("closing"))
    }

    /// Waits until the proxy has closed the connection of a query.
    pub(super) fn closed(&mut self, on: From) -> Result<(), String> {
        let From::Tcp(number) = on else {
            return Err("the query came over UDP: there is nothing to close".to_owned());
        };
        let found = polling::eventually("the end of the connection", TEST_TIMEOUT, || {
            self.poll()?;
            let connection = self.connections.get(number).ok_or("no connection")?;
            let is_over = connection.is_over.then_some(());
            is_over.ok_or_else(|| "it is open".to_owned())
        });
        found.map_err(|late| format!("at the server: {late}"))
    }

    /// Connections that the server has accepted so far.
    pub(super) fn connections(&mut self) -> Result<usize, String> {
        self.poll()?;
        Ok(self.connections.len())
    }

    /// Checks that no message is left that no line mentioned.
    pub(super) fn end(mut self) -> Result<(), String> {
        self.poll()?;
        if !self.unclaimed.is_empty() {
            return Err(format!(
                "at the end the server had got {}",
                self.told_unheard()
            ));
        }
        let mut bytes = vec![0; 65_535];
        for (name, client) in &mut self.clients {
            let mut got = Vec::new();
            client.udp.set_nonblocking(true).unwrap();
            got.push(client.udp.recv(&mut bytes).unwrap_or(0));
            if let Some(stream) = &mut client.tcp {
                stream.set_nonblocking(true).unwrap();
                got.push(stream.read(&mut bytes).unwrap_or(0));
            }
            if got.iter().any(|length| *length > 0) {
                return Err(format!("at the end {name} had got another answer"));
            }
        }
        Ok(())
    }

    fn told_unheard(&self) -> String {
        let all: Vec<_> = self.unclaimed.iter().map(|h| hex(&h.bytes)).collect();
        if all.is_empty() {
            "nothing".to_owned()
        } else {
            all.join(", ")
        }
    }
}

/// The first 600 bytes as hexadecimal digits, with spaces after the header and the question.
pub(super) fn hex(bytes: &[u8]) -> String {
    let digits: Vec<_> = bytes.iter().take(600).map(|b| format!("{b:02x}")).collect();
    let question = message::question(bytes).map_or(0, <[u8]>::len);
    let mut text = digits.join("");
    // A space after the header and after the question.
    for at in [12 + question, 12] {
        if text.len() > 2 * at {
            text.insert(2 * at, ' ');
        }
    }
    text
}

fn said(what: &'static str) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{what}: {error}")
}

fn other(at: SocketAddr) -> Result<UdpSocket, String> {
    UdpSocket::bind(at).map_err(said("binding another socket"))
}

/// A message with its length, in one write or byte by byte.
fn write(mut stream: &TcpStream, bytes: &[u8], bytewise: bool) -> Result<(), String> {
    let length = u16::try_from(bytes.len()).map_err(|_| "too long for TCP")?;
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend_from_slice(bytes);
    let step = if bytewise { 1 } else { frame.len() };
    for piece in frame.chunks(step) {
        stream.write_all(piece).map_err(said("sending"))?;
        if bytewise {
            // Without the pause, the kernel may join pieces.
            std::thread::sleep(TICK / 4);
        }
    }
    Ok(())
}
