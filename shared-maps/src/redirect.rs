//! `hf_redirect_v2`: which (pod, server) is redirected to the DNS proxy.
//!
//! `from_pod` writes an entry when policy redirects a packet. The `sk_lookup`
//! program, which sees no mark, takes a packet for the proxy only if an entry
//! names a proxy port. A pod that asks a server on a node address without DNS
//! policy therefore still reaches it.
//!
//! When policy no longer redirects, `from_pod` sets the port to zero. Such an
//! entry redirects nothing. It says that the proxy may still answer queries
//! that it got before.

use crate::Be16;

/// Pin and map name.
pub const NAME: &str = "hf_redirect_v2";
/// Entries (LRU).
pub const MAX_ENTRIES: u32 = 65536;

/// Key: who talks to what.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RedirectKey {
    /// Address of the pod, network order; IPv4 in bytes 0..4.
    pub pod: [u8; 16],
    /// Address of the server, likewise.
    pub server: [u8; 16],
    /// Port of the server.
    pub port: Be16,
    /// IP protocol.
    pub protocol: u8,
    /// [`crate::FAMILY_IPV4`] or [`crate::FAMILY_IPV6`].
    pub family: u8,
}

/// Value: where it goes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedirectValue {
    /// Proxy port; zero: policy redirected once, and no longer does.
    pub proxy_port: Be16,
    /// Zero.
    pub pad: u16,
    /// Interface that the stack receives these packets from; 0 for any. It is 0 for a pod on
    /// a bridge, whose packets the stack receives from the bridge or from a VLAN of it.
    pub ifindex: u32,
}

/// `hf_redirect_v1`, which the programs of the previous release read and write.
///
/// A bridge hides the interface in its key, so that it serves no pod there.
/// Programs of this release read it after `hf_redirect_v2` and keep it up to
/// date for pods that are on no bridge: programs of both releases meet in an
/// upgrade and in a downgrade. The next release drops it.
pub mod v1 {
    use crate::Be16;

    /// Pin and map name.
    pub const NAME: &str = "hf_redirect_v1";

    /// Key: what a pod talks to.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct RedirectKey {
        /// Destination address, network order; IPv4 in bytes 0..4.
        pub daddr: [u8; 16],
        /// Host-side interface of the pod.
        pub ifindex: u32,
        /// Destination port.
        pub dport: Be16,
        /// IP protocol.
        pub protocol: u8,
        /// [`crate::FAMILY_IPV4`] or [`crate::FAMILY_IPV6`].
        pub family: u8,
    }

    /// Value: where it goes.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RedirectValue {
        /// Proxy port.
        pub proxy_port: Be16,
        /// Zero.
        pub pad: u16,
    }
}
