//! Queries of one connection that wait: for their server, then for the agent.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::upstream::Behalf;
use crate::{
    mapping::EndpointInstance,
    policy::rule::Transport,
    proxy::{Asked, Identities},
    query_log::Entry,
    wire::{answer, reply::Kept, transfer::Transfer},
};

/// A query in flight.
pub(super) struct Flight {
    pub(super) kept: Kept,
    /// As sent upstream: kept to be sent again if the server closes the connection.
    pub(super) message: Vec<u8>,
    pub(super) question: Vec<u8>,
    pub(super) endpoint: EndpointInstance,
    pub(super) behalf: Behalf,
    pub(super) sent_at: Instant,
    pub(super) identities: Identities,
    pub(super) policy_check: Duration,
    pub(super) resent: bool,
    /// For the query log.
    pub(super) logged: Option<Box<Entry>>,
    /// If its answer is many messages.
    pub(super) transfer: Option<Transfer>,
}

impl Flight {
    pub(super) fn is_answered_by(&self, message: &[u8]) -> bool {
        answer::answers_in_any_case(message, &self.question)
            || self.transfer.is_some_and(|t| t.continues(message))
    }

    pub(super) fn asked(
        &self,
        (client, server): (SocketAddr, SocketAddr),
        now: Instant,
    ) -> Asked<'_> {
        Asked {
            question: &self.question,
            endpoint: self.endpoint,
            client,
            server,
            transport: Transport::Tcp,
            identities: self.identities,
            policy_check: self.policy_check,
            waited: now.duration_since(self.sent_at),
        }
    }

    /// Whether the client has got part of its answer.
    pub(super) fn has_begun(&self) -> bool {
        self.transfer.is_some_and(Transfer::has_begun)
    }
}

/// An answer that waits for the agent.
pub(super) struct Held {
    pub(super) message: Vec<u8>,
    /// For the query log.
    pub(super) logged: Option<Box<Entry>>,
    /// When the query came.
    pub(super) asked: Instant,
    /// When the answer came.
    pub(super) since: Instant,
}
