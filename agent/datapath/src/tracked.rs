//! Connections that the kernel's conntrack knows, and the deletion of some of them
//! (`linux/netfilter/nfnetlink_conntrack.h`).
//!
//! Numbers in messages are in network byte order.

use std::{io, net::IpAddr};

use rtnetlink::sys::{Socket, SocketAddr};

use crate::nf_tables::attribute::{children, find};

const NETLINK_NETFILTER: isize = 12;
/// `NFNL_SUBSYS_CTNETLINK` with `IPCTNL_MSG_CT_NEW`, `_GET` and `_DELETE`.
const NEW: u16 = 0x100;
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;
/// `NLMSG_ERROR`, `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLM_F_REQUEST`, `NLM_F_ACK`, `NLM_F_DUMP`.
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
/// Bytes of `nlmsghdr` and of `nfgenmsg`.
const HEADER: usize = 16;
const FAMILY_HEADER: usize = 4;
/// `NLA_F_NESTED`.
const NESTED: u16 = 0x8000;

/// `CTA_TUPLE_ORIG`, `CTA_TUPLE_REPLY`, `CTA_ID`, `CTA_ZONE`.
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
/// `CTA_TUPLE_IP`, `CTA_TUPLE_PROTO`.
const ADDRESSES: u16 = 1;
const PROTOCOL: u16 = 2;
/// `CTA_IP_V4_SRC`, `CTA_IP_V6_SRC`.
const SOURCE4: u16 = 1;
const SOURCE6: u16 = 3;
/// `CTA_PROTO_NUM`, `CTA_PROTO_SRC_PORT`.
const NUMBER: u16 = 1;
const SOURCE_PORT: u16 = 2;

/// A connection, as the hook `forward` sees packets of its first direction: after the translation of
/// the destination, before that of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its first sender.
    pub source: IpAddr,
    /// Its first receiver.
    pub destination: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Port of the sender; `None` for protocols without ports.
    pub source_port: Option<u16>,
    /// Port of the receiver; `None` for protocols without ports.
    pub port: Option<u16>,
}

