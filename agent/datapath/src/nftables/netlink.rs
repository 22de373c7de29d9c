//! As much of nf_tables' netlink protocol as one table needs (`linux/netfilter/nf_tables.h`).
//!
//! Numbers of attributes are in network order, values of registers in the machine's.

use std::io;

use rtnetlink::{
    packet_core::NlasIterator,
    sys::{Socket, SocketAddr},
};

use super::{Family, NftablesError, TABLE};

pub(super) const NETLINK_NETFILTER: isize = 12;
/// `NFNL_SUBSYS_NFTABLES`.
const NFTABLES: u16 = 10;
/// `NFNL_MSG_BATCH_BEGIN`, `NFNL_MSG_BATCH_END`.
const BATCH: [u16; 2] = [0x10, 0x11];
/// Bytes of `nlmsghdr` and of `nfgenmsg`.
const HEADER: usize = 16;
const FAMILY_HEADER: usize = 4;

/// `NLMSG_ERROR`, `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// `NLM_F_REQUEST`, `NLM_F_ACK`, `NLM_F_DUMP`, `NLM_F_CREATE`, `NLM_F_APPEND`.
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
/// `NLM_F_DUMP_INTR`: the ruleset changed while it was listed.
const INTERRUPTED: u16 = 0x10;
/// How often an interrupted listing is begun again.
const LISTINGS: u32 = 8;

/// `NFT_MSG_*`.
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const GET_CHAIN: u16 = 4;
const NEW_RULE: u16 = 6;
const GET_RULE: u16 = 7;

/// `NLA_F_NESTED`.
const NESTED: u16 = 0x8000;
/// `NFTA_LIST_ELEM`.
pub(super) const ELEMENT: u16 = 1;
/// `NFTA_TABLE_NAME`, `NFTA_TABLE_FLAGS`.
const TABLE_NAME: u16 = 1;
pub(super) const TABLE_FLAGS: u16 = 2;
/// `NFTA_CHAIN_TABLE`, `_NAME`, `_HOOK`, `_POLICY`, `_TYPE`; `NFTA_HOOK_HOOKNUM`, `_PRIORITY`.
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
/// `NF_ACCEPT`.
const ACCEPT: u32 = 1;
/// `NFTA_RULE_TABLE`, `_CHAIN`, `_EXPRESSIONS`.
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
pub(super) const RULE_EXPRESSIONS: u16 = 4;

/// A netlink attribute: its type, with a value or with nested attributes.
#[derive(Clone, Debug)]
pub(super) enum Attribute {
    Value(u16, Vec<u8>),
    Nest(u16, Vec<Attribute>),
    /// In order, each of them a nest under [`ELEMENT`].
    List(u16, Vec<Attribute>),
}

impl Attribute {
    pub(super) fn number(kind: u16, value: u32) -> Self {
        Self::Value(kind, value.to_be_bytes().to_vec())
    }

    pub(super) fn text(kind: u16, text: &str) -> Self {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        Self::Value(kind, bytes)
    }

    fn emit(&self, to: &mut Vec<u8>) {
        let start = to.len();
        to.extend([0; 4]);
        let kind = match self {
            Self::Value(kind, value) => {
                to.extend(value);
                *kind
            }
            Self::Nest(kind, attributes) | Self::List(kind, attributes) => {
                for attribute in attributes {
                    attribute.emit(to);
                }
                *kind | NESTED
            }
        };
        let length = u16::try_from(to.len() - start).expect("attributes here are short");
        to[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        to[start + 2..start + 4].copy_from_slice(&kind.to_ne_bytes());
        to.resize(to.len().next_multiple_of(4), 0);
    }

    /// Whether `bytes`, attributes from the kernel, have this one. In a nest the kernel may return further
    /// attributes. A list must have exactly the same elements.
    pub(super) fn is_in(&self, bytes: &[u8]) -> bool {
        match self {
            Self::Value(kind, value) => find(bytes, *kind).is_some_and(|found| found == *value),
            Self::Nest(kind, wanted) => {
                find(bytes, *kind).is_some_and(|found| wanted.iter().all(|w| w.is_in(found)))
            }
            Self::List(kind, wanted) => find(bytes, *kind).is_some_and(|found| {
                let found: Vec<Vec<u8>> = children(found)
                    .map(|(kind, value)| Self::Value(kind, value.to_vec()).bytes())
                    .collect();
                found.len() == wanted.len()
                    && wanted.iter().zip(&found).all(|(w, found)| w.is_in(found))
            }),
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.emit(&mut bytes);
        bytes
    }
}

/// Attributes in `bytes`, up to the first that is cut.
fn children(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(bytes)
        .map_while(Result::ok)
        .map(|attribute| {
            let length = attribute.value_length();
            let value = attribute.into_inner().get(4..4 + length);
            (attribute.kind(), value.unwrap_or_default())
        })
}

fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    children(bytes)
        .find(|(found, _)| *found == kind)
        .map(|(_, value)| value)
}

/// Type, hook and policy of a chain.
pub(super) fn base_chain(hook: u32, priority: i32) -> Vec<Attribute> {
    vec![
        Attribute::Nest(
            CHAIN_HOOK,
            vec![
                Attribute::number(HOOK_NUMBER, hook),
                Attribute::Value(HOOK_PRIORITY, priority.to_be_bytes().to_vec()),
            ],
        ),
        Attribute::number(CHAIN_POLICY, ACCEPT),
        Attribute::text(CHAIN_TYPE, "filter"),
    ]
}

/// A message about the table of a family.
pub(super) struct Message {
    family: Family,
    what: &'static str,
    kind: u16,
    flags: u16,
    attributes: Vec<Attribute>,
}

impl Message {
    pub(super) fn new_table(family: Family) -> Self {
        let attributes = vec![
            Attribute::text(TABLE_NAME, TABLE),
            Attribute::number(TABLE_FLAGS, 0),
        ];
        Self::of(family, "the head", NEW_TABLE, CREATE, attributes)
    }

