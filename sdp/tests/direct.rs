//! The whole proxy in one process on loopback, without root. It has real sockets, a server of the
//! test, and a resolver and a mapping sink that the test controls.

#[cfg(test)]
#[path = "direct/bench.rs"]
mod bench;
#[cfg(test)]
#[path = "direct/late_rules.rs"]
mod late_rules;
#[cfg(test)]
#[path = "direct/scenarios.rs"]
mod scenarios;
#[cfg(test)]
#[path = "direct/shares.rs"]
mod shares;
#[cfg(test)]
#[path = "direct/tcp.rs"]
mod tcp;
#[path = "direct/udp.rs"]
mod udp;
