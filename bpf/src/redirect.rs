//! `hf_redirect_v1`, as `from_pod` and `to_pod` see it.

use shared_maps::{
    Be16,
    quota::Limit,
    redirect::{RedirectKey, RedirectValue},
};

use crate::{
    address::Address,
    config,
    maps::{REDIRECTS, SERVERS},
    packet::Packet,
    quota,
};

/// What is noted about the pod's packets to one server and port.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Note {
    /// Nothing: they were never redirected, or the note was evicted.
    None,
    /// Policy redirected them once, and no longer does.
    Former,
    /// They go to the proxy.
    Redirected,
}

#[inline(always)]
fn key(packet: &Packet, server: Address, port: u16) -> RedirectKey {
    RedirectKey {
        daddr: server.bytes(),
        ifindex: config::ifindex(),
        dport: Be16::from_wire(port),
        protocol: packet.protocol,
        family: packet.family,
    }
}

/// Keeps the entry of a packet's destination as policy says: `proxy` is the
/// proxy port in network order, 0 for none. False if it could not be made: then
/// the packet, delivered here, would reach a server of the node past the proxy.
#[inline(never)]
pub(crate) fn set(packet: &Packet, proxy: u16) -> bool {
    let key = key(packet, packet.daddr, packet.dport);
    if let Some(value) = REDIRECTS.get_ptr_mut(key) {
        // SAFETY: racing writers leave an old or a new port.
        unsafe {
            if (*value).proxy_port.to_wire() != proxy {
                (*value).proxy_port = Be16::from_wire(proxy);
            }
        }
        return true;
    }
    if proxy == 0 {
        return true;
    }
    let value = RedirectValue {
        proxy_port: Be16::from_wire(proxy),
        pad: 0,
    };
    quota::admit(&SERVERS, &key, displace) && REDIRECTS.insert(key, value, 0).is_ok()
}

/// The next packet to the server makes its note again.
#[inline(never)]
fn displace(key: &RedirectKey) {
    if REDIRECTS.remove(*key).is_ok() {
        quota::displaced(Limit::Servers);
    }
}

/// The note about the packet's sender.
#[inline(always)]
pub(crate) fn of_sender(packet: &Packet) -> Note {
    look(packet, packet.saddr, packet.sport)
}

/// The note about the packet's destination.
#[inline(always)]
pub(crate) fn of_destination(packet: &Packet) -> Note {
    look(packet, packet.daddr, packet.dport)
}

#[inline(never)]
fn look(packet: &Packet, server: Address, port: u16) -> Note {
    if !packet.is_redirectable() {
        return Note::None;
    }
    match REDIRECTS.get_ptr(key(packet, server, port)) {
        None => Note::None,
        // SAFETY: racing writers leave an old or a new port.
        Some(value) if unsafe { (*value).proxy_port.to_wire() } == 0 => Note::Former,
        Some(_) => Note::Redirected,
    }
}
