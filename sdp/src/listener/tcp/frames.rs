//! Messages on a stream: two bytes of length, then the message (RFC 1035, 4.2.2).

use std::io::{self, Read as _};

use socket2::SockRef;
use tokio::{io::Interest, net::TcpStream};

/// Maximum number of bytes that are read at once.
const READ: usize = 16 * 1024;
/// Bytes of the first read. An empty buffer of this size is kept.
const SMALL: usize = 2 * 1024;

/// Received bytes that are not yet complete messages.
#[derive(Debug)]
pub struct FrameReader {
    buffer: Vec<u8>,
    taken: usize,
    /// Minimum number of bytes to read next time.
    wanted: usize,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self {
            buffer: Vec::new(),
            taken: 0,
            wanted: SMALL,
        }
    }
}

/// Result of reading from a stream once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// Bytes were read into the buffer.
    Some,
    /// No bytes are available at the moment.
    Nothing,
    /// The peer sends no more.
    End,
}

impl FrameReader {
    /// Reads available bytes without waiting, if the runtime reports that there are some.
    pub(super) fn fill(&mut self, stream: &TcpStream) -> io::Result<Read> {
        self.append(|room| {
            let mut came = None;
            let read = stream.try_io(Interest::READABLE, || {
                let length = (&*SockRef::from(stream)).read(room)?;
                came = Some(length);
                // A short read means that no bytes are left. Returning `WouldBlock` saves the read
                // that would show it. The end of the stream is a separate event and is not lost.
                if length > 0 && length < room.len() {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Ok(length)
            });
            came.map_or(read, Ok)
        })
    }

    /// Reads available bytes without waiting, even if the runtime has not reported them yet.
    pub(super) fn read_now(&mut self, stream: &TcpStream) -> io::Result<Read> {
        self.append(|room| (&*SockRef::from(stream)).read(room))
    }

    fn append(&mut self, read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<Read> {
        self.room();
        let filled = self.buffer.len();
        self.buffer.resize(self.buffer.capacity(), 0);
        let room = self.buffer.get_mut(filled..).unwrap_or_default();
        let wanted = room.len();
        let came = read(room);
        self.buffer
            .truncate(filled + came.as_ref().copied().unwrap_or(0));
        match came {
            Ok(0) => Ok(Read::End),
            Ok(length) => {
                if length == wanted {
                    self.wanted = (2 * self.wanted).min(READ);
                }
                Ok(Read::Some)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Read::Nothing),
            Err(e) => Err(e),
        }
    }

    /// Buffer to which received bytes are appended.
    pub fn room(&mut self) -> &mut Vec<u8> {
        if self.taken > 0 {
            self.buffer.drain(..self.taken);
            self.taken = 0;
        }
        if self.buffer.capacity() - self.buffer.len() < self.wanted {
            self.buffer.reserve_exact(self.wanted);
        }
        &mut self.buffer
    }

    /// Bytes of memory in use.
    pub(super) fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Frees a large buffer that is empty.
    pub(super) fn shrink(&mut self) {
        if !self.is_partial() && self.buffer.capacity() > SMALL {
            *self = Self::default();
        }
    }

    /// Moves the next complete message into `into`. Returns whether there was one.
    pub fn take(&mut self, into: &mut Vec<u8>) -> bool {
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        let Some((length, body)) = rest.split_first_chunk::<2>() else {
            return false;
        };
        let length = usize::from(u16::from_be_bytes(*length));
        let Some(message) = body.get(..length) else {
            return false;
        };
        into.clear();
        into.extend_from_slice(message);
        self.taken += 2 + length;
        true
    }

    /// Whether the buffer has a part of a message.
    pub fn is_partial(&self) -> bool {
        self.taken < self.buffer.len()
    }
}

/// Bytes that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct FrameWriter {
    buffer: Vec<u8>,
    sent: usize,
}

impl FrameWriter {
    /// Adds a message. A message that is too long for the length field is dropped.
    pub(super) fn push(&mut self, message: &[u8]) {
        // Frees the sent bytes, so that they do not accumulate for a peer that never reads
        // everything.
        if self.sent > self.len() {
            self.buffer.drain(..self.sent);
            self.sent = 0;
        }
        if let Ok(length) = u16::try_from(message.len()) {
            self.buffer.extend_from_slice(&length.to_be_bytes());
            self.buffer.extend_from_slice(message);
        }
    }

    /// Number of bytes that are not sent yet.
    pub(super) fn len(&self) -> usize {
        self.buffer.len() - self.sent
    }

    /// Writes as much as the socket accepts, without waiting. Returns whether it accepted any
    /// bytes.
    pub(super) fn flush(&mut self, stream: &TcpStream) -> io::Result<bool> {
        let mut progress = false;
        while self.len() > 0 {
            match stream.try_write(self.buffer.get(self.sent..).unwrap_or_default()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => {
                    self.sent += sent;
                    progress = true;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(progress),
                Err(e) => return Err(e),
            }
        }
        self.clear();
        Ok(progress)
    }

    /// Bytes of memory in use.
    pub(super) fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Frees a large buffer that is empty.
    pub(super) fn shrink(&mut self) {
        if self.len() == 0 && self.buffer.capacity() > SMALL {
            *self = Self::default();
        }
    }

    /// Drops all bytes, sent or not.
    pub(super) fn clear(&mut self) {
        self.buffer.clear();
        self.sent = 0;
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpSocket;

    use super::*;

    #[tokio::test]
    async fn bytes_that_a_slow_peer_has_read_are_freed() {
        /// More than the kernel buffers at once.
        const WAITING: usize = 400_000;
        let socket = || {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_send_buffer_size(1 << 14).unwrap();
            socket.set_recv_buffer_size(1 << 14).unwrap();
            socket
        };
        let listener = socket();
        listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = listener.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let near = socket().connect(address).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let mut out = FrameWriter::default();
        let message = [7; 50_000];
        let mut taken = vec![0; 40_000];
        let mut total = 0;
        // Runs until more was sent than may ever wait here.
        while total < 8 << 20 {
            while out.len() < WAITING {
                out.push(&message);
            }
            tokio::select! {
                _ = near.writable() => {
                    out.flush(&near).unwrap();
                }
                _ = far.readable() => {
                    total += far.try_read(&mut taken).unwrap_or(0);
                }
            }
            assert!(out.buffer.len() <= 3 * WAITING, "{}", out.buffer.len());
        }
    }
}
