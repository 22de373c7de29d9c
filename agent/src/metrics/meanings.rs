//! What label values mean, for the documentation.

use agent_cluster::relay_refusal::Refusal;
use agent_datapath::upkeep::Part;
use daemon::{label, metrics::meanings};

use crate::{
    cni::failures::AddFailure,
    identities::view::Outcome,
    listener::Listener,
    netpol,
    owner::takeovers::OwnerEnd,
    proxies::StreamKind,
    resolver::counters::{LookupResult, WriteResult},
};

label! {
    /// Which identities a number counts.
    IdentityType = "type" {
        /// Identities of endpoints, with numbers from 256 to 65535.
        Endpoint => "endpoint",
        /// Identities of addresses, whose labels come from blocks and names in policy.
        Local => "local",
    }
}

label! {
    /// What became of a mapping.
    MappingOutcome = "outcome" {
        /// The agent opened the addresses, or had nothing to open.
        Realised => "realised",
        /// Refused: the endpoint does not exist, or was added after the answer arrived.
        EndpointUnknown => "endpoint_unknown",
        /// Refused: the endpoint's DNS policy does not allow the name at this server.
        NotAllowed => "not_allowed",
        /// Refused: a field is out of range.
        Invalid => "invalid",
        /// Refused: one proxy sent too many mappings.
        RateLimited => "rate_limited",
        /// Not opened: a map is full, identities are exhausted, or a write failed.
        NotRealised => "not_realised",
    }
}

label! {
    /// What an answer meant for EgressFirewalls.
    Observation = "outcome" {
        /// The answer is about a name that an EgressFirewall uses, and comes from a trusted DNS
        /// server. Its addresses get the label of the name.
        Taken => "taken",
        /// The answer is about a name that no EgressFirewall uses.
        Unmatched => "unmatched",
        /// The answer is about a name that an EgressFirewall uses, but comes from a DNS server that
        /// is not trusted. No address gets the label of the name.
        Untrusted => "untrusted",
    }
}

label! {
    /// A map that the agent writes.
    WrittenMap = "map" {
        /// The map from prefix to identity.
        Ipcache => "ipcache",
        /// The policy maps of endpoints.
        Policy => "policy",
    }
}

label! {
    /// Where something was wrong and was repaired.
    Repaired = "part" {
        /// An entry of the ipcache was wrong or missing, or belonged to no prefix.
        Ipcache => "ipcache",
        /// An entry of a policy map was wrong or missing, or belonged to no policy.
        Policy => "policy",
        /// An entry of the map of endpoints (cilium_lxc) was wrong or missing, or belonged to no
        /// endpoint.
        Lxc => "lxc",
        /// An address of a learned name did not have the name's labels. This is a fault of the
        /// agent.
        Names => "names",
        /// The programs of an endpoint were replaced, not attached, or not the first at their
        /// interface, or the pin of the policy map was wrong.
        Programs => "programs",
        /// A routing rule or route that delivers redirected packets was missing, or forwarding was
        /// off.
        Routes => "routes",
        /// nftables rules of the agent were missing or changed. They drop packets that skipped the
        /// programs, and exempt redirected packets from the node's NAT.
        Netfilter => "netfilter",
        /// The program that steers packets to proxies was missing or replaced.
        Steering => "steering",
        /// The pin of a map that all endpoints share was missing or replaced.
        Pins => "pins",
        /// Always 0: the agent cannot repair this part. If another program has the proxy port, the
        /// agent waits until the port is free.
        Port => "port",
        /// Always 0: a lock file that is made again counts as no repair.
        Lock => "lock",
    }
}

label! {
    /// A setting with a value that opens a known gap.
    OpenSetting = "setting" {
        /// With the value `any`, the DNS server of one namespace can open addresses to pods of
        /// another namespace.
        NameServers => "tofqdns-servers",
        /// With the value `refuse`, policy ignores external addresses of Services, but nodes
        /// translate them nevertheless.
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
        .chain(meanings::<OwnerEnd>("takeovers"))
        .chain(meanings::<StreamKind>("proxy_streams"))
        .chain(meanings::<Refusal>("relay_refused"))
        .chain(meanings::<LookupResult>("resolver_lookups"))
        .chain(meanings::<WriteResult>("resolver_status_writes"))
        .chain(meanings::<Outcome>("identity_creates"))
        .chain(netpol::metrics::labels())
}
