//! Settings of one endpoint, and the maps in which its programs find them.
//!
//! An agent loads the programs once. They find the endpoint by the interface that a packet passes:
//! `INTERFACES` has the number of a slot, and each of the other maps has that slot's part. Nothing
//! here is pinned: the maps belong to the programs that one run of an agent loads.

/// Symbol of the read-only global (`u32`) with [`DUAL_STACK`], [`TRANSPARENT`], [`NO_LINK_HEADER`],
/// [`DENY_RESPONSE_ICMP`], [`DENY_RESPONSE_DNS`] and those of [`crate::tunnel`], which are the same for
/// all interfaces of a loaded program.
pub const NODE_FLAGS: &str = "NODE_FLAGS";
/// Map: slot (`u32`) by interface (`u32`), for interfaces below [`LOW_INTERFACES`]; 0 is no slot.
/// Nothing passes an interface without a slot.
pub const INTERFACES: &str = "INTERFACES";
/// Entries of [`INTERFACES`], an array: it takes a packet less time than a hash table.
pub const LOW_INTERFACES: u32 = 65_536;
/// Map: the same, for all other interfaces (a hash table).
pub const HIGH_INTERFACES: &str = "HIGH_INTERFACES";
/// Map: the [`EndpointConfig`] of each slot.
pub const CONFIGS: &str = "CONFIGS";
/// Map of maps: policy map by slot.
pub const POLICIES: &str = "POLICIES";
/// Map of maps: [`Queue`] by [`Queue::index`].
pub const QUEUES: &str = "QUEUES";
/// Map: when the packets to the proxy so far would have been sent at the endpoint's rate
/// (`u64`, nanoseconds), by slot.
pub const PROXY_CLOCKS: &str = "PROXY_CLOCKS";
/// Map: the same for replies to denied packets, at their greatest rate.
pub const DENY_CLOCKS: &str = "DENY_CLOCKS";

/// Slots. The first one is no endpoint's.
pub const SLOTS: u32 = 16_384;

/// A queue of an endpoint. The oldest item makes room for a new one.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Unanswered connections that the endpoint opened.
    UnansweredOut = 0,
    /// Unanswered connections that the other side opened.
    UnansweredIn = 1,
    /// Datagrams with fragments in transit.
    Fragments = 2,
    /// Servers that have an entry for redirected flows.
    Servers = 3,
}

impl Queue {
    /// All queues, in the order of their numbers.
    pub const ALL: [Self; 4] = [
        Self::UnansweredOut,
        Self::UnansweredIn,
        Self::Fragments,
        Self::Servers,
    ];

    /// Key of the queue of a slot in [`QUEUES`].
    #[inline(always)]
    pub const fn index(self, slot: u32) -> u32 {
        slot * 4 + self as u32
    }
}

/// An item of any [`Queue`].
pub type QueueItem = [u64; 6];

/// Flag: the endpoint has an IPv4 address.
pub const HAS_IPV4: u8 = 1;
/// Flag: the endpoint has an IPv6 address.
pub const HAS_IPV6: u8 = 2;
/// Flag of the node: it has both families. An address without an ipcache entry is then world-ipv4 or
/// world-ipv6 instead of world.
pub const DUAL_STACK: u8 = 4;
/// Flag of the node: proxies send queries from pods' addresses.
pub const TRANSPARENT: u8 = 8;
/// Flag for `to_proxy`: packets of the interface begin with their IP header.
pub const NO_LINK_HEADER: u8 = 16;
/// Flag of the node: packets that egress policy denies are answered, by an ICMP message or a RST.
pub const DENY_RESPONSE_ICMP: u8 = 32;
/// Flag of the node: DNS queries that egress policy denies are answered, by REFUSED or a RST.
pub const DENY_RESPONSE_DNS: u8 = 64;

/// The endpoint a program serves. Its alignment makes copying it fast.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Security identity of the endpoint.
    pub identity: u32,
    /// Number of the host-side interface.
    pub ifindex: u32,
    /// IPv6 address, zero without [`HAS_IPV6`].
    pub ipv6: [u8; 16],
    /// IPv4 address, zero without [`HAS_IPV4`].
    pub ipv4: [u8; 4],
    /// Number of the endpoint on this node.
    pub id: u16,
    /// MAC of the pod's interface. All zero: unknown, and not checked.
    pub mac: [u8; 6],
    /// MAC to which a bridge delivers the pod's frames for this node, if the host-side interface is
    /// a bridge port. All zero: it is no bridge port, and the node routes the packets that it
    /// receives.
    pub gateway_mac: [u8; 6],
    /// Combination of [`HAS_IPV4`] and [`HAS_IPV6`].
    pub flags: u8,
    /// Length of the bridge's IPv6 prefix that contains the endpoint's address; 0: none.
    pub on_link_bits: u8,
    /// MAC of the bridge itself; all zero: none.
    pub bridge_mac: [u8; 6],
    /// Length of the bridge's IPv4 prefix that contains the endpoint's address; 0: none.
    pub on_link_bits4: u8,
    /// Padding, which is always zero.
    pub pad: [u8; 5],
    /// Interface identifiers of the pod's link-local addresses, except the one made from
    /// [`Self::mac`], as they are in an address. All zero: no address.
    pub link_locals: [[u32; 2]; LINK_LOCALS],
    /// Interface identifiers of the node's addresses on the same link.
    pub node_link_locals: [[u32; 2]; NODE_LINK_LOCALS],
}

/// Link-local addresses of a pod's interface that are accepted, besides the one made from its MAC.
pub const LINK_LOCALS: usize = 2;
/// Link-local addresses of the node on a pod's link that are accepted.
pub const NODE_LINK_LOCALS: usize = 4;

/// The interface identifier of an address in fe80::/64; `None` for other addresses.
pub fn interface_id(address: [u8; 16]) -> Option<[u32; 2]> {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = address;
    ([a, b, c, d, e, f, g, h] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0]).then_some([
        u32::from_ne_bytes([i, j, k, l]),
        u32::from_ne_bytes([m, n, o, p]),
    ])
}

/// The link-local address made from a MAC (RFC 4291, appendix A).
pub const fn link_local_of(mac: [u8; 6]) -> [u8; 16] {
    let [a, b, c, d, e, f] = mac;
    [
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ]
}
