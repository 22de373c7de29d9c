//! A packet that the datapath reported, as commands and the API show it.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use shared_maps::event::Reason;

use crate::policy::trace::{Port, RuleView};

/// One packet that the datapath reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketView {
    /// When the packet was seen, nanoseconds of CLOCK_MONOTONIC.
    pub time: u64,
    /// Number of the endpoint whose programs reported the packet.
    pub endpoint: u16,
    /// `egress` or `ingress`.
    pub direction: String,
    /// Text of a [`Reason`], or `reason N` for a number that is unknown here.
    pub reason: String,
    pub dropped: bool,
    /// IP protocol number; 0 = not IP.
    pub protocol: u8,
    /// Whether the packet is ARP: `source` is then the sender, and `destination` the target.
    pub arp: bool,
    /// ICMP type, of ICMP packets that have one.
    pub icmp_type: Option<u8>,
    /// Source address and port; empty = neither IP nor ARP.
    pub source: String,
    /// Destination address and port; empty = neither IP nor ARP.
    pub destination: String,
    /// Identity of the remote side.
    pub remote_identity: u32,
    /// Length of the packet, bytes.
    pub length: u32,
    /// Identity of the endpoint; 0 = the endpoint is gone.
    pub identity: u32,
    /// Key of the endpoint at its source; empty if the endpoint is gone.
    pub key: String,
    /// Names that the endpoint learned the remote address for.
    pub names: Vec<String>,
    /// The pod or the Service that has the remote address, for example `Pod/shop/web-1`; `None` if no
    /// document of the cluster describes one there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// Rules that decide, by the policy in force at the time of the request. Empty if no rule allows
    /// the packet, if nothing is restricted, or if policy does not decide about such a packet.
    pub rules: Vec<RuleView>,
}

impl PacketView {
    /// The address of the remote side.
    pub fn remote(&self) -> Option<IpAddr> {
        let text = if self.direction == "egress" {
            &self.destination
        } else {
            &self.source
        };
        Some(text.parse::<SocketAddr>().ok()?.ip())
    }

    /// The destination port as policy has it, or the ICMP type; `None` if the packet has neither.
    pub fn port(&self) -> Option<Port> {
        let number = match self.protocol {
            6 | 17 | 132 => self.destination.parse::<SocketAddr>().ok()?.port(),
            _ => u16::from(self.icmp_type?),
        };
        Some(Port {
            protocol: self.protocol,
            number,
        })
    }

    /// Whether policy decided the packet: it was allowed, redirected to the proxy or denied.
    pub fn is_judged(&self) -> bool {
        let judged = [
            Reason::Allowed,
            Reason::Redirected,
            Reason::PolicyDenied,
            Reason::PolicyDeny,
        ];
        judged.iter().any(|reason| reason.as_str() == self.reason)
    }
}
