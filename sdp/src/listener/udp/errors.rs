//! What the network says of queries that it could not deliver.

use std::{
    io::IoSliceMut,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::{
        epoll::{EpollEvent, EpollFlags},
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
    },
};

use super::Worker;
use crate::{
    arena::Key,
    notice::Failure,
    proxy::stats::{Label as _, QueryResult},
    query_log::End,
    upstream::udp::{Flight, Joined},
    wire::{Rcode, reply},
};

/// Errors taken from one socket before others get their turn.
const ERRORS: usize = 64;
/// Most bytes of a query that an ICMP error brings back (RFC 1812, 4.3.2.3).
const RETURNED: usize = 576;

impl Worker {
    /// Something came from a server, or from the network on the way to it.
    pub(super) fn server_event(&mut self, event: EpollEvent) {
        let socket = Key::from_u64(event.data());
        if event.events().contains(EpollFlags::EPOLLERR) {
            self.undelivered(socket);
        }
        self.answers(socket);
    }

    /// ICMP errors carry the query that they are about: that one is answered, the others on
    /// the socket wait on.
    fn undelivered(&mut self, socket: Key) {
        let mut query = [0; RETURNED];
        for _ in 0..ERRORS {
            let Some(fd) = self.upstream.fd(socket) else {
                return;
            };
            let Ok((length, is_final)) = take_error(fd, &mut query) else {
                return;
            };
            let query = query.get(..length).unwrap_or_default();
            if is_final && let Some(mut flight) = self.upstream.undelivered(socket, query) {
                self.unreachable(&flight);
                let result = QueryResult::UpstreamError.text();
                self.log(&mut flight.logged, End::own(result, Rcode::ServFail));
                self.upstream.recycle(flight);
            }
        }
    }

    /// Answers SERVFAIL, Network Error, to all who asked.
    fn unreachable(&mut self, flight: &Flight) {
        self.proxy.stats().in_flight.down();
        self.proxy.stats().queries.inc(QueryResult::UpstreamError);
        self.notice_failure(flight, Failure::Unreachable);
        let first = Joined {
            client: flight.client,
            kept: flight.kept,
        };
        for Joined { client, kept } in std::iter::once(&first).chain(&flight.joined) {
            reply::unreachable(*kept, &flight.question, &mut self.own);
            self.send_own(flight.server, *client);
        }
    }
}

/// Takes one error from a socket: how long the query is that it brought back, and whether the
/// server is out of reach. It is not where the query was too long for the path: the kernel knows
/// the path now and will send the client's repetition in fragments.
fn take_error(socket: &OwnedFd, query: &mut [u8]) -> nix::Result<(usize, bool)> {
    let mut control = cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
    let mut parts = [IoSliceMut::new(query)];
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let error = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let is_final = error.cmsgs()?.any(|message| match message {
        ControlMessageOwned::Ipv4RecvErr(error, _) | ControlMessageOwned::Ipv6RecvErr(error, _) => {
            i32::try_from(error.ee_errno).is_ok_and(|number| {
                let unreachable = [Errno::ECONNREFUSED, Errno::EHOSTUNREACH, Errno::ENETUNREACH];
                unreachable.contains(&Errno::from_raw(number))
            })
        }
        _ => false,
    });
    Ok((error.bytes, is_final))
}
