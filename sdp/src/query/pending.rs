//! A query on its way: how it arrived, and what is kept of it until its client has an answer.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use dns_policy::{mapping::EndpointInstance, rule::Transport};
use shared_maps::IdentityId;

use crate::{
    query_log::Entry,
    wire::{edns::Edns, reply::Kept},
};

/// How a query arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Address and port of the sender.
    pub client: SocketAddr,
    /// The server it was meant for.
    pub server: SocketAddr,
    /// Transport.
    pub transport: Transport,
    /// When it is judged.
    pub now: Instant,
}

/// A query that policy allows and that is to be sent on.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The client's message id, flags and EDNS.
    pub kept: Kept,
    /// Question as sent: name, type, class.
    pub question: &'a [u8],
    /// Its OPT record, if it carries an option that must not be passed on.
    pub hop_by_hop: Option<Edns>,
    /// The endpoint that sent it.
    pub endpoint: EndpointInstance,
    /// Identities of both ends. The client's goes into the mark.
    pub identities: Identities,
    /// The address to send it from, if not the node's. Port 0 is the kernel's choice.
    pub source: Option<SocketAddr>,
    /// Entry of the query log, if the log wants this query.
    pub logged: Option<Box<Entry>>,
    /// Duration of the policy check; zero if it was not measured.
    pub policy_check: Duration,
}

/// Identities, as they were when the query arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identities {
    /// Of the client.
    pub client: IdentityId,
    /// Of the server.
    pub server: IdentityId,
}

/// A question that was sent on.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Question as sent.
    pub question: &'a [u8],
    /// The endpoint that sent it.
    pub endpoint: EndpointInstance,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Server it was sent to.
    pub server: SocketAddr,
    /// Transport.
    pub transport: Transport,
    /// As in [`Forward`].
    pub identities: Identities,
    /// As in [`Forward`].
    pub policy_check: Duration,
    /// Since it was sent on.
    pub waited: Duration,
}
