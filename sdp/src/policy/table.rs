//! The DNS rules of all endpoints, compiled: an immutable snapshot that is swapped whole.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use shared_maps::{EndpointId, IdentityId};

use super::{
    rule::{EndpointRules, RulesOf, Transport},
    verdict::{DenyReason, Verdict},
};

/// A query, as policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Who asks.
    pub endpoint: EndpointId,
    /// Server port.
    pub port: u16,
    /// Transport.
    pub transport: Transport,
    /// Identity of the server.
    pub server: IdentityId,
    /// Address of the server.
    pub address: IpAddr,
    /// Name: lower case, final dot, presentation form ([`crate::name::Fqdn`]).
    pub name: &'a str,
}

/// Compiled rules of all endpoints.
#[derive(Debug, Default)]
pub struct PolicyTable {
    endpoints: HashMap<EndpointId, Arc<EndpointRules>>,
}

impl PolicyTable {
    /// What policy says of a query.
    pub fn check(&self, question: &Question<'_>) -> Verdict {
        let _ = question;
        Verdict::Deny(DenyReason::NoRules)
    }

    /// Number of endpoints that have rules.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Whether no endpoint has rules.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// Rules of one endpoint, rendered back from their compiled form (slow: for people).
    pub fn describe(&self, endpoint: EndpointId) -> Option<EndpointRules> {
        self.endpoints.get(&endpoint).map(|r| (**r).clone())
    }

    /// Endpoints that have rules, ascending.
    pub fn endpoints(&self) -> Vec<EndpointId> {
        let mut ids: Vec<_> = self.endpoints.keys().copied().collect();
        ids.sort_unstable();
        ids
    }
}

/// A rule that could not be compiled. It allows nothing; the endpoint's other rules hold.
#[derive(Debug, thiserror::Error)]
#[error("endpoint {endpoint}, selector {selector:?}: {why}")]
pub struct RuleError {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Selector of the rule.
    pub selector: String,
    /// What is wrong with it.
    pub why: String,
}

/// Where the current [`PolicyTable`] is found, and the only way to change it.
#[derive(Debug, Default)]
pub struct PolicyHandle {
    current: ArcSwap<PolicyTable>,
    writer: Mutex<()>,
}

impl PolicyHandle {
    /// Without any rules: everything is denied.
    pub fn new() -> Self {
        Self::default()
    }

    /// The table in force. Cheap; hold it for one batch, not longer.
    pub fn load(&self) -> Guard<Arc<PolicyTable>> {
        self.current.load()
    }

    /// Puts exactly these rules in force. Says which rules could not be compiled.
    pub fn replace_all(&self, all: Vec<RulesOf>) -> Vec<RuleError> {
        let _writer = self.writer.lock();
        let endpoints = all
            .into_iter()
            .map(|r| (r.endpoint, Arc::new(r.rules)))
            .collect();
        self.current.store(Arc::new(PolicyTable { endpoints }));
        Vec::new()
    }

    /// Replaces the rules of the endpoints in `changed`, and drops those of the
    /// endpoints in `removed`; all others stay.
    pub fn apply(&self, changed: Vec<RulesOf>, removed: &[EndpointId]) -> Vec<RuleError> {
        let _writer = self.writer.lock();
        let mut endpoints = self.current.load().endpoints.clone();
        for id in removed {
            endpoints.remove(id);
        }
        endpoints.extend(changed.into_iter().map(|r| (r.endpoint, Arc::new(r.rules))));
        self.current.store(Arc::new(PolicyTable { endpoints }));
        Vec::new()
    }
}
