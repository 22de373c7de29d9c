//! What label values mean, for the documentation.

use agent_cluster::relay_refusal::Refusal;
use daemon::{label, metrics::meanings};
use shared_maps::event::Reason;

use crate::{
    cni::failures::AddFailure,
    listener::Listener,
    resolver::counters::{LookupResult, WriteResult},
};

label! {
    /// Which identities a number counts.
    IdentityType = "type" {
        /// Of endpoints: 256 to 65535.
        Endpoint => "endpoint",
        /// Of label sets of addresses: blocks and names in policy.
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
        /// Of a name that an EgressFirewall uses, from a trusted DNS server: its addresses count.
        Taken => "taken",
        /// Of a name that no EgressFirewall uses.
        Unmatched => "unmatched",
        /// Of a name that an EgressFirewall uses, from another DNS server: no address gets its
        /// label.
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
    }
}

label! {
    /// What a fault of the node's datapath means.
    Broken = "part" {
        /// Redirected packets are not delivered to proxies: their queries are lost.
        Routes => "routes",
        /// Packets that skip the programs pass, and queries to an address that the node translates
        /// (a ClusterIP) time out.
        Netfilter => "netfilter",
        /// Packets are not steered to live proxies.
        Steering => "steering",
        /// Endpoints attached now would have other maps than earlier endpoints.
        Pins => "pins",
        /// Another user has the proxy port: no proxy can start.
        Port => "port",
    }
}

label! {
    /// The service of a proxy's stream.
    Stream = "kind" {
        /// Native service: names and addresses.
        Mappings => "mappings",
        /// Native service: DNS rules.
        Rules => "rules",
        /// The proxy in this process.
        Builtin => "builtin",
        /// FQDNData, the service for Cilium's proxy.
        Fqdndata => "fqdndata",
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
        .chain(meanings::<Broken>("datapath_broken"))
        .chain(meanings::<OpenSetting>("open_setting"))
        .chain(meanings::<Stream>("proxy_streams"))
        .chain(meanings::<Refusal>("relay_refused"))
        .chain(meanings::<LookupResult>("resolver_lookups"))
        .chain(meanings::<WriteResult>("resolver_status_writes"))
}

/// What a value of the label `reason` means.
pub const fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Allowed => "Policy allows it.",
        Reason::Reply => "A reply to a known connection, or an ICMP error about one.",
        Reason::Redirected => "A DNS query, redirected to the proxy.",
        Reason::LinkLocal => "Neighbour discovery, ARP or MLD.",
        Reason::Returned => {
            "A DNS server's answer to a query that a proxy sent from the pod's address."
        }
        Reason::PolicyDenied => "No policy entry allows it.",
        Reason::PolicyDeny => "A policy entry denies it.",
        Reason::SpoofedSource => "The source address is not the endpoint's own.",
        Reason::Malformed => "Headers are malformed, or longer than can be read.",
        Reason::FragmentUnknown => "A fragment whose first fragment was not seen.",
        Reason::Loopback => "From a pod to 127.0.0.0/8 or ::1.",
        Reason::UnknownProtocol => "Neither IP nor ARP.",
        Reason::ForgedAnswer => {
            "A packet that looks like an answer of the proxy, but was not sent by it."
        }
        Reason::NoEndpoint => {
            "The interface leads to a pod of an endpoint document, and the agent has not found the \
             endpoint yet: `holdfast-agent status` says why."
        }
        Reason::NotOnLink => {
            "An IPv6 neighbour message to an address that is not on the pod's link, or a list of \
             groups (MLD report) that a neighbour on the pod's bridge sends to all machines."
        }
        Reason::SourceMac => "A frame of the pod whose source MAC is not the pod's.",
        Reason::Misaddressed => {
            "A packet to a pod for an address that the pod does not have, or a pod's packet for one \
             machine in a frame for all machines of a bridge. A few are normal: a bridge sends frames \
             for a MAC that it has not learned to every port."
        }
        Reason::RedirectFull => "A DNS query whose redirect entry could not be written.",
        Reason::OverQuota => {
            "A packet to the DNS proxy beyond its endpoint's quota per second (--endpoint-dns-quota)."
        }
        Reason::EventLost => "An event found no room in the ring buffer: `observe` misses it.",
        Reason::ConntrackFull => "A connection found no room in the conntrack map.",
        Reason::Displaced => {
            "An endpoint reached its quota of unanswered connections, fragmented datagrams or DNS servers: a newer entry displaced its oldest one."
        }
    }
}