    pub(super) fn delete_table(family: Family) -> Self {
        let name = vec![Attribute::text(TABLE_NAME, TABLE)];
        Self::of(family, "the removal", DELETE_TABLE, 0, name)
    }

    pub(super) fn get_table(family: Family) -> Self {
        let name = vec![Attribute::text(TABLE_NAME, TABLE)];
        Self::of(family, "the reading", GET_TABLE, 0, name)
    }

    pub(super) fn new_chain(
        family: Family,
        name: &'static str,
        attributes: Vec<Attribute>,
    ) -> Self {
        let mut all = chain_names(name);
        all.extend(attributes);
        Self::of(family, name, NEW_CHAIN, CREATE, all)
    }

    pub(super) fn get_chain(family: Family, name: &'static str) -> Self {
        Self::of(family, name, GET_CHAIN, 0, chain_names(name))
    }

    pub(super) fn new_rule(family: Family, chain: &'static str, expressions: Attribute) -> Self {
        let mut all = rule_names(chain);
        all.push(expressions);
        Self::of(family, chain, NEW_RULE, CREATE | APPEND, all)
    }

    fn of(
        family: Family,
        what: &'static str,
        kind: u16,
        flags: u16,
        attributes: Vec<Attribute>,
    ) -> Self {
        Self {
            family,
            what,
            kind: (NFTABLES << 8) | kind,
            flags,
            attributes,
        }
    }

