//! What label values mean, for the documentation.

use agent_cluster::relay_refusal::Refusal;
use agent_datapath::upkeep::Part;
use daemon::{label, metrics::meanings};

use crate::{
    cni::failures::AddFailure,
    identities::view::Outcome,
    listener::Listener,
    netpol,
    proxies::StreamKind,
    resolver::counters::{LookupResult, WriteResult},
};

label! {
    /// Which identities a number counts.
    IdentityType = "type" {
        /// Identities of endpoints: 256 to 65535.
        Endpoint => "endpoint",
        /// Identities of label sets of addresses: blocks and names in policy.
        Local => "local",
    }
}

label! {
    /// What became of a mapping.
    MappingOutcome = "outcome" {
        /// Opened, or nothing was to be opened.
        Realised => "realised",
        /// Refused: there is no such endpoint, or it is younger than the answer.
        EndpointUnknown => "endpoint_unknown",
        /// Refused: the endpoint's DNS policy does not allow the name at this server.
        NotAllowed => "not_allowed",
        /// Refused: a field is out of range.
        Invalid => "invalid",
        /// Refused: too many from one proxy.
        RateLimited => "rate_limited",
        /// Not opened: a map is full, identities are exhausted, or a write failed.
        NotRealised => "not_realised",
    }
}

label! {
    /// What an answer meant for EgressFirewalls.
    Observation = "outcome" {
        /// The answer is about a name that an EgressFirewall uses, from a trusted DNS server: its addresses count.
        Taken => "taken",
        /// The answer is about a name that no EgressFirewall uses.
        Unmatched => "unmatched",
        /// The answer is about a name that an EgressFirewall uses, from another DNS server: no address gets
        /// its label.
        Untrusted => "untrusted",
    }
}

label! {
    /// A map that the agent writes.
    WrittenMap = "map" {
        /// The identity of a prefix.
        Ipcache => "ipcache",
        /// The identities that an endpoint may reach.
        Policy => "policy",
    }
}

label! {
    /// Where something was wrong and was repaired.
    Repaired = "part" {
        /// An entry of the ipcache was wrong or missing, or belonged to no prefix.
        Ipcache => "ipcache",
        /// The same of a policy map.
        Policy => "policy",
        /// The same of the map of endpoints.
        Lxc => "lxc",
        /// An address of a name lacked the name's labels: a fault of the agent.
        Names => "names",
        /// Programs of an endpoint were not attached, not first in their chain or replaced, or the
        /// pin of its policy map was wrong.
        Programs => "programs",
        /// A rule or route that delivers redirected packets was missing, or forwarding was off.
        Routes => "routes",
        /// The nftables rules that drop packets which skipped the programs, or keep redirected ones
        /// out of the node's NAT, were missing or changed.
        Netfilter => "netfilter",
        /// The program that steers packets to proxies was missing or replaced.
        Steering => "steering",
        /// The pin of a map that all endpoints share was missing or replaced.
        Pins => "pins",
        /// Always 0: the agent cannot repair the proxy port; it waits until the port is free.
        Port => "port",
        /// Always 0: a lock file that is made again counts as no repair.
        Lock => "lock",
    }
}

label! {
    /// A setting with a value that opens a known gap.
    OpenSetting = "setting" {
        /// `any`: the DNS server of one namespace can open addresses to pods of another one.
        NameServers => "tofqdns-servers",
        /// `refuse`: nodes still translate external addresses of Services.
        ExternalIps => "k8s-external-ips",
    }
}

/// What the values of labels mean: metric, label, value, meaning.
pub fn labels() -> impl Iterator<Item = [&'static str; 4]> {
    meanings::<Listener>("listener_connections")
        .chain(meanings::<Listener>("listener_rejected"))
        .chain(meanings::<AddFailure>("cni_add_failures"))
        .chain(meanings::<IdentityType>("identity"))
        .chain(meanings::<MappingOutcome>("fqdn_mappings"))
        .chain(meanings::<Observation>("resolver_observations"))
        .chain(meanings::<WrittenMap>("bpf_map_writes"))
        .chain(meanings::<Repaired>("reconcile_differences"))
        .chain(meanings::<Part>("datapath_broken"))
        .chain(meanings::<OpenSetting>("open_setting"))
        .chain(meanings::<StreamKind>("proxy_streams"))
        .chain(meanings::<Refusal>("relay_refused"))
        .chain(meanings::<LookupResult>("resolver_lookups"))
        .chain(meanings::<WriteResult>("resolver_status_writes"))
        .chain(meanings::<Outcome>("identity_creates"))
        .chain(netpol::metrics::labels())
}
