//! `hf_redirect_v2`: which packets of the pod go to the proxy.

use aya_ebpf::programs::TcContext;
use shared_maps::{
    Be16, FAMILY_IPV4,
    endpoint::Queue,
    event::Reason,
    quota::Limit,
    redirect::{RedirectKey, RedirectValue},
};

use crate::{address::Address, config, maps::REDIRECTS, packet::Packet, quota};

/// `PACKET_HOST`: for this node.
const PACKET_HOST: u32 = 0;

/// The entry for the pod's packets to one server and port.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Note {
    /// There is none: they were never redirected, or the entry was evicted.
    None,
    /// Policy redirected them before and no longer does.
    Former,
    /// They go to the proxy.
    Redirected,
}

/// The server's address and port in a flow that may be redirected. The port is in network order.
#[derive(Clone, Copy)]
pub(crate) struct Server {
    pub(crate) address: Address,
    pub(crate) port: u16,
    pub(crate) protocol: u8,
    pub(crate) family: u8,
}

impl Server {
    /// The destination of a packet.
    #[inline(always)]
    fn destination(packet: &Packet) -> Self {
        Self {
            address: packet.daddr,
            port: packet.dport,
            protocol: packet.protocol,
            family: packet.family,
        }
    }

    #[inline(always)]
    fn key(&self, pod: Address) -> RedirectKey {
        RedirectKey {
            pod: pod.bytes(),
            server: self.address.bytes(),
            port: Be16::from_wire(self.port),
            protocol: self.protocol,
            family: self.family,
        }
    }
}

/// Updates the entry of a packet's destination as policy requires. `proxy` is the proxy port in
/// network order, 0 for none. Returns false if the entry could not be made: this node would then
/// deliver the packet to a server of its own and not to the proxy.
#[inline(never)]
pub(crate) fn set(packet: &Packet, proxy: u16) -> bool {
    let ifindex = if config::is_bridge_port() {
        0
    } else {
        config::ifindex()
    };
    let key = Server::destination(packet).key(packet.saddr);
    if let Some(value) = REDIRECTS.get_ptr_mut(key) {
        // SAFETY: racing writers leave an old or a new port and interface.
        unsafe {
            if (*value).proxy_port.to_wire() != proxy {
                (*value).proxy_port = Be16::from_wire(proxy);
            }
            if (*value).ifindex != ifindex {
                (*value).ifindex = ifindex;
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
        ifindex,
    };
    quota::admit(Queue::Servers, &key, displace) && REDIRECTS.insert(key, value, 0).is_ok()
}

/// Removes an entry. The next packet to that server writes it again.
#[inline(never)]
fn displace(key: &RedirectKey) {
    if REDIRECTS.remove(*key).is_ok() {
        quota::displaced(Limit::Servers);
    }
}

/// The note about the packet's sender.
#[inline(always)]
pub(crate) fn of_sender(packet: &Packet) -> Note {
    if !packet.is_redirectable() {
        return Note::None;
    }
    let server = Server {
        address: packet.saddr,
        port: packet.sport,
        protocol: packet.protocol,
        family: packet.family,
    };
    look(&server, own(packet.daddr, packet.family))
}

/// The note about the packet's destination.
#[inline(always)]
pub(crate) fn of_destination(packet: &Packet) -> Note {
    if !packet.is_redirectable() {
        return Note::None;
    }
    let server = Server::destination(packet);
    look(&server, own(packet.saddr, packet.family))
}

/// The pod's own address where a packet has `end`. Not `end` itself: that may be one of many
/// addresses to which a neighbour on a bridge sends forged answers.
#[inline(always)]
fn own(end: Address, family: u8) -> Address {
    if family == FAMILY_IPV4 {
        config::ipv4()
    } else if end.is_v6_link_local() {
        end
    } else {
        config::ipv6()
    }
}

/// The entry for packets from `pod` to `server`.
#[inline(never)]
pub(crate) fn look(server: &Server, pod: Address) -> Note {
    let Some(value) = REDIRECTS.get_ptr(server.key(pod)) else {
        return Note::None;
    };
    // SAFETY: racing writers leave an old or a new port.
    if unsafe { (*value).proxy_port.to_wire() } == 0 {
        Note::Former
    } else {
        Note::Redirected
    }
}

/// Marks a packet. A marked packet is delivered on this node.
///
/// At a bridge port the packet may be addressed to a neighbour. The bridge would then switch it
/// there without the stack, so that the mark has no effect. The port's own address is one of those
/// that a bridge delivers to its own node. It does not change when ports are added or removed,
/// while the bridge's address does.
#[inline(always)]
pub(crate) fn deliver(ctx: &TcContext, mark: u32) -> Result<(), Reason> {
    if mark != 0 && config::is_bridge_port() {
        let mac = config::gateway_mac();
        ctx.store(0, &mac, 0)
            .and_then(|()| ctx.change_type(PACKET_HOST))
            .map_err(|_| Reason::RedirectFull)?;
    }
    ctx.set_mark(mark);
    Ok(())
}
