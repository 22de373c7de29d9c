//! How many connections and agents a relay serves, and how long each may take.

use std::time::Duration;

/// Limits on the connections of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// Maximum number of agents that have a stream at once.
    pub(super) agents: usize,
    /// Maximum number of connections without a stream at once. Their peers have not shown a certificate yet, or have
    /// not sent a request.
    pub(super) waiting: usize,
    /// Longest time for a handshake of TLS.
    pub(super) handshake: Duration,
    /// Longest time of a connection without a stream, after its handshake.
    pub(super) request: Duration,
    /// A stream whose agent accepts nothing for this long ends.
    pub(super) slow: Duration,
    /// A connection whose agent neither sends nor accepts anything for this long is closed. An agent answers
    /// pings, and reads the message that the relay sends every few seconds, more often than this.
    pub(super) silent: Duration,
}

/// Descriptors besides those of agents and of waiting connections: metrics (64 connections), the API
/// server, files.
const OTHERS: usize = 128;

impl Bounds {
    /// The limits of a relay for this many agents.
    pub(super) fn agents(agents: usize) -> Self {
        Self {
            agents,
            waiting: 256,
            handshake: Duration::from_secs(5),
            request: Duration::from_secs(10),
            slow: Duration::from_secs(30),
            silent: Duration::from_secs(60),
        }
    }

    /// Descriptors that the relay needs besides one for each agent.
    pub(super) fn other_descriptors(&self) -> usize {
        self.waiting + OTHERS
    }
}
