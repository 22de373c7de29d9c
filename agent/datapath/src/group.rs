//! The group of interfaces of endpoints: netfilter drops what comes from them without the mark of
//! `from_pod` ([`super::nftables`]).
//!
//! An interface's group (`ip link show group N`) belongs to the node: a pod does not see it and cannot change it. It
//! ends with the interface. An interface is in the group from the time that its endpoint's programs, or those that
//! close it, are attached. If these programs are taken away, what the pod sends is dropped until they are back.

use std::{io, mem::size_of};

use nix::errno::Errno;
use rtnetlink::{
    packet_core::NLM_F_ACK,
    packet_route::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkMessage},
    },
};

use super::route::{attributes, number, request};

/// Number of the group: `Hold` in ASCII.
pub(crate) const GROUP: u32 = 0x486f_6c64;
/// The group of an interface that was never put into a group.
const DEFAULT: u32 = 0;

/// `RTM_NEWLINK`, `IFLA_GROUP`; size of `struct ifinfomsg`.
const RTM_NEWLINK: u16 = 16;
const IFLA_GROUP: u16 = 27;
const IFINFOMSG: usize = 4 * size_of::<u32>();

/// Whether an interface is in the group. `ENODEV`: there is no such interface.
pub(super) fn has(ifindex: u32) -> io::Result<bool> {
    Ok(of(ifindex)? == GROUP)
}

/// Puts an interface into the group, whatever group it was in.
pub(super) fn join(ifindex: u32) -> io::Result<()> {
    match of(ifindex)? {
        GROUP => return Ok(()),
        DEFAULT => {}
        other => tracing::warn!(
            ifindex,
            other,
            "the interface leads to an endpoint: it leaves its group for group {GROUP}"
        ),
    }
    set(ifindex, GROUP)
}

/// Takes an interface out of the group, if the interface exists and is in the group.
pub(super) fn leave(ifindex: u32) -> io::Result<()> {
    let left = match of(ifindex) {
        Ok(GROUP) => set(ifindex, DEFAULT),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    match left {
        Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(()),
        left => left,
    }
}

/// The interfaces in the group, each with its name.
pub(super) fn members() -> io::Result<Vec<(u32, String)>> {
    let mut found = Vec::new();
    for interface in &nix::net::if_::if_nameindex()? {
        if of(interface.index()).is_ok_and(|group| group == GROUP) {
            let name = interface.name().to_string_lossy().into_owned();
            found.push((interface.index(), name));
        }
    }
    Ok(found)
}

/// Takes all interfaces out of the group. Returns the last error, if any.
pub fn leave_all() -> io::Result<()> {
    let interfaces = nix::net::if_::if_nameindex()?;
    let mut last = Ok(());
    for interface in &interfaces {
        last = leave(interface.index()).and(last);
    }
    last
}

fn of(ifindex: u32) -> io::Result<u32> {
    let mut group = None;
    request(
        RouteNetlinkMessage::GetLink(at(ifindex)),
        NLM_F_ACK,
        |kind, payload| {
            if kind == RTM_NEWLINK {
                let mut found = attributes(payload.get(IFINFOMSG..).unwrap_or_default());
                let found = found.find(|(attribute, _)| *attribute == IFLA_GROUP);
                group = found.and_then(|(_, value)| number(&value));
            }
        },
    )?;
    // Every interface has a group.
    group.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn set(ifindex: u32, group: u32) -> io::Result<()> {
    let mut message = at(ifindex);
    message.attributes.push(LinkAttribute::Group(group));
    request(RouteNetlinkMessage::SetLink(message), NLM_F_ACK, |_, _| {})
}

fn at(ifindex: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = ifindex;
    message
}
