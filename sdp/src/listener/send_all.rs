//! Sends datagrams, queries and answers, in batches.

use std::{io, os::fd::OwnedFd};

use crate::socket::sys::{Datagram, SendBatch};

/// Whether an error may be an ICMP error for an earlier datagram.
fn is_of_another(error: io::ErrorKind) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    [ConnectionRefused, HostUnreachable, NetworkUnreachable].contains(&error)
}

/// Sends all datagrams, even after one of them fails. Returns the number that failed.
///
/// A connected socket reports an ICMP error for an earlier datagram when the next datagram is sent.
/// That next datagram is then sent again.
pub(super) fn send_all<'a>(
    batch: &mut SendBatch,
    socket: &OwnedFd,
    mut datagrams: impl Iterator<Item = Datagram<'a>> + Clone,
    mut failed: impl FnMut(usize),
) -> usize {
    let mut at = 0;
    let mut failures = 0;
    let mut retried = false;
    while datagrams.clone().next().is_some() {
        match batch.send(socket, datagrams.clone()) {
            Ok(sent) => {
                let sent = sent.max(1);
                at += sent;
                datagrams.nth(sent - 1);
                retried = false;
            }
            Err(e) if is_of_another(e.kind()) && !retried => retried = true,
            Err(_) => {
                failed(at);
                failures += 1;
                at += 1;
                datagrams.next();
                retried = false;
            }
        }
    }
    failures
}
