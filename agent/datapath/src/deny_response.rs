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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct DenyResponses {
    /// Reply to packets that egress policy denies. With icmp, connections fail at once and do not
    /// wait for their timeout. Each endpoint gets 1,000 replies per second at most
    #[arg(
        id = "policy_deny_response",
        long = "policy-deny-response",
        value_name = "HOW",
        value_enum,
        default_value_t = PolicyDenyResponse::None
    )]
    pub policy: PolicyDenyResponse,
    /// Reply to DNS queries (port 53) to a server that egress policy denies. With refused, resolvers
    /// continue with their next server at once. The query reaches no server. For UDP this goes before
    /// --policy-deny-response
    #[arg(
        id = "dns_deny_response",
        long = "dns-deny-response",
        value_name = "HOW",
        value_enum,
        default_value_t = DnsDenyResponse::None
    )]
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
