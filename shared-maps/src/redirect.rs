//! `hf_redirect_v2`: the (pod, server) pairs that are redirected to the DNS proxy.
//!
//! `from_pod` writes an entry when policy redirects a packet. The `sk_lookup` program does not see
//! marks. It takes a packet for the proxy only if an entry has a proxy port. Without DNS policy, a
//! pod therefore still reaches a DNS server on an address of the node.
//!
//! When policy no longer redirects, `from_pod` sets the port to zero. Such an entry redirects
//! nothing. With it, the proxy can still answer queries that it received before.

use crate::Be16;

/// Name of the map and its pin.
pub const NAME: &str = "hf_redirect_v2";
/// Entries of the map (LRU): a new one displaces the least recently used one.
pub const MAX_ENTRIES: u32 = 65536;

/// Key: a pod and a server.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RedirectKey {
    /// Address of the pod, network order; IPv4 in bytes 0..4.
    pub pod: [u8; 16],
    /// Address of the server, network order; IPv4 in bytes 0..4.
    pub server: [u8; 16],
    /// Port of the server, usually 53.
    pub port: Be16,
    /// Number of the IP protocol: 6 (TCP) or 17 (UDP).
    pub protocol: u8,
    /// [`crate::FAMILY_IPV4`] or [`crate::FAMILY_IPV6`].
    pub family: u8,
}

/// Value: the proxy that gets the packets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedirectValue {
    /// Proxy port. Zero: policy redirected the packets before and no longer does.
    pub proxy_port: Be16,
    /// Padding, which is always zero.
    pub pad: u16,
    /// Interface from which the stack receives these packets; 0 for any. It is 0 for a pod on a
    /// bridge, because the stack receives its packets from the bridge or from a VLAN of the bridge.
    pub ifindex: u32,
}
