//! Label values of the counters. They are enums, so that no other values can occur.

use daemon::label;

label! {
    /// Outcome of a query that reached the proxy.
    QueryResult = "result" {
        /// Policy allows the query, and the proxy forwards it. If forwarding fails, the query is
        /// counted again as shed or upstream_error.
        Forwarded => "forwarded",
        /// Refused by policy: the endpoint's rules for this server do not allow the name.
        DeniedName => "denied_name",
        /// Refused by policy: the endpoint has no rule for this server.
        DeniedServer => "denied_server",
        /// Refused by policy: the endpoint has no DNS rules for this port.
        DeniedNoRules => "denied_no_rules",
        /// Refused: no endpoint of this node has the source address.
        UnknownSource => "unknown_source",
        /// Refused: the query came from the node itself.
        HostSource => "host_source",
        /// Refused: the destination of the query leads back to the proxy, or cannot be the address
        /// of a server.
        Loop => "loop",
        /// Answered with FORMERR: the query is malformed.
        FormErr => "formerr",
        /// Answered with NOTIMP: the proxy does not know the opcode.
        NotImp => "notimp",
        /// Not answered: the message is not a query, or is shorter than a DNS header.
        Ignored => "ignored",
        /// Answered with SERVFAIL: too many queries were in flight.
        Shed => "shed",
        /// Answered with SERVFAIL: the proxy could not reach the server.
        UpstreamError => "upstream_error",
        /// Not answered: the kernel did not report to which server the query was sent.
        NoDestination => "no_destination",
    }
}

label! {
    /// Outcome of a message from a server.
    AnswerResult = "result" {
        /// Released at once: the answer has no addresses, or all of them were open already.
        Released => "released",
        /// Released after the agent had opened its addresses.
        Realised => "realised",
        /// Released although the agent refused or failed to open its addresses.
        NotRealised => "not_realised",
        /// Released because no agent was connected, or because the agent did not answer three
        /// mappings in a row.
        AgentAway => "agent_away",
        /// Released because the agent took longer than the response max delay.
        Late => "late",
        /// Released before its addresses were open, because too many answers waited for the agent.
        HeldFull => "held_full",
        /// Replaced by SERVFAIL: the proxy could not parse the answer.
        Malformed => "malformed",
        /// Replaced by SERVFAIL: the agent answered the mapping with an error (FQDNData only).
        Rejected => "rejected",
        /// Ignored: the message answers no query in flight.
        Unexpected => "unexpected",
        /// Lost: the proxy could not send the answer to the client.
        SendFailed => "send_failed",
    }
}

label! {
    /// Reason why a query did not have the source address and port of transparent mode.
    Fallback = "reason" {
        /// Sent from the pod's address. The kernel found no free port, so the proxy chose a random
        /// one.
        OtherPort => "other_port",
        /// Sent from the node's address: no port of the pod's address was available. On Cilium's
        /// datapath, only the port from which the pod sent the query can be used.
        NoPort => "no_port",
        /// Sent from the node's address: the pod had used up its share of sockets.
        TooManySockets => "too_many_sockets",
        /// Sent from the node's address: the kernel does not permit the proxy to use the pod's
        /// address and port.
        NotPermitted => "not_permitted",
        /// Sent from the node's address: the datapath would deliver the answer to the pod, because
        /// the agent runs without the flag of transparent mode.
        NoReturnPath => "no_return_path",
        /// Sent from the node's address: the kernel refused the pod's address for another reason.
        Other => "other",
    }
}

label! {
    /// Transport over which a query came.
    Protocol = "protocol" {
        /// UDP.
        Udp => "udp",
        /// TCP.
        Tcp => "tcp",
    }
}
