//! Whose answers give addresses the labels of `toFQDNs` rules: `--tofqdns-servers`.

/// DNS servers whose answers count for `toFQDNs` rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum NameServers {
    /// Every server that a pod of the node may ask: its answers open addresses to each pod of the
    /// node whose policy selects the name, as with Cilium
    #[default]
    Any,
    /// Only trusted DNS servers, as for EgressFirewalls: those of --dns-server, or of --dns-service.
    /// Answers of other servers reach the pod that asked and open nothing
    Trusted,
}
