//! ICMP errors: queries that the network could not deliver to their server.

use std::{
    io::IoSliceMut,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg},
};

use super::Worker;
use crate::{arena::Key, query::observe::Failure};

/// Maximum number of errors that are read from one socket before the other sockets are read.
const ERRORS: usize = 64;
/// Maximum length of a query that an ICMP error quotes, in bytes (RFC 1812, 4.3.2.3).
const RETURNED: usize = 576;

impl Worker {
    /// Sends each query that an ICMP error quotes over another socket, or ends it after its second
    /// attempt. Other queries on the socket stay in flight. Later queries get another
    /// socket: behind the address of a Service, it may lead to another pod.
    pub(super) fn undelivered(&mut self, socket: Key) {
        let mut query = [0; RETURNED];
        for _ in 0..ERRORS {
            let Some(fd) = self.upstream.fd(socket) else {
                return;
            };
            let Ok((length, is_final)) = take_error(fd, &mut query) else {
                return;
            };
            let query = query.get(..length).unwrap_or_default();
            if is_final && let Some(flight) = self.upstream.undelivered(socket, query) {
                self.upstream.retire(socket);
                match self.upstream.again(flight, query, self.now, &self.epoll) {
                    Ok(registered) => {
                        self.buffers.copy_query(query, None, registered.id);
                        self.forward_own(registered);
                    }
                    Err(mut query) => {
                        self.fail(&mut query, Failure::Unreachable);
                        self.upstream.recycle(query.question);
                    }
                }
            }
        }
    }
}

/// Reads one error from a socket. Returns the length of the quoted query, and whether the server is
/// unreachable.
///
/// If the query was too long for the path, the server is reachable: the kernel has learned the path
/// MTU and sends the client's next attempt in fragments.
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
