//! Whether this network namespace has IPv6.

use std::{
    io,
    net::{Ipv6Addr, UdpSocket},
};

use nix::errno::Errno;

/// The program must serve IPv6, but its network namespace has no IPv6.
#[derive(Debug, thiserror::Error)]
#[error(
    "--enable-ipv6 is true, as by default, and this node has no IPv6 (a socket on ::1: {0}): set \
     --enable-ipv6=false, here and in the other program of Holdfast; or enable IPv6 (sysctl \
     net.ipv6.conf.all.disable_ipv6=0, and boot the kernel without ipv6.disable=1)"
)]
pub struct NoIpv6(io::Error);

/// Fails if no socket can be bound to `::1`: the kernel has no IPv6, or a sysctl disables it. Any
/// other error is ignored here, and reported by the sockets that are needed.
pub fn check() -> Result<(), NoIpv6> {
    match UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)) {
        Err(error) if is_absent(&error) => Err(NoIpv6(error)),
        _ => Ok(()),
    }
}

fn is_absent(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw);
    matches!(
        code,
        Some(Errno::EADDRNOTAVAIL | Errno::EAFNOSUPPORT | Errno::EPROTONOSUPPORT)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_family_or_address_is_absent() {
        for (code, wanted) in [
            (Errno::EADDRNOTAVAIL, true),
            (Errno::EAFNOSUPPORT, true),
            (Errno::EMFILE, false),
            (Errno::EACCES, false),
        ] {
            assert_eq!(is_absent(&io::Error::from(code)), wanted, "{code}");
        }
        let text = NoIpv6(Errno::EADDRNOTAVAIL.into()).to_string();
        assert!(text.contains("set --enable-ipv6=false"), "{text}");
    }
}
