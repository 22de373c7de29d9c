//! Finds the user at the other end of a TCP connection within this network namespace
//! (sock_diag(7)).

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
    sockopt::ReceiveTimeout,
};
use nix::sys::time::{TimeVal, TimeValLike as _};
use parking_lot::Mutex;

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// `NLMSG_ERROR`.
const ERROR: u16 = 2;
const TCP: u8 = 6;
/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of the query: the header and `struct inet_diag_req_v2`.
const QUERY: usize = HEADER + 56;
/// `TCP_ESTABLISHED` and `TCP_CLOSE_WAIT`: a socket in another state may have no user any more.
const WITH_USER: [u8; 2] = [1, 8];
/// Time limit for an answer of the kernel, milliseconds. Usually it comes at once.
const WITHIN_MS: i64 = 100;

/// Asks the kernel, through one socket that stays open.
#[derive(Debug)]
pub struct TcpOwners(Mutex<OwnedFd>);

impl TcpOwners {
    /// Opens the socket, in the network namespace of this thread.
    pub fn open() -> io::Result<Self> {
        let asking = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkSockDiag,
        )?;
        setsockopt(&asking, ReceiveTimeout, &TimeVal::milliseconds(WITHIN_MS))?;
        Ok(Self(Mutex::new(asking)))
    }

    /// The user of the socket at `from` that is connected to `to`.
    pub fn user_of(&self, from: SocketAddr, to: SocketAddr) -> io::Result<u32> {
        let asking = self.0.lock();
        // Drops late answers to earlier queries.
        let mut answer = [0; 1024];
        while recv(asking.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT).is_ok() {}
        send(asking.as_raw_fd(), &query(from, to), MsgFlags::empty())?;
        let length = recv(asking.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        parse(answer.get(..length).unwrap_or_default())
    }
}

fn query(from: SocketAddr, to: SocketAddr) -> [u8; QUERY] {
    let mut bytes = Vec::with_capacity(QUERY);
    bytes.extend(u32::try_from(QUERY).unwrap_or(0).to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    // Sequence number and netlink port.
    bytes.extend([0; 8]);
    let family = match from {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    bytes.extend([u8::try_from(family as i32).unwrap_or(0), TCP, 0, 0]);
    // Every state.
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(from.port().to_be_bytes());
    bytes.extend(to.port().to_be_bytes());
    bytes.extend(padded(from.ip()));
    bytes.extend(padded(to.ip()));
    // Any interface, and no cookie.
    bytes.extend([0; 4]);
    bytes.extend([0xff; 8]);
    let mut query = [0; QUERY];
    for (to, from) in query.iter_mut().zip(bytes) {
        *to = from;
    }
    query
}

fn padded(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// The field `idiag_uid` of `struct inet_diag_msg`.
fn parse(answer: &[u8]) -> io::Result<u32> {
    let word = |at: usize| -> io::Result<u32> {
        let bytes = answer
            .get(at..at + 4)
            .and_then(|bytes| bytes.try_into().ok());
        bytes
            .map(u32::from_ne_bytes)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    };
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok());
    match kind.map(u16::from_ne_bytes) {
        Some(BY_FAMILY) => {
            let state = answer.get(HEADER + 1).copied().unwrap_or(0);
            match WITH_USER.contains(&state) {
                true => word(HEADER + 4 + 48 + 12),
                false => Err(io::ErrorKind::NotConnected.into()),
            }
        }
        Some(ERROR) => {
            let code = word(HEADER)?.cast_signed();
            Err(io::Error::from_raw_os_error(code.wrapping_neg()))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_user_at_the_other_end_of_a_connection_is_found() {
        let owners = TcpOwners::open().unwrap();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let to = listener.local_addr().unwrap();
            let client = TcpStream::connect(to).unwrap();
            let (_server, from) = listener.accept().unwrap();
            let user = owners.user_of(from, to).unwrap();
            assert_eq!(user, nix::unistd::geteuid().as_raw());
            drop(client);
            let absent = SocketAddr::new(from.ip(), 1);
            assert!(owners.user_of(absent, to).is_err());
        }
    }
}
