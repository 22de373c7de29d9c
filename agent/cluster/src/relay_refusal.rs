//! Why a relay does not serve a peer: a label, which the documentation of metrics explains in each build.

use daemon::label;

label! {
    /// Why a relay does not serve a peer.
    Refusal = "reason" {
        /// The process had no file descriptor, or the kernel no memory, for one more connection.
        Accept => "accept",
        /// There were too many connections without a request. The relay closed the oldest one of
        /// the address that had most of them.
        Crowded => "crowded",
        /// The TLS handshake failed or took longer than 5 seconds. For example, the client did not
        /// use TLS, or had no certificate signed by --client-ca.
        Handshake => "handshake",
        /// No request came within 10 seconds after the handshake, or after the end of the last
        /// stream.
        NoRequest => "no_request",
        /// The client sent nothing and read nothing for 60 seconds.
        Silent => "silent",
        /// The number of connected agents had reached --max-agents, or the client's address had
        /// used up its share of them.
        Agents => "agents",
        /// A renewed CA of --client-ca did not sign the certificate of a connected agent.
        Certificate => "certificate",
    }
}