    fn emit(&self, sequence: u32, flags: u16, to: &mut Vec<u8>) {
        put(
            to,
            self.kind,
            self.flags | flags,
            sequence,
            self.family.number(),
            0,
            &self.attributes,
        );
    }
}

fn chain_names(chain: &str) -> Vec<Attribute> {
    vec![
        Attribute::text(CHAIN_TABLE, TABLE),
        Attribute::text(CHAIN_NAME, chain),
    ]
}

fn rule_names(chain: &str) -> Vec<Attribute> {
    vec![
        Attribute::text(RULE_TABLE, TABLE),
        Attribute::text(RULE_CHAIN, chain),
    ]
}

/// Appends a message: `nlmsghdr`, `nfgenmsg`, attributes.
fn put(
    to: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    sequence: u32,
    family: u8,
    resource: u16,
    attributes: &[Attribute],
) {
    let start = to.len();
    to.extend([0; 4]);
    to.extend(kind.to_ne_bytes());
    to.extend((flags | REQUEST).to_ne_bytes());
    to.extend(sequence.to_ne_bytes());
    to.extend([0; 4]);
    to.extend([family, 0]);
    to.extend(resource.to_be_bytes());
    for attribute in attributes {
        attribute.emit(to);
    }
    let length = u32::try_from(to.len() - start).expect("messages here are short");
    to[start..start + 4].copy_from_slice(&length.to_ne_bytes());
}

/// An object as the kernel gives it.
pub(super) struct Object(Vec<u8>);

impl Object {
    /// Whether it has this attribute.
    pub(super) fn has(&self, wanted: &Attribute) -> bool {
        wanted.is_in(&self.0)
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

/// An error number of the kernel's; none if its answer is cut.
struct Errno(Option<i32>);

impl Errno {
    fn of(self, family: Family, what: &'static str) -> NftablesError {
        match self.0 {
            Some(errno) => NftablesError::Refused {
                family,
                what,
                source: io::Error::from_raw_os_error(errno),
            },
            None => NftablesError::Malformed,
        }
    }
}

/// A netlink socket of this thread's network namespace.
pub(super) struct Netfilter {
    socket: Socket,
    sequence: u32,
}

impl Netfilter {
    pub(super) fn open() -> Result<Self, NftablesError> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // The kernel answers before `send` returns: an answer that is not there will not come.
        socket.set_non_blocking(true)?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Makes all changes at once, or none.
    pub(super) fn commit(&mut self, messages: &[Message]) -> Result<(), NftablesError> {
        let mut bytes = Vec::new();
        let begin = self.next();
        put(&mut bytes, BATCH[0], 0, begin, 0, NFTABLES, &[]);
        let family = messages.first().map_or(Family::Inet, |first| first.family);
        let mut parts = vec![(begin, "any change")];
        for message in messages {
            let sequence = self.next();
            message.emit(sequence, ACK, &mut bytes);
            parts.push((sequence, message.what));
        }
        let end = self.next();
        put(&mut bytes, BATCH[1], 0, end, 0, NFTABLES, &[]);
        self.socket.send(&bytes, 0)?;
        let mut acknowledged = 0;
        while acknowledged < messages.len() {
            for answer in self.receive()? {
                let part = parts
                    .iter()
                    .find(|(sequence, _)| *sequence == answer.sequence);
                if let (ERROR, Some((_, what))) = (answer.kind, part) {
                    answer.result().map_err(|errno| errno.of(family, what))?;
                    acknowledged += 1;
                }
            }
        }
        Ok(())
    }

    /// One object; none if it is not there.
    pub(super) fn get(&mut self, message: &Message) -> Result<Option<Object>, NftablesError> {
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
                    Err(errno) => Err(errno.of(message.family, message.what)),
                    Ok(()) => Err(NftablesError::Malformed),
                };
            }
        }
    }

    /// The rules of a chain of the table.
    pub(super) fn rules(
        &mut self,
        family: Family,
        chain: &'static str,
    ) -> Result<Vec<Object>, NftablesError> {
        for _ in 0..LISTINGS {
            if let Some(rules) = self.list(family, chain)? {
                return Ok(rules);
            }
        }
        let source = io::Error::from(io::ErrorKind::Interrupted);
        Err(NftablesError::Refused {
            family,
            what: chain,
            source,
        })
    }

    /// The same; none if the ruleset changed meanwhile.
    fn list(
        &mut self,
        family: Family,
        chain: &'static str,
    ) -> Result<Option<Vec<Object>>, NftablesError> {
        let mut bytes = Vec::new();
        let sequence = self.next();
        Message::of(family, chain, GET_RULE, DUMP, rule_names(chain)).emit(sequence, 0, &mut bytes);
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
                    ERROR => answer.result().map_err(|errno| errno.of(family, chain))?,
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
        let (bytes, _) = self.socket.recv_from_full()?;
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

    fn bytes(attributes: &[Attribute]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for attribute in attributes {
            attribute.emit(&mut bytes);
        }
        bytes
    }

    #[test]
    fn attributes_are_padded_and_their_length_is_not() {
        assert_eq!(
            bytes(&[Attribute::text(3, "pre"), Attribute::text(1, "x")]),
            [8, 0, 3, 0, b'p', b'r', b'e', 0, 6, 0, 1, 0, b'x', 0, 0, 0]
        );
    }

    #[test]
    fn the_kernel_may_return_more_attributes_but_no_other_values() {
        let wanted = Attribute::Nest(4, vec![Attribute::number(1, 7)]);
        let more = Attribute::Nest(4, vec![Attribute::number(2, 9), Attribute::number(1, 7)]);
        let other = Attribute::Nest(4, vec![Attribute::number(1, 8)]);
        assert!(wanted.is_in(&bytes(&[Attribute::number(9, 0), more])));
        assert!(!wanted.is_in(&bytes(&[other])));
        assert!(!wanted.is_in(&[]));
    }

    #[test]
    fn a_truncated_answer_is_not_read() {
        let mut whole = Vec::new();
        Message::get_table(Family::Inet).emit(7, 0, &mut whole);
        assert!(
            answer(&whole)
                .is_some_and(|(found, length)| { found.sequence == 7 && length == whole.len() })
        );
        for end in 0..whole.len() {
            assert!(answer(&whole[..end]).is_none(), "{end}");
        }
    }
}