/// Deletes the connections of this network namespace that `is_over` selects. Returns how many were deleted.
///
/// # Errors
/// The kernel cannot list connections, or did not delete all of them.
pub fn delete(mut is_over: impl FnMut(&Connection) -> bool) -> io::Result<usize> {
    let mut socket = open()?;
    let mut over = Vec::new();
    send(&socket, GET, REQUEST | DUMP, 0, &[])?;
    answers(&mut socket, |family, attributes| {
        if let Some(connection) = connection(attributes)
            && is_over(&connection)
        {
            over.push((family, names(attributes)));
        }
    })?;
    let mut deleted = 0;
    for (family, names) in over {
        send(&socket, DELETE, REQUEST | ACK, family, &names)?;
        match answers(&mut socket, |_, _| {}) {
            Ok(()) => deleted += 1,
            // The connection has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(deleted)
}

fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

fn send(socket: &Socket, kind: u16, flags: u16, family: u8, attributes: &[u8]) -> io::Result<()> {
    let length = HEADER + FAMILY_HEADER + attributes.len();
    let length = u32::try_from(length).map_err(io::Error::other)?;
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    // Sequence number and port.
    bytes.extend([0; 8]);
    bytes.extend([family, 0, 0, 0]);
    bytes.extend(attributes);
    socket.send(&bytes, 0).map(drop)
}

/// Reads the answers to one request: the family and the attributes of each connection.
fn answers(socket: &mut Socket, mut answer: impl FnMut(u8, &[u8])) -> io::Result<()> {
    loop {
        let (received, _) = match socket.recv_from_full() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            received => received?,
        };
        let mut rest = received.as_slice();
        while let Some((head, _)) = rest.split_at_checked(HEADER) {
            let number = |at: usize| head.get(at..at + 4).and_then(|four| four.try_into().ok());
            let length = number(0).map_or(0, u32::from_ne_bytes);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let malformed = || io::Error::from(io::ErrorKind::InvalidData);
            let body = rest.get(HEADER..length).ok_or_else(malformed)?;
            match head.get(4..6) {
                Some(kind) if kind == NEW.to_ne_bytes() => {
                    let (family, attributes) =
                        body.split_at_checked(FAMILY_HEADER).ok_or_else(malformed)?;
                    answer(family[0], attributes);
                }
                Some(kind) if kind == DONE.to_ne_bytes() => return Ok(()),
                Some(kind) if kind == ERROR.to_ne_bytes() => {
                    let code = body.get(..4).and_then(|code| code.try_into().ok());
                    return match code.map(i32::from_ne_bytes) {
                        Some(0) => Ok(()),
                        Some(code) => Err(io::Error::from_raw_os_error(-code)),
                        None => Err(malformed()),
                    };
                }
                _ => {}
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// Source, protocol and source port of one direction of a connection.
fn source(tuple: &[u8]) -> Option<(IpAddr, u8, Option<u16>)> {
    let addresses = find(tuple, ADDRESSES)?;
    let address = match find(addresses, SOURCE4) {
        Some(four) => IpAddr::from(<[u8; 4]>::try_from(four).ok()?),
        None => IpAddr::from(<[u8; 16]>::try_from(find(addresses, SOURCE6)?).ok()?),
    };
    let protocol = find(tuple, PROTOCOL)?;
    let number = *find(protocol, NUMBER)?.first()?;
    let port = find(protocol, SOURCE_PORT).and_then(|port| port.try_into().ok());
    Some((address, number, port.map(u16::from_be_bytes)))
}

fn connection(attributes: &[u8]) -> Option<Connection> {
    let (from, protocol, source_port) = source(find(attributes, ORIGINAL)?)?;
    // The receiver is the source of answers.
    let (to, _, port) = source(find(attributes, REPLY)?)?;
    Some(Connection {
        source: from,
        destination: to,
        protocol,
        source_port,
        port,
    })
}

/// The attributes by which the kernel finds the connection again.
fn names(attributes: &[u8]) -> Vec<u8> {
    let mut names = Vec::new();
    for (kind, value) in children(attributes) {
        let nested = match kind {
            ORIGINAL => NESTED,
            ID | ZONE => 0,
            _ => continue,
        };
        let length = u16::try_from(4 + value.len()).unwrap_or_default();
        names.extend(length.to_ne_bytes());
        names.extend((kind | nested).to_ne_bytes());
        names.extend(value);
        names.resize(names.len().next_multiple_of(4), 0);
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nf_tables::attribute::Attribute;

    fn direction(kind: u16, [from, to]: [u8; 2], [source, destination]: [u16; 2]) -> Attribute {
        let address = |kind, last| Attribute::Value(kind, vec![10, 0, 0, last]);
        let port = |kind, port: u16| Attribute::Value(kind, port.to_be_bytes().to_vec());
        let addresses = vec![address(SOURCE4, from), address(2, to)];
        let number = Attribute::Value(NUMBER, vec![17]);
        let protocol = vec![number, port(SOURCE_PORT, source), port(3, destination)];
        Attribute::Nest(
            kind,
            vec![
                Attribute::Nest(ADDRESSES, addresses),
                Attribute::Nest(PROTOCOL, protocol),
            ],
        )
    }

    #[test]
    fn the_receiver_is_the_one_behind_the_translation_of_a_service() {
        let service = direction(ORIGINAL, [1, 96], [40_000, 53]);
        let backend = direction(REPLY, [2, 1], [5353, 40_000]);
        let id = Attribute::number(ID, 7);
        let mark = Attribute::number(8, 1);
        let parts = [&service, &backend, &mark, &id].map(Attribute::bytes);
        let attributes = parts.concat();
        let wanted = Connection {
            source: IpAddr::from([10, 0, 0, 1]),
            destination: IpAddr::from([10, 0, 0, 2]),
            protocol: 17,
            source_port: Some(40_000),
            port: Some(5353),
        };
        assert_eq!(connection(&attributes), Some(wanted));
        // The kernel finds it by its first direction and its number.
        let named = [service.bytes(), id.bytes()].concat();
        assert_eq!(names(&attributes), named);
        assert_eq!(connection(&service.bytes()), None);
    }
}
