//! Copies of packets that rules of nf_tables log (`linux/netfilter/nfnetlink_log.h`).

use std::{fmt, io, net::IpAddr};

use rtnetlink::sys::{AsyncSocket as _, AsyncSocketExt as _, TokioSocket};

use crate::nf_tables::attribute::find;

const NETLINK_NETFILTER: isize = 12;
/// `NFNL_SUBSYS_ULOG` with `NFULNL_MSG_PACKET` and `NFULNL_MSG_CONFIG`.
const PACKET: u16 = 0x400;
const CONFIG: u16 = 0x401;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 0x1;
/// Bytes of `nlmsghdr` and of `nfgenmsg`.
const HEADER: usize = 16;
const FAMILY_HEADER: usize = 4;
/// `NFULA_CFG_CMD` with `NFULNL_CFG_CMD_BIND`; `NFULA_CFG_MODE` with `NFULNL_COPY_PACKET`.
const COMMAND: u16 = 1;
const BIND: u8 = 1;
const MODE: u16 = 2;
const COPY_PACKET: u8 = 2;
/// Number of bytes that are copied of each packet: enough for the headers.
const COPIED: u32 = 64;
/// `NFULA_IFINDEX_INDEV`, `NFULA_IFINDEX_PHYSINDEV`, `NFULA_PAYLOAD`, `NFULA_PREFIX`.
const IN: u16 = 4;
const PORT_IN: u16 = 6;
const PAYLOAD: u16 = 9;
const PREFIX: u16 = 10;
/// Protocols whose header begins with two ports: TCP, UDP and SCTP.
const WITH_PORTS: [u8; 3] = [6, 17, 132];

/// A packet that a rule logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedPacket {
    /// Text of the rule.
    pub text: String,
    pub source: IpAddr,
    pub destination: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Destination port; `None` for protocols without ports.
    pub port: Option<u16>,
    /// Interface by which the packet came; for a bridge, the port. `None` for packets of the node itself.
    pub interface: Option<u32>,
}

/// Receives the packets that rules log to one group, in one network namespace.
pub struct PacketLog(TokioSocket);

impl fmt::Debug for PacketLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacketLog").finish_non_exhaustive()
    }
}

impl PacketLog {
    /// Binds the group in the network namespace of the calling thread.
    ///
    /// # Errors
    /// Another process has the group, or the kernel lacks nfnetlink_log.
    pub fn bind(group: u16) -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind_auto()?;
        let range = COPIED.to_be_bytes();
        let mode = [range[0], range[1], range[2], range[3], COPY_PACKET, 0];
        for (kind, value) in [(COMMAND, &[BIND][..]), (MODE, &mode)] {
            socket.socket_ref().send(&request(group, kind, value), 0)?;
        }
        Ok(Self(socket))
    }

    /// The next packets. Packets may be lost if many are logged at once.
    pub async fn next(&self) -> io::Result<Vec<LoggedPacket>> {
        loop {
            let (received, _) = match self.0.recv_from_full().await {
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => continue,
                received => received?,
            };
            let packets = packets(&received);
            if !packets.is_empty() {
                return Ok(packets);
            }
        }
    }
}

/// A message about a group with one attribute.
fn request(group: u16, kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes.extend([0, 0]);
    bytes.extend(group.to_be_bytes());
    let length = u16::try_from(4 + value.len()).unwrap_or_default();
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let length = u32::try_from(bytes.len()).unwrap_or_default();
    bytes[..4].copy_from_slice(&length.to_ne_bytes());
    bytes[4..6].copy_from_slice(&CONFIG.to_ne_bytes());
    bytes[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
    bytes
}

fn packets(mut messages: &[u8]) -> Vec<LoggedPacket> {
    let mut found = Vec::new();
    while let Some(head) = messages.first_chunk::<HEADER>() {
        let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
        let length = usize::try_from(length).unwrap_or(usize::MAX).max(HEADER);
        if u16::from_ne_bytes([head[4], head[5]]) == PACKET
            && let Some(attributes) = messages.get(HEADER + FAMILY_HEADER..length)
        {
            found.extend(packet(attributes));
        }
        messages = messages
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
    }
    found
}

fn packet(attributes: &[u8]) -> Option<LoggedPacket> {
    let text = find(attributes, PREFIX).unwrap_or_default();
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let index = |kind| find(attributes, kind)?.first_chunk::<4>();
    let interface = index(PORT_IN).or_else(|| index(IN));
    let bytes = find(attributes, PAYLOAD)?;
    let (source, destination, protocol, transport) = match bytes.first()? >> 4 {
        4 => {
            let words = usize::from(bytes.first()? & 0xf);
            let (source, destination) = (address4(bytes, 12)?, address4(bytes, 16)?);
            (source, destination, *bytes.get(9)?, words * 4)
        }
        6 => {
            let (source, destination) = (address6(bytes, 8)?, address6(bytes, 24)?);
            (source, destination, *bytes.get(6)?, 40)
        }
        _ => return None,
    };
    let port = bytes.get(transport + 2..)?.first_chunk::<2>();
    let port = port.filter(|_| WITH_PORTS.contains(&protocol));
    Some(LoggedPacket {
        text: String::from_utf8_lossy(text).into_owned(),
        source,
        destination,
        protocol,
        port: port.map(|port| u16::from_be_bytes(*port)),
        interface: interface.map(|index| u32::from_be_bytes(*index)),
    })
}

fn address4(bytes: &[u8], at: usize) -> Option<IpAddr> {
    Some(IpAddr::from(*bytes.get(at..)?.first_chunk::<4>()?))
}

fn address6(bytes: &[u8], at: usize) -> Option<IpAddr> {
    Some(IpAddr::from(*bytes.get(at..)?.first_chunk::<16>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_both_families_are_read_and_cut_ones_are_not() {
        let mut four = vec![0x45; 1];
        four.resize(9, 0);
        four.extend([6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x12, 0x34, 0, 80]);
        let mut six = vec![0x60, 0, 0, 0, 0, 0, 17, 64];
        six.extend([0xfd; 16]);
        six.extend([0xfe; 16]);
        six.extend([0, 1, 0, 53]);
        let message = |payload: &[u8]| {
            let mut bytes = Vec::new();
            let (index, text) = (7_u32.to_be_bytes(), b"dropped_in\0");
            for (kind, value) in [(IN, &index[..]), (PREFIX, text), (PAYLOAD, payload)] {
                bytes.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
                bytes.extend(kind.to_ne_bytes());
                bytes.extend(value);
                bytes.resize(bytes.len().next_multiple_of(4), 0);
            }
            packet(&bytes)
        };
        let found = message(&four).unwrap();
        assert_eq!(found.text, "dropped_in");
        assert_eq!(found.source, IpAddr::from([10, 0, 0, 1]));
        assert_eq!((found.protocol, found.port), (6, Some(80)));
        assert_eq!(found.interface, Some(7));
        let found = message(&six).unwrap();
        assert_eq!(found.destination, IpAddr::from([0xfe; 16]));
        assert_eq!((found.protocol, found.port), (17, Some(53)));
        for end in 0..four.len() - 2 {
            assert_eq!(message(&four[..end]), None, "{end}");
        }
    }
}
