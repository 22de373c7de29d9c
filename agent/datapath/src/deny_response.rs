//! Replies to packets that egress policy denies; the programs send them.

use shared_maps::endpoint::{DENY_RESPONSE_DNS, DENY_RESPONSE_ICMP};

/// Reply to every packet that egress policy denies (Cilium's name and values).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyDenyResponse {
    /// No reply: the sender waits for its timeout
    #[default]
    None,
    /// A RST for TCP; otherwise the ICMP error "administratively prohibited"
    Icmp,
}

/// Reply to DNS queries that egress policy denies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DnsDenyResponse {
    /// As for other packets
    #[default]
    None,
    /// The answer REFUSED; for TCP a RST
    Refused,
}

/// Both settings. Their defaults send nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DenyResponses {
    /// Reply to denied packets of every kind.
    pub policy: PolicyDenyResponse,
    /// For queries over UDP, and connections over TCP, to port 53.
    pub dns: DnsDenyResponse,
}

impl DenyResponses {
    /// The flags of the node that the programs read.
    pub(super) fn flags(self) -> u8 {
        let policy = match self.policy {
            PolicyDenyResponse::None => 0,
            PolicyDenyResponse::Icmp => DENY_RESPONSE_ICMP,
        };
        let dns = match self.dns {
            DnsDenyResponse::None => 0,
            DnsDenyResponse::Refused => DENY_RESPONSE_DNS,
        };
        policy | dns
    }
}
