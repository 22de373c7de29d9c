//! HTTP/2 keepalive as in grpc-go's server. It pings a client that is silent, and disconnects one
//! that pings too often.
//!
//! A ping counts as a strike if it comes less than the minimal time after the last one, unless
//! headers or data were sent in between. The third strike ends the connection with
//! ENHANCE_YOUR_CALM.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use super::Seen;

/// Length in bytes of what a client sends first (RFC 9113, 3.4).
const PREFACE: usize = 24;
const HEADER: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const ACK: u8 = 1;
const OURS: &[u8; 8] = b"stand-in";
const ENHANCE_YOUR_CALM: u32 = 0xb;

/// grpc-go's parameters. The defaults are the values of Cilium's agent.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The client is pinged after this silence.
    pub idle: Duration,
    /// Longest wait for the client's next bytes after a ping.
    pub answer: Duration,
    /// A ping of the client is a strike if it comes less than this after the last one.
    pub min_ping: Duration,
    /// Strikes that are tolerated; the next one ends the connection.
    pub strikes: u32,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(5),
            answer: Duration::from_secs(1),
            min_ping: Duration::from_secs(300),
            strikes: 2,
        }
    }
}

impl Timing {
    /// The default timing, with the server's pings `divisor` times as often.
    pub fn hurried(divisor: u32) -> Self {
        let calm = Self::default();
        Self {
            idle: calm.idle / divisor,
            ..calm
        }
    }
}

/// Cuts a stream of bytes into frames.
#[derive(Debug)]
struct Frames {
    bytes: Vec<u8>,
    preface: usize,
}

/// What to do with a frame.
enum Fate {
    Pass,
    Swallow,
    EndConnection,
}

impl Frames {
    fn new(preface: usize) -> Self {
        Self {
            bytes: Vec::new(),
            preface,
        }
    }

    /// The next whole frame, or the preface, with whether it is a frame.
    fn next(&mut self) -> Option<(bool, Vec<u8>)> {
        if self.preface > 0 {
            let length = std::mem::take(&mut self.preface);
            if self.bytes.len() < length {
                self.preface = length;
                return None;
            }
            return Some((false, self.bytes.drain(..length).collect()));
        }
        let header = self.bytes.get(..HEADER)?;
        let length = header
            .iter()
            .take(3)
            .fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        let whole = HEADER + length;
        (self.bytes.len() >= whole).then(|| (true, self.bytes.drain(..whole).collect()))
    }
}

struct Watch {
    timing: Timing,
    seen: Arc<Mutex<Seen>>,
    last_read: Instant,
    pinged: Option<Instant>,
    last_client_ping: Option<Instant>,
    sent_since: bool,
    strikes: u32,
}

/// Passes frames between `client` and `server` until either side ends.
pub(super) async fn watch(
    client: TcpStream,
    server: DuplexStream,
    timing: Timing,
    seen: Arc<Mutex<Seen>>,
) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let (mut up, mut down) = (Frames::new(PREFACE), Frames::new(0));
    let mut watch = Watch {
        timing,
        seen,
        last_read: Instant::now(),
        pinged: None,
        last_client_ping: None,
        sent_since: false,
        strikes: 0,
    };
    loop {
        tokio::select! {
            read = from_client.read_buf(&mut up.bytes) => {
                if !read.is_ok_and(|length| length > 0) {
                    return;
                }
                while let Some((is_frame, bytes)) = up.next() {
                    match watch.came_from_client(is_frame, &bytes) {
                        Fate::Pass => if to_server.write_all(&bytes).await.is_err() { return },
                        Fate::Swallow => {}
                        Fate::EndConnection => {
                            // The client may be gone already.
                            let _ = to_client.write_all(&too_many_pings()).await;
                            return;
                        }
                    }
                }
            }
            read = from_server.read_buf(&mut down.bytes) => {
                if !read.is_ok_and(|length| length > 0) {
                    return;
                }
                while let Some((_, bytes)) = down.next() {
                    let kind = bytes.get(3).copied();
                    watch.sent_since |= kind == Some(DATA) || kind == Some(HEADERS);
                    if to_client.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
            }
            () = sleep_until(watch.deadline()) => {
                if watch.pinged.is_some() {
                    watch.seen.lock().unanswered_pings += 1;
                    return;
                }
                watch.pinged = Some(Instant::now());
                if to_client.write_all(&frame(PING, 0, OURS)).await.is_err() {
                    return;
                }
            }
        }
    }
}

impl Watch {
    fn deadline(&self) -> Instant {
        match self.pinged {
            Some(at) => at + self.timing.answer,
            None => self.last_read + self.timing.idle,
        }
    }

    fn came_from_client(&mut self, is_frame: bool, bytes: &[u8]) -> Fate {
        let now = Instant::now();
        self.last_read = now;
        self.pinged = None;
        if !is_frame || bytes.get(3) != Some(&PING) {
            return Fate::Pass;
        }
        if bytes.get(4).is_some_and(|flags| flags & ACK != 0) {
            if bytes.get(HEADER..) != Some(OURS) {
                return Fate::Pass;
            }
            self.seen.lock().answered_pings += 1;
            return Fate::Swallow;
        }
        let mut seen = self.seen.lock();
        seen.client_pings += 1;
        let last = self.last_client_ping.replace(now);
        if std::mem::take(&mut self.sent_since) {
            self.strikes = 0;
        } else if last.is_some_and(|last| now.duration_since(last) < self.timing.min_ping) {
            self.strikes += 1;
        }
        if self.strikes > self.timing.strikes {
            seen.too_many_pings += 1;
            return Fate::EndConnection;
        }
        Fate::Pass
    }
}

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len())
        .unwrap_or(u32::MAX)
        .to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 0];
    frame.extend_from_slice(payload);
    frame
}

fn too_many_pings() -> Vec<u8> {
    const GOAWAY: u8 = 7;
    let mut payload = i32::MAX.to_be_bytes().to_vec();
    payload.extend_from_slice(&ENHANCE_YOUR_CALM.to_be_bytes());
    payload.extend_from_slice(b"too_many_pings");
    frame(GOAWAY, 0, &payload)
}
