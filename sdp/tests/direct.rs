//! The whole proxy in one process, on loopback, without root: real sockets, a
//! server of our own, a resolver and a mapping sink that do as they are told.

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
