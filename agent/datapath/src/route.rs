//! Requests about interfaces and their filters (rtnetlink(7)) that block for less than a millisecond,
//! for threads without a runtime.

use std::io;

use rtnetlink::{
    packet_core::{NLM_F_REQUEST, NetlinkBuffer, NetlinkMessage, NlasIterator},
    packet_route::RouteNetlinkMessage,
    sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE},
};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// Sends a request and reads the answers until the last one. The kernel answers within the call.
pub(super) fn request(
    message: RouteNetlinkMessage,
    flags: u16,
    mut answer: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut message = NetlinkMessage::from(message);
    message.header.flags = NLM_F_REQUEST | flags;
    message.header.sequence_number = 1;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    loop {
        let (received, _) = match socket.recv_from_full() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            received => received?,
        };
        let mut rest = received.as_slice();
        while !rest.is_empty() {
            let Ok(one) = NetlinkBuffer::new_checked(rest) else {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            };
            let payload = one.payload();
            match one.message_type() {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => {
                    let code = payload.get(..4).and_then(|code| code.try_into().ok());
                    return match code.map(i32::from_ne_bytes) {
                        Some(0) => Ok(()),
                        Some(code) => Err(io::Error::from_raw_os_error(-code)),
                        None => Err(io::Error::from(io::ErrorKind::InvalidData)),
                    };
                }
                kind => answer(kind, payload),
            }
            let length = usize::try_from(one.length()).unwrap_or(usize::MAX);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, Vec<u8>)> {
    let found = NlasIterator::new(bytes).map_while(Result::ok);
    found.map(|attribute| (attribute.kind(), attribute.value().to_vec()))
}

pub(super) fn number(value: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(value.get(..4)?.try_into().ok()?))
}
