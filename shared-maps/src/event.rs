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

/// Why a packet passed or was dropped. Its number is [`Event::reason`] and the index of the
/// counters.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Passed: a policy entry allows it.
    Allowed = 0,
    /// Passed: a reply, or related to a known connection.
    Reply = 1,
    /// Redirected to the DNS proxy.
    Redirected = 2,
    /// Passed: neighbour discovery, ARP or multicast listener discovery.
    LinkLocal = 3,
    /// Delivered to a proxy's socket: the answer to a packet that the proxy sent from the pod's
    /// address.
    Returned = 4,
    /// Dropped: no policy entry allows it.
    PolicyDenied = 16,
    /// Dropped: a policy entry denies it.
    PolicyDeny = 17,
    /// Dropped: the source address is not the endpoint's.
    SpoofedSource = 18,
    /// Dropped: headers are malformed or longer than the programs read.
    Malformed = 19,
    /// Dropped: a later fragment of a datagram whose first fragment was not received.
    FragmentUnknown = 20,
    /// Dropped: to 127/8 or ::1 from a pod.
    Loopback = 21,
    /// Dropped: not IP, not ARP.
    UnknownProtocol = 22,
    /// Dropped: it looks like an answer of the proxy, but the proxy did not send it.
    ForgedAnswer = 23,
    /// Dropped: it belongs to the proxy, but its entry in `hf_redirect_v2` could not be made.
    RedirectFull = 24,
    /// Dropped: a packet to the proxy over the endpoint's quota of packets per second.
    OverQuota = 25,
    /// Dropped: a neighbour message to an address that is not on the pod's link.
    NotOnLink = 26,
    /// Dropped: the agent has not found the pod of the interface yet.
    NoEndpoint = 27,
    /// Dropped: the frame's source MAC is not the pod's.
    SourceMac = 30,
    /// Dropped: the packet is for another machine than the frame. From a pod: a packet for one
    /// machine in a frame for all machines of a bridge. To a pod: the destination is none of the
    /// pod's addresses and no group.
    Misaddressed = 31,
    /// Event records for which the ring had no room.
    EventLost = 32,
    /// Conntrack entries that could not be made.
    ConntrackFull = 33,
    /// Entries (unanswered connections, fragments, redirected servers) that newer entries of the
    /// same endpoint displaced.
    Displaced = 34,
}

impl Reason {
    /// Every reason, in the order of its number.
    pub const ALL: [Self; 22] = [
        Self::Allowed,
        Self::Reply,
        Self::Redirected,
        Self::LinkLocal,
        Self::Returned,
        Self::PolicyDenied,
        Self::PolicyDeny,
        Self::SpoofedSource,
        Self::Malformed,
        Self::FragmentUnknown,
        Self::Loopback,
        Self::UnknownProtocol,
        Self::ForgedAnswer,
        Self::RedirectFull,
        Self::OverQuota,
        Self::NotOnLink,
        Self::NoEndpoint,
        Self::SourceMac,
        Self::Misaddressed,
        Self::EventLost,
        Self::ConntrackFull,
        Self::Displaced,
    ];

    /// Word for logs and metric labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Reply => "reply",
            Self::Redirected => "redirected",
            Self::LinkLocal => "link_local",
            Self::Returned => "returned",
            Self::PolicyDenied => "policy_denied",
            Self::PolicyDeny => "policy_deny",
            Self::SpoofedSource => "spoofed_source",
            Self::Malformed => "malformed",
            Self::FragmentUnknown => "fragment_unknown",
            Self::Loopback => "loopback",
            Self::UnknownProtocol => "unknown_protocol",
            Self::ForgedAnswer => "forged_answer",
            Self::RedirectFull => "redirect_full",
            Self::OverQuota => "over_quota",
            Self::NotOnLink => "not_on_link",
            Self::NoEndpoint => "no_endpoint",
            Self::SourceMac => "source_mac",
            Self::Misaddressed => "misaddressed",
            Self::EventLost => "event_lost",
            Self::ConntrackFull => "conntrack_full",
            Self::Displaced => "displaced",
        }
    }

    /// Whether it counts a failure or an eviction in the datapath and not a packet's verdict.
    pub const fn is_trouble(self) -> bool {
        self as u8 >= 32
    }

    /// Whether the packet was dropped.
    pub const fn is_drop(self) -> bool {
        let n = self as u8;
        n >= 16 && n < 32
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
