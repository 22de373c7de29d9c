//! Names of network interfaces by number.

use std::{
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixDatagram,
    },
};

/// Asks the kernel for names of interfaces through one socket that stays open: a look-up works
/// although the process may open no further descriptor. The answers are about the network namespace
/// in which the socket was opened.
#[derive(Debug)]
pub struct InterfaceNames(OwnedFd);

/// `struct ifreq` for `SIOCGIFNAME` (netdevice(7)).
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    ifindex: libc::c_int,
    rest: [u8; 20],
}

impl InterfaceNames {
    /// Opens the socket through which names are looked up.
    pub fn open() -> io::Result<Self> {
        Ok(Self(UnixDatagram::unbound()?.into()))
    }

    /// Name of the interface with this number. `ENODEV`: there is none.
    pub fn name(&self, ifindex: u32) -> io::Result<String> {
        let mut request = Request {
            name: [0; libc::IFNAMSIZ],
            ifindex: ifindex
                .try_into()
                .map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?,
            rest: [0; 20],
        };
        // SAFETY: the descriptor is open, and the kernel reads and writes a `struct ifreq`, which
        // `Request` is: 40 bytes that live until the call returns.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SIOCGIFNAME, &raw mut request) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let name = request.name.split(|byte| *byte == 0).next();
        Ok(String::from_utf8_lossy(name.unwrap_or_default()).into_owned())
    }
}

/// With a socket that is open already. Any other descriptor makes each look-up fail.
impl From<OwnedFd> for InterfaceNames {
    fn from(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn names_are_found_by_number() {
        assert_eq!(size_of::<Request>(), 40);
        let names = InterfaceNames::open().unwrap();
        assert_eq!(names.name(1).unwrap(), "lo");
        for absent in [0, 0x7fff_fff0, u32::MAX] {
            let error = names.name(absent).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{absent}");
        }
        let other = InterfaceNames::from(OwnedFd::from(File::open("/dev/null").unwrap()));
        let error = other.name(1).unwrap_err();
        assert_ne!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
