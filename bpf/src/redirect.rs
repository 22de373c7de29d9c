//! `hf_redirect_v2`, and `hf_redirect_v1` for programs of the previous release.

use aya_ebpf::programs::TcContext;
use shared_maps::{
    Be16, FAMILY_IPV4,
    event::Reason,
    redirect::{RedirectKey, RedirectValue, v1},
};

use crate::{
    address::Address,
    config,
    maps::{REDIRECTS, REDIRECTS_V1},
    packet::Packet,
};

/// `PACKET_HOST`: for this node.
const PACKET_HOST: u32 = 0;

/// The server's end of a flow that may be redirected. The port is in network order.
#[derive(Clone, Copy)]
pub(crate) struct Server {
    pub(crate) address: Address,
    pub(crate) port: u16,
    pub(crate) protocol: u8,
    pub(crate) family: u8,
}

impl Server {
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

/// Keeps the entry of a packet's destination as policy says: `proxy` is the
/// proxy port in network order, 0 for none. False if it could not be made: then
/// the packet, delivered here, would reach a server of the node past the proxy.
#[inline(never)]
pub(crate) fn set(packet: &Packet, proxy: u16) -> bool {
    let server = Server {
        address: packet.daddr,
        port: packet.dport,
        protocol: packet.protocol,
        family: packet.family,
    };
    if config::is_bridge_port() {
        return set_v2(&server, packet.saddr, proxy, 0);
    }
    set_v2(&server, packet.saddr, proxy, config::ifindex()) && set_v1(&server, proxy)
}

#[inline(never)]
fn set_v2(server: &Server, pod: Address, proxy: u16, ifindex: u32) -> bool {
    let key = server.key(pod);
    let now = REDIRECTS.get_ptr(key);
    if proxy == 0 {
        if now.is_some() {
            // Gone already is as good.
            let _ = REDIRECTS.remove(key);
        }
        return true;
    }
    // SAFETY: racing writers leave an old or a new value.
    let same = now.is_some_and(|value| unsafe {
        (*value).proxy_port.to_wire() == proxy && (*value).ifindex == ifindex
    });
    if same {
        return true;
    }
    let value = RedirectValue {
        proxy_port: Be16::from_wire(proxy),
        pad: 0,
        ifindex,
    };
    REDIRECTS.insert(key, value, 0).is_ok()
}

#[inline(never)]
fn set_v1(server: &Server, proxy: u16) -> bool {
    let key = server.key_v1(config::ifindex());
    let now = REDIRECTS_V1.get_ptr(key);
    if proxy == 0 {
        if now.is_some() {
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

/// Whether packets of `pod`, behind interface `ifindex`, to `server` go to the proxy.
#[inline(never)]
pub(crate) fn is_noted(server: &Server, pod: Address, ifindex: u32) -> bool {
    REDIRECTS.get_ptr(server.key(pod)).is_some()
        || REDIRECTS_V1.get_ptr(server.key_v1(ifindex)).is_some()
}

/// Whether packets of the pod to the sender of `packet` go to the proxy.
///
/// Asked for the pod's own address, not for the packet's destination: that may be an address
/// of many, and then the packet is no answer either.
#[inline(always)]
pub(crate) fn is_from_redirected(packet: &Packet) -> bool {
    if !packet.is_redirectable() {
        return false;
    }
    let server = Server {
        address: packet.saddr,
        port: packet.sport,
        protocol: packet.protocol,
        family: packet.family,
    };
    let pod = if packet.family == FAMILY_IPV4 {
        config::ipv4()
    } else if packet.daddr.is_v6_link_local() {
        packet.daddr
    } else {
        config::ipv6()
    };
    is_noted(&server, pod, config::ifindex())
}

/// Marks a packet; one with a mark is delivered on this node.
///
/// At a bridge port it may be addressed to a neighbour: the bridge would switch it there, past
/// the stack, and neither the mark nor the proxy would matter. The address of the port itself
/// is of those that a bridge delivers to its own node, and unlike the bridge's it does not
/// change when ports come and go.
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
