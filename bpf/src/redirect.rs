//! `hf_redirect_v2`, and `hf_redirect_v1` for programs of the previous release.

use aya_ebpf::programs::TcContext;
use shared_maps::{
    Be16, FAMILY_IPV4,
    endpoint::Queue,
    event::Reason,
    quota::Limit,
    redirect::{RedirectKey, RedirectValue, v1},
};

use crate::{
    address::Address,
    config,
    maps::{REDIRECTS, REDIRECTS_V1},
    packet::Packet,
    quota,
};

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

    #[inline(always)]
    fn key_v1(&self, ifindex: u32) -> v1::RedirectKey {
        v1::RedirectKey {
            daddr: self.address.bytes(),
            ifindex,
            dport: Be16::from_wire(self.port),
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
    let server = Server::destination(packet);
    if config::is_bridge_port() {
        return set_v2(&server, packet.saddr, proxy, 0);
    }
    set_v2(&server, packet.saddr, proxy, config::ifindex()) && set_v1(&server, proxy)
}

#[inline(never)]
fn set_v2(server: &Server, pod: Address, proxy: u16, ifindex: u32) -> bool {
    let key = server.key(pod);
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

/// The next packet to the server writes its entry again.
#[inline(never)]
fn displace(key: &RedirectKey) {
    if REDIRECTS.remove(*key).is_ok() {
        quota::displaced(Limit::Servers);
    }
    let older = v1::RedirectKey {
        daddr: key.server,
        ifindex: config::ifindex(),
        dport: key.port,
        protocol: key.protocol,
        family: key.family,
    };
    // At a bridge port there is none.
    let _ = REDIRECTS_V1.remove(older);
}

/// Updates the entry of `hf_redirect_v1`. It is removed when policy no longer redirects, because the
/// previous release's `steer` drops packets for an entry without a port.
#[inline(never)]
fn set_v1(server: &Server, proxy: u16) -> bool {
    let key = server.key_v1(config::ifindex());
    let now = REDIRECTS_V1.get_ptr(key);
    if proxy == 0 {
        if now.is_some() {
            // Gone already is as good.
            let _ = REDIRECTS_V1.remove(key);
        }
        return true;
    }
    // SAFETY: racing writers leave an old or a new port.
    let same = now.is_some_and(|value| unsafe { (*value).proxy_port.to_wire() } == proxy);
    if same {
        return true;
    }
    let value = v1::RedirectValue {
        proxy_port: Be16::from_wire(proxy),
        pad: 0,
    };
    REDIRECTS_V1.insert(key, value, 0).is_ok()
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
    look(&server, own(packet.daddr, packet.family), config::ifindex())
}

/// The note about the packet's destination.
#[inline(always)]
pub(crate) fn of_destination(packet: &Packet) -> Note {
    if !packet.is_redirectable() {
        return Note::None;
    }
    let server = Server::destination(packet);
    look(&server, own(packet.saddr, packet.family), config::ifindex())
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

/// The entry for packets from `pod`, behind interface `ifindex`, to `server`.
#[inline(never)]
pub(crate) fn look(server: &Server, pod: Address, ifindex: u32) -> Note {
    if let Some(value) = REDIRECTS.get_ptr(server.key(pod)) {
        // SAFETY: racing writers leave an old or a new port.
        return if unsafe { (*value).proxy_port.to_wire() } == 0 {
            Note::Former
        } else {
            Note::Redirected
        };
    }
    // Made by a program of the previous release.
    if REDIRECTS_V1.get_ptr(server.key_v1(ifindex)).is_some() {
        Note::Redirected
    } else {
        Note::None
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
