//! TCP listeners of the lab's servers.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Socket, Type};

/// Maximum number of connections that the kernel queues. The kernel drops a SYN when its queue is
/// full, and a test then counts a packet that the node did not lose.
const BACKLOG: i32 = 4096;

/// Listens at `at` in the namespace of the calling thread.
pub(crate) fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
    // A restarted server must be able to bind while ended connections still have the port.
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// The next connection; `None` if there is none within `limit`.
pub(crate) fn accept(listener: &TcpListener, limit: Duration) -> Option<(TcpStream, SocketAddr)> {
    let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO);
    let _ = poll(&mut ready, limit);
    listener.accept().ok()
}
