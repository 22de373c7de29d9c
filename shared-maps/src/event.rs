//! `hf_events_v1`: records of drops and verdicts, and `hf_metrics_v1`: their counters.

use crate::Be16;

/// Ring buffer: pin and map name.
pub const NAME: &str = "hf_events_v1";
/// Size of the ring buffer, bytes.
pub const RING_BYTES: u32 = 1 << 20;
/// Per-CPU counters by [`Reason`] number: pin and map name. Each value is [`Counter`].
pub const COUNTERS_NAME: &str = "hf_metrics_v1";
/// Entries of the counter array.
pub const COUNTERS: u32 = 64;

/// Packets and bytes of one reason.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Number of packets with this reason.
    pub packets: u64,
    /// Sum of their lengths, link headers included.
    pub bytes: u64,
}

crate::words! {
    /// Why a packet passed or was dropped. Its number is [`Event::reason`] and the index of the
    /// counters.
    #[repr(u8)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Reason {
        // Passed.
        /// Policy allows the packet.
        Allowed = 0 => "allowed",
        /// The packet is a reply in a known connection, or an ICMP error about a known connection.
        Reply = 1 => "reply",
        /// The packet is a DNS query, and was redirected to the proxy.
        Redirected = 2 => "redirected",
        /// The packet is neighbour discovery, ARP or MLD.
        LinkLocal = 3 => "link_local",
        /// The packet is a DNS server's answer to a query that a proxy sent from the pod's address.
        Returned = 4 => "returned",
        /// The packet is to a pod of another node, and was sent with the sender's identity
        /// (--high-scale-ipcache full).
        Wrapped = 5 => "wrapped",
        /// The packet is from a pod of another node, and came with the pod's identity.
        Unwrapped = 6 => "unwrapped",
        /// The packet was wrapped, although its destination is outside of every known block of pods: no
        /// CiliumWorldCIDRs has this address.
        WrappedOutside = 7 => "wrapped_outside",
        /// By the ipcache, the packet is from a pod of another node. This node unwraps packets
        /// (--high-scale-ipcache), but the packet came without an identity: the other node does not wrap.
        Plain = 8 => "plain",
        // Dropped.
        /// No policy entry allows the packet.
        PolicyDenied = 16 => "policy_denied",
        /// A policy entry denies the packet.
        PolicyDeny = 17 => "policy_deny",
        /// The source address is not the endpoint's own.
        SpoofedSource = 18 => "spoofed_source",
        /// The headers are malformed, or longer than the program can read.
        Malformed = 19 => "malformed",
        /// The packet is a later fragment, and the program did not see the first fragment of its
        /// datagram.
        FragmentUnknown = 20 => "fragment_unknown",
        /// The packet is from a pod to 127.0.0.0/8 or ::1.
        Loopback = 21 => "loopback",
        /// The packet is neither IP nor ARP, or has a VLAN tag.
        UnknownProtocol = 22 => "unknown_protocol",
        /// The packet looks like an answer of the proxy, but the proxy did not send it.
        ForgedAnswer = 23 => "forged_answer",
        /// The packet is a DNS query, and the program could not write the redirect entry for it.
        RedirectFull = 24 => "redirect_full",
        /// The packet is for the DNS proxy, and exceeds the endpoint's quota per second
        /// (--endpoint-dns-quota).
        OverQuota = 25 => "over_quota",
        /// The packet is an IPv6 neighbour message for an address that is not on the pod's link, or
        /// an MLD report that a neighbour on the pod's bridge sent to all machines.
        NotOnLink = 26 => "not_on_link",
        /// The interface leads to a pod of an endpoint document, but the agent has not found the
        /// endpoint yet. `holdfast-agent status` gives the reason.
        NoEndpoint = 27 => "no_endpoint",
        /// The packet is from a pod to the port of the tunnel between nodes. Only nodes may send to it.
        TunnelPort = 28 => "tunnel_port",
        /// The packet is of the tunnel between nodes, and no node sends such a packet: it has no identity or
        /// an unknown one, its inner and outer addresses differ, its source is outside of the cluster or on
        /// this node, or it is a fragment.
        TunnelForged = 29 => "tunnel_forged",
        /// The frame is from a pod, but its source MAC is not the pod's.
        SourceMac = 30 => "source_mac",
        /// The packet is to a pod, but the pod does not have the destination address. Or it is from
        /// a pod and for one machine, but in a frame for all machines of a bridge. A few such
        /// packets are normal: a bridge sends a frame to every port if it has not learned the
        /// destination MAC.
        Misaddressed = 31 => "misaddressed",
        // Failures and evictions.
        /// The ring buffer had no room for an event, so `observe` does not show it.
        EventLost = 32 => "event_lost",
        /// The conntrack map had no room for a connection.
        ConntrackFull = 33 => "conntrack_full",
        /// An endpoint reached its quota of unanswered connections, fragmented datagrams or DNS
        /// servers. The program removed the endpoint's oldest entry for a new one.
        Displaced = 34 => "displaced",
        // Dropped too: the numbers from 16 to 31 are in use.
        /// The packet is to a pod of another node, and is too long to be wrapped. An ICMP error gives the pod
        /// the length that fits.
        TooBig = 48 => "too_big",
    }
}

impl Reason {
    /// Whether it counts a failure or an eviction in the datapath and not a packet's verdict.
    pub const fn is_trouble(self) -> bool {
        let n = self as u8;
        n >= 32 && n < 48
    }

    /// Whether the packet was dropped.
    pub const fn is_drop(self) -> bool {
        let n = self as u8;
        (n >= 16 && n < 32) || n >= 48
    }
}

/// One record of the ring buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Time of the verdict, nanoseconds of CLOCK_MONOTONIC.
    pub time: u64,
    /// Source, network order; IPv4 in bytes 0..4.
    pub saddr: [u8; 16],
    /// Destination, network order; IPv4 in bytes 0..4.
    pub daddr: [u8; 16],
    /// Identity of the remote side.
    pub remote_identity: u32,
    /// Host-side interface of the pod.
    pub ifindex: u32,
    /// Length of the packet in bytes, with its link header if it has one.
    pub len: u32,
    /// Source port; 0 for protocols without ports.
    pub sport: Be16,
    /// Destination port; 0 for protocols without ports.
    pub dport: Be16,
    /// Number of the endpoint on this node.
    pub endpoint: u16,
    /// Number of the [`Reason`] for the verdict.
    pub reason: u8,
    /// [`crate::FAMILY_IPV4`], [`crate::FAMILY_IPV6`] or [`FAMILY_ARP`]; 0 for other packets.
    pub family: u8,
    /// Number of the IP protocol, such as 6 for TCP.
    pub protocol: u8,
    /// [`crate::policy::EGRESS`] or [`crate::policy::INGRESS`].
    pub egress: u8,
    /// [`HAS_ICMP_TYPE`] for an ICMP packet, or 0.
    pub flags: u8,
    /// Type of the ICMP message, if [`HAS_ICMP_TYPE`] is set.
    pub icmp_type: u8,
    /// Padding, which is always zero.
    pub pad: [u8; 8],
}

/// In [`Event::family`]: the packet is ARP. The addresses are those of sender and target, as of IPv4.
pub const FAMILY_ARP: u8 = 3;

/// In [`Event::flags`]: the packet is ICMP, and [`Event::icmp_type`] is its type.
pub const HAS_ICMP_TYPE: u8 = 1;
