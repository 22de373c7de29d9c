//! Label values of the counters: enums, so that there are never more of them than here.

use daemon::label;

label! {
    /// Outcome of a query that reached the proxy.
    QueryResult = "result" {
        /// Allowed and sent on to its server; counted again as shed or upstream_error if that failed.
        Forwarded => "forwarded",
        /// Refused by policy: no rule about the server allows the name.
        DeniedName => "denied_name",
        /// Refused by policy: no rule of the endpoint is about the server.
        DeniedServer => "denied_server",
        /// Refused by policy: the endpoint has no DNS rules for this port.
        DeniedNoRules => "denied_no_rules",
        /// Refused: no endpoint of this node has the source address.
        UnknownSource => "unknown_source",
        /// Refused: it came from the node itself.
        HostSource => "host_source",
        /// Refused: its destination would lead back to the proxy, or nowhere.
        Loop => "loop",
        /// Answered FORMERR: it is malformed.
        FormErr => "formerr",
        /// Answered NOTIMP: the proxy does not know its opcode.
        NotImp => "notimp",
        /// Not answered: not a query, or shorter than a header.
        Ignored => "ignored",
        /// Answered SERVFAIL: too many queries were in flight.
        Shed => "shed",
        /// Answered SERVFAIL: its server could not be reached.
        UpstreamError => "upstream_error",
        /// Lost: the kernel reported no original destination.
        NoDestination => "no_destination",
    }
}

label! {
    /// Outcome of a message from a server.
    AnswerResult = "result" {
        /// Released at once: no addresses, or the way to each was open.
        Released => "released",
        /// Released once the agent had opened the way to its addresses.
        Realised => "realised",
        /// Released although the agent could not open the way to its addresses, or refused to.
        NotRealised => "not_realised",
        /// Released because no agent was there, or it did not answer three times in a row.
        AgentAway => "agent_away",
        /// Released because the agent took longer than the response max delay.
        Late => "late",
        /// Released before the way to its addresses was open because too many answers waited.
        HeldFull => "held_full",
        /// Turned into SERVFAIL: it could not be read.
        Malformed => "malformed",
        /// Turned into SERVFAIL: the agent ended the call about its addresses with an error
        /// (FQDNData only).
        Rejected => "rejected",
        /// Ignored: it answers no query in flight.
        Unexpected => "unexpected",
        /// Could not be sent to the client.
        SendFailed => "send_failed",
    }
}

label! {
    /// Reason why a query did not have the source address and port of transparent mode.
    Fallback = "reason" {
        /// Sent from the pod's address. The kernel found no free port, so the proxy chose a random
        /// one.
        OtherPort => "other_port",
        /// Sent from the node's address: the proxy got no port of the pod's address. On Cilium's
        /// datapath only the pod's own port counts.
        NoPort => "no_port",
        /// Sent from the node's address: there was no room for a further socket.
        TooManySockets => "too_many_sockets",
        /// Sent from the node's address: the kernel does not permit the proxy to use the pod's.
        NotPermitted => "not_permitted",
        /// Sent from the node's address: the datapath would deliver the answer to the pod, because
        /// the agent runs without the flag of transparent mode.
        NoReturnPath => "no_return_path",
        /// Sent from the node's address: the kernel refused the pod's for another reason.
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
