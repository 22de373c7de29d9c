//! Settings of the main path.

use std::time::Duration;

use dns_policy::reject_code::RejectCode;

use crate::transparent::Transparent;

/// Settings of the main path.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Port to which the listeners are bound. Queries to a server at this port are refused.
    pub port: u16,
    /// Answer to a name that policy does not allow.
    pub reject: RejectCode,
    /// Maximum time for which an answer waits for the agent.
    pub max_delay: Duration,
    /// Maximum time for which a query waits for its server.
    pub timeout: Duration,
    /// A TCP connection without traffic is closed after this time (RFC 7766, 6.2.3).
    pub tcp_idle: Duration,
    /// A TCP connection to a server is closed after this time without queries (RFC 7766, 6.2.3).
    pub server_idle: Duration,
    /// Time for which each TCP connection may still send one more query during a drain. The
    /// connection ends with the answer.
    pub tcp_last_query: Duration,
    /// Maximum number of queries in flight, for all workers and endpoints together.
    pub in_flight: usize,
    /// How long a query waits for a place in flight before it is refused.
    pub in_flight_grace: Duration,
    /// How long a query of an endpoint without rules waits for them before it is refused.
    pub rules_wait: Duration,
    /// Maximum bytes of memory for messages of all TCP connections together, in addition to a small
    /// allowance of each connection.
    pub tcp_memory: usize,
    /// Whether queries are sent from the address of the pod that sent them.
    pub transparent: Transparent,
    /// Whether servers may be at a loopback address. Only for tests, because a loop is then
    /// possible.
    pub loopback_servers: bool,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            port: 10094,
            reject: RejectCode::Refused,
            max_delay: Duration::from_millis(100),
            timeout: Duration::from_secs(10),
            tcp_idle: Duration::from_secs(10),
            // Shorter than the time after which servers close: 8 s with the library of CoreDNS, 30
            // s with BIND and Unbound.
            server_idle: Duration::from_secs(5),
            tcp_last_query: Duration::from_secs(1),
            in_flight: 65_536,
            in_flight_grace: Duration::ZERO,
            rules_wait: Duration::from_secs(2),
            tcp_memory: 64 << 20,
            transparent: Transparent::default(),
            loopback_servers: false,
        }
    }
}
