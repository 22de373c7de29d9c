//! The peers that share the connections of a socket.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{getsockopt, sockopt},
        stat::fstat,
    },
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::net::UnixStream;

use crate::tcp_owner::TcpOwners;

/// The other end of a connection, as far as limits count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// An IPv4 address, or the IPv6 network (/64) that one host has to itself.
    Address(IpAddr),
    /// A user of this machine, over TCP.
    User(u32),
    /// A process of this machine.
    Process {
        /// Uid of the process that connected.
        user: u32,
        /// Its process id; 0 if its PID namespace is not visible to this process.
        pid: i32,
        /// Inode of its pidfd (Linux 6.9), which distinguishes processes with the number 0.
        instance: u64,
    },
    /// A peer that the kernel does not identify.
    #[default]
    Unnamed,
}

impl Peer {
    /// The peer at an address.
    pub fn of_address(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
            ip @ IpAddr::V4(_) => ip,
        })
    }

    /// The process at the other end of a unix socket.
    pub fn of_process(stream: &UnixStream) -> Self {
        let process = process_of(stream);
        Self::named(stream, process.as_ref())
    }

    /// Like [`Self::of_process`], if the result of [`process_of`] is known.
    pub fn named(stream: &UnixStream, process: Option<&OwnedFd>) -> Self {
        let Ok(credentials) = stream.peer_cred() else {
            return Self::Unnamed;
        };
        let found = process.and_then(|process| fstat(process).ok());
        Self::Process {
            user: credentials.uid(),
            pid: credentials.pid().unwrap_or(0),
            instance: found.map_or(0, |found| found.st_ino),
        }
    }

    /// The user at the other end of a TCP connection over loopback, or else its address.
    pub fn of_loopback(owners: &TcpOwners, from: SocketAddr, to: SocketAddr) -> Self {
        match owners.user_of(from, to) {
            Ok(user) => Self::User(user),
            Err(error) => {
                tracing::debug!(%error, %from, "cannot find the user of a connection");
                Self::of_address(from.ip())
            }
        }
    }

    /// The peer's user, if it is known.
    pub fn user(self) -> Option<u32> {
        match self {
            Self::User(user) | Self::Process { user, .. } => Some(user),
            Self::Address(_) | Self::Unnamed => None,
        }
    }
}

/// A descriptor of the process at the other end of a unix socket, by `SO_PEERPIDFD`; before Linux
/// 6.5, by the process id.
pub fn process_of(stream: &impl AsFd) -> Option<OwnedFd> {
    match getsockopt(stream, sockopt::PeerPidfd) {
        Err(Errno::ENOPROTOOPT) => process_of_number(stream),
        process => process.ok(),
    }
}

/// While the socket is connected, its process lives, or another process has inherited the socket.
/// In the second case the process id may belong to yet another process.
fn process_of_number(stream: &impl AsFd) -> Option<OwnedFd> {
    let credentials = getsockopt(stream, sockopt::PeerCredentials).ok()?;
    let process = pidfd_open(Pid::from_raw(credentials.pid())?, PidfdFlags::empty()).ok()?;
    let mut state = [PollFd::new(stream.as_fd(), PollFlags::POLLOUT)];
    poll(&mut state, PollTimeout::ZERO).ok()?;
    let is_connected = state
        .first()
        .and_then(PollFd::revents)
        .is_some_and(|state| !state.contains(PollFlags::POLLHUP));
    is_connected.then_some(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_is_one_peer() {
        let peer = |text: &str| Peer::of_address(text.parse().unwrap());
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::ffff:0:0:2"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_ne!(peer("192.0.2.1"), peer("192.0.2.2"));
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
    }

    #[tokio::test]
    async fn a_process_is_found_by_its_number_while_it_is_connected() {
        let (one, other) = UnixStream::pair().unwrap();
        assert!(process_of_number(&one).is_some());
        drop(other);
        assert!(process_of_number(&one).is_none());
    }

    #[tokio::test]
    async fn a_process_is_one_peer() {
        let (one, other) = UnixStream::pair().unwrap();
        let peer = Peer::of_process(&one);
        assert_eq!(peer, Peer::of_process(&other));
        assert_eq!(peer.user(), Some(nix::unistd::geteuid().as_raw()));
    }
}
