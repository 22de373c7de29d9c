//! A netlink socket to nf_tables: batches of changes, objects and listings.

use std::{io, ops::RangeInclusive, os::fd::AsFd as _};

use nix::sys::socket::{setsockopt, sockopt::SndBufForce};
use rtnetlink::sys::{Socket, SocketAddr};

use super::{
    NftablesError,
    attribute::{Attribute, find},
    message::{FAMILY_HEADER, HEADER, Message, NFTABLES, put},
};

pub(super) const NETLINK_NETFILTER: isize = 12;
/// `NFNL_MSG_BATCH_BEGIN`, `NFNL_MSG_BATCH_END`.
const BATCH: [u16; 2] = [0x10, 0x11];
/// `NLMSG_ERROR`, `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLM_F_ACK`, `NLM_F_DUMP`.
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
/// `NLM_F_DUMP_INTR`: the ruleset changed while it was listed.
const INTERRUPTED: u16 = 0x10;
/// Maximum attempts to list objects, if changes interrupt the listing.
const LISTINGS: u32 = 8;
/// Batches of more bytes need a larger send buffer. The kernel's default is at least 100 KiB.
const SMALL: usize = 64 << 10;

/// A netlink socket of the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Netfilter {
    socket: Socket,
    port: u32,
    sequence: u32,
    /// Bytes of the largest batch that the send buffer accepts.
    batch: usize,
}

impl Netfilter {
    pub(crate) fn open() -> Result<Self, NftablesError> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        let port = socket.bind_auto()?.port_number();
        socket.connect(&SocketAddr::new(0, 0))?;
        // The kernel answers before `send` returns: an answer that is not there will not come.
        socket.set_non_blocking(true)?;
        // Refusals come without the refused message, which may be long.
        socket.set_cap_ack(true)?;
        Ok(Self {
            socket,
            port,
            sequence: 0,
            batch: SMALL,
        })
    }

    /// The number by which reports of changes name this socket.
    pub(super) const fn port(&self) -> u32 {
        self.port
    }

    /// Makes all changes at once, or none.
    pub(crate) fn commit(&mut self, messages: &[Message]) -> Result<(), NftablesError> {
        self.send_batch(messages, true)
    }

    /// Lets the kernel check all changes and make none: it undoes a batch without an end.
    pub(crate) fn check(&mut self, messages: &[Message]) -> Result<(), NftablesError> {
        self.send_batch(messages, false)
    }

    /// Only the last message is acknowledged: acknowledgements of all do not fit into the receive buffer.
    fn send_batch(&mut self, messages: &[Message], has_end: bool) -> Result<(), NftablesError> {
        let Some(last) = messages.len().checked_sub(1) else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        let begin = self.next();
        put(&mut bytes, BATCH[0], 0, begin, 0, NFTABLES, &[]);
        for (at, message) in messages.iter().enumerate() {
            let flags = if at == last { ACK } else { 0 };
            message.emit(self.next(), flags, &mut bytes);
        }
        let acknowledged = self.sequence;
        if has_end {
            let end = self.next();
            put(&mut bytes, BATCH[1], 0, end, 0, NFTABLES, &[]);
        }
        self.make_room(bytes.len())?;
        self.socket.send(&bytes, 0)?;
        let result = self.result_of(messages, begin..=acknowledged);
        if result.is_err() {
            // Further refusals would leave no room for the next answers.
            while self.receive().is_ok() {}
        }
        result
    }

    /// The first refusal, or the acknowledgement of the last message. `sequences`: the numbers of
    /// the start of the batch and of the messages.
    fn result_of(
        &mut self,
        messages: &[Message],
        sequences: RangeInclusive<u32>,
    ) -> Result<(), NftablesError> {
        loop {
            for answer in self.receive()? {
                if answer.kind != ERROR || !sequences.contains(&answer.sequence) {
                    continue;
                }
                return answer.result().map_err(|errno| {
                    // The start stands for the whole batch: its first message names the table.
                    let at = (answer.sequence - sequences.start()).saturating_sub(1);
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    let message = messages.get(at);
                    message.map_or(NftablesError::Malformed, |message| errno.of(message))
                });
            }
        }
    }

    /// Lets the kernel accept a batch of this many bytes.
    fn make_room(&mut self, bytes: usize) -> Result<(), NftablesError> {
        if bytes > self.batch {
            // The kernel doubles the number, and the rest is for its own records.
            setsockopt(&self.socket.as_fd(), SndBufForce, &bytes).map_err(io::Error::from)?;
            self.batch = bytes;
        }
        Ok(())
    }

    /// One object; `None` if it is not there.
    pub(crate) fn get(&mut self, message: &Message) -> Result<Option<Object>, NftablesError> {
        let mut bytes = Vec::new();
        let sequence = self.next();
        message.emit(sequence, 0, &mut bytes);
        self.socket.send(&bytes, 0)?;
        loop {
            for answer in self.receive()? {
                if answer.sequence != sequence {
                    continue;
                }
                if answer.kind != ERROR {
                    return Ok(Some(Object(answer.body)));
                }
                return match answer.result() {
                    Err(Errno(Some(libc::ENOENT))) => Ok(None),
                    Err(errno) => Err(errno.of(message)),
                    Ok(()) => Err(NftablesError::Malformed),
                };
            }
        }
    }

    /// All objects that the message is about.
    pub(crate) fn list(&mut self, message: &Message) -> Result<Vec<Object>, NftablesError> {
        for _ in 0..LISTINGS {
            if let Some(objects) = self.try_list(message)? {
                return Ok(objects);
            }
        }
        Err(Errno(Some(libc::EINTR)).of(message))
    }

    /// Like [`Self::list`]; `None` if the ruleset changed meanwhile.
    fn try_list(&mut self, message: &Message) -> Result<Option<Vec<Object>>, NftablesError> {
        let mut bytes = Vec::new();
        let sequence = self.next();
        message.emit(sequence, DUMP, &mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut found = Vec::new();
        let mut interrupted = false;
        loop {
            for answer in self.receive()? {
                if answer.sequence != sequence {
                    continue;
                }
                interrupted |= answer.flags & INTERRUPTED != 0;
                match answer.kind {
                    DONE => return Ok((!interrupted).then_some(found)),
                    ERROR => answer.result().map_err(|errno| errno.of(message))?,
                    _ => found.push(Object(answer.body)),
                }
            }
        }
    }

    fn next(&mut self) -> u32 {
        self.sequence += 1;
        self.sequence
    }

    fn receive(&mut self) -> Result<Vec<Answer>, NftablesError> {
        let bytes = match self.socket.recv_from_full() {
            // The last ones of many refusals were lost. The first ones are there.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Vec::new()),
            received => received?.0,
        };
        let mut answers = Vec::new();
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (answer, length) = answer(rest).ok_or(NftablesError::Malformed)?;
            answers.push(answer);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(answers)
    }
}

