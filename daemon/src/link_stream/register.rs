//! Registers a unix socket for one kind of event. It is a module of its own because it is `unsafe`.

use std::{io, os::unix::net::UnixStream};

use tokio::io::{Interest, unix::AsyncFd};

/// Registers a non-blocking socket with the runtime of the caller.
pub(super) fn register(stream: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    // SAFETY: a `UnixStream` owns its descriptor, which stays the same and open until it is
    // dropped, and the `AsyncFd` owns the stream.
    let registered = unsafe { AsyncFd::register_with_interest(stream, interest) };
    Ok(registered?)
}
