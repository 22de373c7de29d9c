//! Changes of the tables, as the kernel reports them.

use std::{fmt, io};

use rtnetlink::sys::{AsyncSocket as _, AsyncSocketExt as _, TokioSocket};

use super::{TABLE, netlink::NETLINK_NETFILTER};

/// `NFNLGRP_NFTABLES`.
const CHANGES: u32 = 7;

/// Reports of changes of the tables in one network namespace.
pub struct TableEvents(TokioSocket);

impl fmt::Debug for TableEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableEvents").finish_non_exhaustive()
    }
}

impl TableEvents {
    /// Subscribes to the changes in the network namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind_auto()?;
        socket.socket_ref().add_membership(CHANGES)?;
        Ok(Self(socket))
    }

    /// Returns after a change of one of the tables, and after reports were lost. Reports of changes that
    /// [`super::install`] makes are among them.
    pub async fn changed(&self) -> io::Result<()> {
        loop {
            match self.0.recv_from_full().await {
                Ok((report, _)) if is_of_table(&report) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether a report has the name of the tables. Other programs change tables of their own all the time.
fn is_of_table(report: &[u8]) -> bool {
    let mut parts = report.windows(TABLE.len());
    parts.any(|part| part == TABLE.as_bytes())
}