/// An object as the kernel gives it.
pub(crate) struct Object(Vec<u8>);

impl Object {
    /// Whether it has this attribute.
    pub(crate) fn has(&self, wanted: &Attribute) -> bool {
        wanted.is_in(&self.0)
    }

    pub(super) fn value(&self, kind: u16) -> Option<&[u8]> {
        find(&self.0, kind)
    }

    pub(super) fn text(&self, kind: u16) -> Option<&str> {
        let text = self.value(kind)?.strip_suffix(&[0])?;
        std::str::from_utf8(text).ok()
    }
}

/// An error number of the kernel; `None` if its answer is truncated.
struct Errno(Option<i32>);

impl Errno {
    fn of(self, message: &Message) -> NftablesError {
        match self.0 {
            Some(errno) => NftablesError::Refused {
                what: message.what.clone(),
                option: message.option,
                source: io::Error::from_raw_os_error(errno),
            },
            None => NftablesError::Malformed,
        }
    }
}

/// One message of an answer.
struct Answer {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: Vec<u8>,
}

impl Answer {
    /// What an acknowledgement or the end of a listing says.
    fn result(&self) -> Result<(), Errno> {
        let code = self
            .body
            .first_chunk::<4>()
            .map(|code| i32::from_ne_bytes(*code));
        match code {
            Some(0) => Ok(()),
            Some(code) => Err(Errno(Some(code.saturating_neg()))),
            None => Err(Errno(None)),
        }
    }
}

/// The first message of `bytes`, and how long it is.
fn answer(bytes: &[u8]) -> Option<(Answer, usize)> {
    let word = |at: usize| {
        let word = bytes.get(at..)?.first_chunk::<4>()?;
        Some(u32::from_ne_bytes(*word))
    };
    let half = |at: usize| {
        let half = bytes.get(at..)?.first_chunk::<2>()?;
        Some(u16::from_ne_bytes(*half))
    };
    let length = usize::try_from(word(0)?).ok()?;
    let kind = half(4)?;
    let header = match kind {
        ERROR | DONE => HEADER,
        _ => HEADER + FAMILY_HEADER,
    };
    let answer = Answer {
        kind,
        flags: half(6)?,
        sequence: word(8)?,
        body: bytes.get(header..length)?.to_vec(),
    };
    Some((answer, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nf_tables::message::{Family, TableName};

    #[test]
    fn a_truncated_answer_is_not_read() {
        let mut whole = Vec::new();
        TableName(Family::Inet, "t").get().emit(7, 0, &mut whole);
        assert!(
            answer(&whole)
                .is_some_and(|(found, length)| { found.sequence == 7 && length == whole.len() })
        );
        for end in 0..whole.len() {
            assert!(answer(&whole[..end]).is_none(), "{end}");
        }
    }
}
