//! What label values mean, for the documentation.

use shared_maps::event::Reason;

/// What the values of labels mean: metric, label, value, meaning.
pub const LABELS: [[&str; 4]; 62] = [
    [
        "listener_connections",
        "listener",
        "sdp",
        "The gRPC socket of proxies (--sdp-socket of the agent).",
    ],
    [
        "listener_connections",
        "listener",
        "fqdndata",
        "The port of Cilium's proxies (--enable-standalone-dns-proxy of the agent).",
    ],
    [
        "listener_connections",
        "listener",
        "admin",
        "The socket of commands, of the agent or of a proxy (--admin-socket).",
    ],
    [
        "listener_connections",
        "listener",
        "cni",
        "The socket of the CNI plugin (--cni-socket of the agent).",
    ],
    [
        "listener_connections",
        "listener",
        "metrics",
        "The address of probes and Prometheus (--metrics-address).",
    ],
    [
        "listener_rejected",
        "listener",
        "sdp",
        "The gRPC socket of proxies (--sdp-socket of the agent).",
    ],
    [
        "listener_rejected",
        "listener",
        "fqdndata",
        "The port of Cilium's proxies (--enable-standalone-dns-proxy of the agent).",
    ],
    [
        "listener_rejected",
        "listener",
        "admin",
        "The socket of commands, of the agent or of a proxy (--admin-socket).",
    ],
    [
        "listener_rejected",
        "listener",
        "cni",
        "The socket of the CNI plugin (--cni-socket of the agent).",
    ],
    [
        "listener_rejected",
        "listener",
        "metrics",
        "The address of probes and Prometheus (--metrics-address).",
    ],
    [
        "cni_add_failures",
        "reason",
        "agent",
        "The agent is starting, stopping, or too busy to answer in time.",
    ],
    [
        "cni_add_failures",
        "reason",
        "interface",
        "The interface cannot be under policy: not a veth pair, a second way out, or an address that is not the pod's.",
    ],
    [
        "cni_add_failures",
        "reason",
        "disk",
        "The list of pods cannot be written.",
    ],
    [
        "cni_add_failures",
        "reason",
        "policy",
        "Policy was not in force in time; the labels of the pod are not known, for example.",
    ],
    [
        "identity",
        "type",
        "endpoint",
        "Of endpoints: 256 to 65535.",
    ],
    [
        "identity",
        "type",
        "local",
        "Of label sets of addresses: blocks and names in policy.",
    ],
    [
        "fqdn_mappings",
        "outcome",
        "realised",
        "Opened, or nothing was to be opened.",
    ],
    [
        "fqdn_mappings",
        "outcome",
        "endpoint_unknown",
        "Refused: there is no such endpoint, or it is younger than the answer.",
    ],
    [
        "fqdn_mappings",
        "outcome",
        "not_allowed",
        "Refused: the endpoint's DNS policy does not allow the name at this server.",
    ],
    [
        "fqdn_mappings",
        "outcome",
        "invalid",
        "Refused: a field is out of range.",
    ],
    [
        "fqdn_mappings",
        "outcome",
        "rate_limited",
        "Refused: too many from one proxy.",
    ],
    [
        "fqdn_mappings",
        "outcome",
        "not_realised",
        "Not opened: a map is full, identities are exhausted, or a write failed.",
    ],
    [
        "resolver_observations",
        "outcome",
        "taken",
        "Of a name that an EgressFirewall uses, from a trusted DNS server: its addresses count.",
    ],
    [
        "resolver_observations",
        "outcome",
        "unmatched",
        "Of a name that no EgressFirewall uses.",
    ],
    [
        "resolver_observations",
        "outcome",
        "untrusted",
        "Of a name that an EgressFirewall uses, from another DNS server: no address gets its label.",
    ],
    [
        "bpf_map_writes",
        "map",
        "ipcache",
        "The identity of a prefix.",
    ],
    [
        "bpf_map_writes",
        "map",
        "policy",
        "The identities that an endpoint may reach.",
    ],
    [
        "reconcile_differences",
        "part",
        "ipcache",
        "An entry of the ipcache was wrong, missing or of no prefix.",
    ],
    [
        "reconcile_differences",
        "part",
        "policy",
        "The same of a policy map.",
    ],
    [
        "reconcile_differences",
        "part",
        "lxc",
        "The same of the map of endpoints.",
    ],
    [
        "reconcile_differences",
        "part",
        "names",
        "An address of a name lacked the name's labels: a fault of the agent.",
    ],
    [
        "reconcile_differences",
        "part",
        "programs",
        "Programs of an endpoint were not attached, not first in their chain or replaced, or the pin of its policy map was wrong.",
    ],
    [
        "reconcile_differences",
        "part",
        "routes",
        "A rule or route that delivers redirected packets was missing, or forwarding was off.",
    ],
    [
        "reconcile_differences",
        "part",
        "netfilter",
        "The nftables rules that drop packets which skipped the programs, or keep redirected ones out of the node's NAT, were missing or changed.",
    ],
    [
        "reconcile_differences",
        "part",
        "steering",
        "The program that steers packets to proxies was missing or replaced.",
    ],
    [
        "reconcile_differences",
        "part",
        "pins",
        "The pin of a map that all endpoints share was missing or replaced.",
    ],
    [
        "reconcile_differences",
        "part",
        "port",
        "Always 0: the agent cannot repair the proxy port; it waits until the port is free.",
    ],
    [
        "datapath_broken",
        "part",
        "routes",
        "Redirected packets are not delivered to proxies: their queries are lost.",
    ],
    [
        "datapath_broken",
        "part",
        "netfilter",
        "Packets that skip the programs pass, and queries to an address that the node translates (a ClusterIP) time out.",
    ],
    [
        "datapath_broken",
        "part",
        "steering",
        "Packets are not steered to live proxies.",
    ],
    [
        "datapath_broken",
        "part",
        "pins",
        "Endpoints attached now would have other maps than earlier endpoints.",
    ],
    [
        "datapath_broken",
        "part",
        "port",
        "Another user has the proxy port: no proxy can start.",
    ],
    [
        "proxy_streams",
        "kind",
        "mappings",
        "Native service: names and addresses.",
    ],
    [
        "proxy_streams",
        "kind",
        "rules",
        "Native service: DNS rules.",
    ],
    [
        "proxy_streams",
        "kind",
        "builtin",
        "The proxy in this process.",
    ],
    [
        "proxy_streams",
        "kind",
        "fqdndata",
        "FQDNData, the service for Cilium's proxy.",
    ],
    [
        "relay_refused",
        "reason",
        "accept",
        "The process has no descriptor, or the kernel no memory, for one more connection.",
    ],
    [
        "relay_refused",
        "reason",
        "crowded",
        "There were too many connections without a request; the oldest of the address with most of them was closed.",
    ],
    [
        "relay_refused",
        "reason",
        "handshake",
        "The handshake of TLS failed or took longer than 5 seconds: no TLS, or no certificate that --client-ca signed.",
    ],
    [
        "relay_refused",
        "reason",
        "no_request",
        "There was no request within 10 seconds of the handshake, or of the end of the last stream.",
    ],
    [
        "relay_refused",
        "reason",
        "silent",
        "Nothing came from the other side, and it took nothing, within 60 seconds.",
    ],
    [
        "relay_refused",
        "reason",
        "agents",
        "There are as many agents as --max-agents allows, or half as many from one address.",
    ],
    [
        "relay_refused",
        "reason",
        "certificate",
        "A renewed CA of --client-ca did not sign the certificate of a connected agent.",
    ],
    [
        "resolver_lookups",
        "outcome",
        "found",
        "At least one server gave addresses.",
    ],
    [
        "resolver_lookups",
        "outcome",
        "no_data",
        "The name exists and has no address.",
    ],
    [
        "resolver_lookups",
        "outcome",
        "nxdomain",
        "The name does not exist.",
    ],
    [
        "resolver_lookups",
        "outcome",
        "error",
        "The servers answered with another code.",
    ],
    [
        "resolver_lookups",
        "outcome",
        "timeout",
        "No server answered within 5 s.",
    ],
    [
        "resolver_lookups",
        "outcome",
        "no_server",
        "No DNS server is trusted, or none is ready.",
    ],
    [
        "resolver_status_writes",
        "outcome",
        "written",
        "The status is in the store.",
    ],
    [
        "resolver_status_writes",
        "outcome",
        "conflict",
        "Another agent wrote the object at the same time; the write was tried again.",
    ],
    [
        "resolver_status_writes",
        "outcome",
        "failed",
        "The store refused the write, or cannot be reached.",
    ],
];

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
