//! Flags about the replies to packets that egress policy denies.

use agent_datapath::deny_response::{DenyResponses, DnsDenyResponse, PolicyDenyResponse};
use clap::Args;

#[derive(Clone, Debug, Args)]
pub struct DenyArgs {
    /// Reply to packets that egress policy denies. With icmp, connections fail at once and do not
    /// wait for their timeout. Each endpoint gets 1,000 replies per second at most
    #[arg(long, value_enum, default_value_t = PolicyDenyResponse::None,
          env = "HOLDFAST_POLICY_DENY_RESPONSE")]
    pub policy_deny_response: PolicyDenyResponse,
    /// Reply to DNS queries (port 53) to a server that egress policy denies. With refused, resolvers
    /// continue with their next server at once. The query reaches no server. For UDP this goes before
    /// --policy-deny-response
    #[arg(long, value_enum, default_value_t = DnsDenyResponse::None,
          env = "HOLDFAST_DNS_DENY_RESPONSE")]
    pub dns_deny_response: DnsDenyResponse,
}

impl DenyArgs {
    pub(super) fn responses(&self) -> DenyResponses {
        DenyResponses {
            policy: self.policy_deny_response,
            dns: self.dns_deny_response,
        }
    }
}
