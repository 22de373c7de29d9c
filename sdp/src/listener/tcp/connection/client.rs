//! The client's side of a connection.

use std::{
    io,
    net::{Shutdown, SocketAddr},
    time::Instant,
};

use socket2::SockRef;
use tokio::net::TcpStream;

use crate::listener::tcp::frames::{FrameReader, FrameWriter, Read};

pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    pub(super) reader: FrameReader,
    pub(super) out: FrameWriter,
    /// Whether the client has stopped sending.
    pub(super) ended: bool,
    /// Whether the end of the stream was sent, with the last answer or alone.
    pub(super) finished: bool,
    pub(super) last_activity: Instant,
}

impl Client {
    pub(super) fn new(stream: TcpStream, address: SocketAddr, now: Instant) -> Self {
        Self {
            stream,
            address,
            reader: FrameReader::default(),
            out: FrameWriter::default(),
            ended: false,
            finished: false,
            last_activity: now,
        }
    }

    /// Reads without waiting, until the client sends no more.
    pub(super) fn read_now(&mut self) -> io::Result<Read> {
        let read = self.reader.read_now(&self.stream);
        self.ended |= matches!(read, Ok(Read::End) | Err(_));
        read
    }

    /// Sends as much as the client takes now.
    pub(super) fn flush(&mut self, now: Instant) -> io::Result<()> {
        if self.out.flush(&self.stream)? {
            self.last_activity = now;
        }
        Ok(())
    }

    /// Like [`Self::flush`], for the last answer. The end of the stream goes with it in one
    /// segment. A client that sends its next query after the answer sees the end first, so its
    /// query does not meet a closed connection.
    pub(super) fn flush_last(&mut self, now: Instant) -> io::Result<()> {
        let _ = SockRef::from(&self.stream).set_tcp_cork(true);
        self.flush(now)?;
        if self.out.len() == 0 {
            self.finished = self.end().is_ok();
        } else {
            // The client's window is full. The part that was sent must not wait for the rest.
            let _ = SockRef::from(&self.stream).set_tcp_cork(false);
        }
        Ok(())
    }

    /// Sends the end of the stream.
    pub(super) fn end(&self) -> io::Result<()> {
        SockRef::from(&self.stream).shutdown(Shutdown::Write)
    }
}
