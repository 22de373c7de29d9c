//! `hf_redirect_v1`, as `from_pod` and `to_pod` see it.

use shared_maps::{
    Be16,
    redirect::{RedirectKey, RedirectValue},
};

use crate::{address::Address, config, maps::REDIRECTS, packet::Packet};

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
    let now = REDIRECTS.get_ptr(key);
    if proxy == 0 {
        if now.is_some() {
            // Gone already is as good.
            let _ = REDIRECTS.remove(key);
        }
        return true;
    }
    // SAFETY: racing writers leave an old or a new port.
    let same = now.is_some_and(|value| unsafe { (*value).proxy_port.to_wire() } == proxy);
    if same {
        return true;
    }
    let value = RedirectValue {
        proxy_port: Be16::from_wire(proxy),
        pad: 0,
    };
    REDIRECTS.insert(key, value, 0).is_ok()
}

/// Whether packets of the pod to the sender of `packet` go to the proxy.
#[inline(never)]
pub(crate) fn is_from_redirected(packet: &Packet) -> bool {
    packet.is_redirectable()
        && REDIRECTS
            .get_ptr(key(packet, packet.saddr, packet.sport))
            .is_some()
}
