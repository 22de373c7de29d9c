//! Changes of tables, as the kernel reports them.

use std::{fmt, io};

use rtnetlink::sys::{AsyncSocket as _, AsyncSocketExt as _, TokioSocket};

use super::{message::HEADER, socket::NETLINK_NETFILTER};

/// `NFNLGRP_NFTABLES`.
const CHANGES: u32 = 7;

/// Reports of changes of the tables of one name in one network namespace.
pub struct TableEvents {
    socket: TokioSocket,
    table: String,
    /// Port of the socket whose changes are not reported.
    own: Option<u32>,
}

impl fmt::Debug for TableEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableEvents").finish_non_exhaustive()
    }
}

impl TableEvents {
    /// Subscribes to the changes of the tables of this name in the network namespace of the calling
    /// thread.
    pub fn open(table: &str) -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind_auto()?;
        socket.socket_ref().add_membership(CHANGES)?;
        Ok(Self {
            socket,
            table: table.to_owned(),
            own: None,
        })
    }

    /// Leaves out the changes that the [`Connection`](super::Connection) with this port makes.
    pub fn by_others(self, own: u32) -> Self {
        let own = Some(own);
        Self { own, ..self }
    }

    /// Returns after a change of one of the tables, and after reports were lost.
    pub async fn changed(&self) -> io::Result<()> {
        loop {
            match self.socket.recv_from_full().await {
                Ok((reports, _)) if self.is_of_table(&reports) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether a report has the name of the tables. Other programs change tables of their own all the
    /// time.
    fn is_of_table(&self, reports: &[u8]) -> bool {
        let mut rest = reports;
        while let Some((report, behind)) = first(rest) {
            let mut parts = report.windows(self.table.len());
            let sender = report.get(HEADER - 4..HEADER);
            let is_own = self
                .own
                .is_some_and(|own| sender == Some(&own.to_ne_bytes()));
            if !is_own && parts.any(|part| part == self.table.as_bytes()) {
                return true;
            }
            rest = behind;
        }
        false
    }
}

/// The first message of `bytes`, and the rest.
fn first(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?);
    let length = usize::try_from(length).ok()?.max(HEADER);
    let report = bytes.get(..length)?;
    let behind = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((report, behind))
}
