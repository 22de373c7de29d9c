//! Ethernet frames of a pod that has NET_RAW, byte by byte.

use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, sendto, setsockopt,
    socket, sockopt::ReceiveTimeout,
};
use nix::sys::time::{TimeVal, TimeValLike as _};

use crate::netns::Netns;

/// A packet socket at an interface.
#[derive(Debug)]
pub struct RawFrames {
    socket: OwnedFd,
    address: LinkAddr,
    mac: [u8; 6],
}

impl RawFrames {
    /// Opens a socket at interface `eth0` of `netns`.
    pub fn open(netns: &Netns) -> Result<Self> {
        netns.enter(|| -> Result<Self> {
            let mut found = getifaddrs()?.filter(|entry| entry.interface_name == "eth0");
            let address = found
                .find_map(|entry| entry.address?.as_link_addr().copied())
                .context("eth0 has no link address")?;
            let socket = socket(
                AddressFamily::Packet,
                SockType::Raw,
                SockFlag::empty(),
                SockProtocol::EthAll,
            )
            .context("a packet socket (this needs root)")?;
            bind(socket.as_raw_fd(), &address)?;
            let mac = address.addr().context("eth0 has no MAC")?;
            Ok(Self {
                socket,
                address,
                mac,
            })
        })?
    }

    /// MAC address of the pod's interface.
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let fd = self.socket.as_raw_fd();
        let sent = sendto(fd, frame, &self.address, MsgFlags::empty())?;
        ensure!(sent == frame.len(), "sent {sent} of {} bytes", frame.len());
        Ok(())
    }

    /// The next frame, sent or received; `None` if none comes within `limit`.
    pub fn next(&self, limit: Duration) -> Result<Option<Vec<u8>>> {
        let limit = TimeVal::microseconds(i64::try_from(limit.as_micros())?.max(1));
        setsockopt(&self.socket, ReceiveTimeout, &limit)?;
        let mut frame = vec![0; 2048];
        let mut file = std::fs::File::from(self.socket.try_clone()?);
        match file.read(&mut frame) {
            Ok(length) => {
                frame.truncate(length);
                Ok(Some(frame))
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
