//! Why a relay does not serve a peer: a label, which the documentation of metrics explains in each build.

use daemon::label;

label! {
    /// Why a relay does not serve a peer.
    Refusal = "reason" {
        /// The process has no descriptor, or the kernel no memory, for one more connection.
        Accept => "accept",
        /// There were too many connections without a request; the oldest of the address with most
        /// of them was closed.
        Crowded => "crowded",
        /// The handshake of TLS failed or took longer than 5 seconds: no TLS, or no certificate
        /// that --client-ca signed.
        Handshake => "handshake",
        /// There was no request within 10 seconds of the handshake, or of the end of the last
        /// stream.
        NoRequest => "no_request",
        /// The other side sent nothing and read nothing within 60 seconds.
        Silent => "silent",
        /// All places of --max-agents are taken, or the address has its share of them.
        Agents => "agents",
        /// A renewed CA of --client-ca did not sign the certificate of a connected agent.
        Certificate => "certificate",
    }
}
