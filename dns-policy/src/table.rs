//! The DNS rules of all endpoints, compiled: an immutable snapshot that is swapped whole.
//!
//! A snapshot shares everything that did not change with the previous snapshot: rules of one
//! endpoint are replaced without touching the rules of the others.

mod compile;
mod matcher;
mod names;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use arc_swap::{ArcSwap, Guard};
use ipnet::IpNet;
use parking_lot::Mutex;
use shared_maps::{EndpointId, IdentityId};

use self::{
    compile::Compiler,
    matcher::Matcher,
    names::{NameId, Names},
};
use crate::{
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
    verdict::{DenyReason, Verdict},
};

/// A query, as policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Endpoint that sent the query.
    pub endpoint: EndpointId,
    /// Port that the query was sent to.
    pub port: u16,
    /// Transport that the client used.
    pub transport: Transport,
    /// Identity of the server's address.
    pub server: IdentityId,
    /// Address of the server. Only restored rules with prefixes compare it.
    pub address: IpAddr,
    /// Name: lower case, final dot, presentation form ([`crate::name::Fqdn`]).
    pub name: &'a str,
}

/// Compiled rules of all endpoints.
#[derive(Clone, Debug, Default)]
pub struct PolicyTable {
    names: Names,
    endpoints: Endpoints,
}

impl PolicyTable {
    /// What policy says of a query.
    pub fn check(&self, question: &Question<'_>) -> Verdict {
        let Some(compiled) = self.endpoints.get(question.endpoint) else {
            return Verdict::Deny(DenyReason::NoRules);
        };
        let mut reason = DenyReason::NoRulesForPort;
        let at_port = compiled
            .ports
            .iter()
            .filter(|p| p.port == question.port && p.transport == question.transport);
        for port in at_port {
            if reason == DenyReason::NoRulesForPort {
                reason = DenyReason::ServerNotSelected;
            }
            for rule in &port.rules {
                if !rule.servers.select(question.server, question.address) {
                    continue;
                }
                if rule.names.matches(&self.names, question.name) {
                    return Verdict::Allow;
                }
                reason = DenyReason::NameNotAllowed;
            }
        }
        Verdict::Deny(reason)
    }

    /// Whether the endpoint has rules.
    pub fn has_rules(&self, endpoint: EndpointId) -> bool {
        self.endpoints.get(endpoint).is_some()
    }

    /// The rule that allows a query: its selector, and the name or pattern. For people.
    pub fn matched(&self, question: &Question<'_>) -> Option<(String, String)> {
        let ports = self.endpoints.get(question.endpoint)?.ports.iter();
        ports
            .filter(|p| p.port == question.port && p.transport == question.transport)
            .flat_map(|port| &port.rules)
            .filter(|rule| rule.servers.select(question.server, question.address))
            .find_map(|rule| {
                let pattern = rule.names.which(&self.names, question.name)?;
                Some((rule.selector.to_string(), pattern))
            })
    }

    /// Number of endpoints that have rules.
    pub fn len(&self) -> usize {
        self.endpoints.len
    }

    /// Whether no endpoint has rules.
    pub fn is_empty(&self) -> bool {
        self.endpoints.len == 0
    }

    /// Endpoints that have rules, ascending.
    pub fn endpoints(&self) -> Vec<EndpointId> {
        self.endpoints.ids()
    }

    /// Rules of one endpoint, rendered back from their compiled form: they have the same meaning as
    /// the given rules. This reads all names of the table, so it is for people and not for queries.
    pub fn describe(&self, endpoint: EndpointId) -> Option<EndpointRules> {
        let compiled = self.endpoints.get(endpoint)?;
        let text: BTreeMap<NameId, &Arc<str>> = self.names.iter().map(|(n, id)| (id, n)).collect();
        let ports = compiled.ports.iter().map(|port| PortRules {
            port: port.port,
            transport: port.transport,
            rules: port
                .rules
                .iter()
                .map(|rule| SelectorRule {
                    selector: rule.selector.to_string(),
                    servers: rule.servers.describe(),
                    names: match rule.is_plain {
                        true => NameRules::All,
                        false => describe_names(&rule.names, &text),
                    },
                })
                .collect(),
        });
        Some(EndpointRules {
            ports: ports.collect(),
        })
    }
}

fn describe_names(matcher: &Matcher, text: &BTreeMap<NameId, &Arc<str>>) -> NameRules {
    if matcher.all {
        return NameRules::every_name();
    }
    if let Some(expression) = matcher.expressions.first() {
        return NameRules::Regex(expression.text.clone());
    }
    let named = |ids: &[NameId]| -> Vec<&Arc<str>> {
        ids.iter().filter_map(|id| text.get(id).copied()).collect()
    };
    let mut rules: Vec<NameRule> = Vec::new();
    rules.extend(
        named(&matcher.exact)
            .iter()
            .map(|n| NameRule::Name(n.to_string())),
    );
    rules.extend(
        named(&matcher.one_label)
            .iter()
            .map(|n| NameRule::Pattern(format!("*.{n}"))),
    );
    rules.extend(
        named(&matcher.labels)
            .iter()
            .map(|n| NameRule::Pattern(format!("**.{n}"))),
    );
    rules.extend(
        matcher
            .globs
            .iter()
            .map(|g| NameRule::Pattern(g.to_string())),
    );
    rules.sort();
    NameRules::Names(rules)
}

/// Compiled rules of one endpoint.
#[derive(Debug)]
struct Compiled {
    ports: Box<[PortEntry]>,
}

/// Compiled rules for one server port and transport.
#[derive(Debug)]
struct PortEntry {
    port: u16,
    transport: Transport,
    rules: Box<[CompiledRule]>,
}

/// The compiled form of a [`SelectorRule`].
#[derive(Debug)]
struct CompiledRule {
    selector: Box<str>,
    servers: CompiledServers,
    names: Arc<Matcher>,
    /// Whether the names were [`NameRules::All`], which differs from a pattern for every name.
    is_plain: bool,
}

/// Servers of a compiled rule.
#[derive(Debug)]
enum CompiledServers {
    Any,
    /// In ascending order, for binary search.
    Identities(Arc<[IdentityId]>),
    Prefixes(Box<[IpNet]>),
}

impl CompiledServers {
    fn select(&self, identity: IdentityId, address: IpAddr) -> bool {
        match self {
            // A Service needs a rule that names it, because its port may differ from the port of
            // its backends.
            Self::Any => !identity.is_service(),
            Self::Identities(ids) => ids.binary_search(&identity).is_ok(),
            Self::Prefixes(prefixes) => prefixes.iter().any(|p| p.contains(&address)),
        }
    }

    fn describe(&self) -> Servers {
        match self {
            Self::Any => Servers::Any,
            Self::Identities(ids) => Servers::Identities(ids.iter().copied().collect()),
            Self::Prefixes(prefixes) => Servers::Prefixes(prefixes.to_vec()),
        }
    }
}

/// Endpoints by number, in 256 blocks of 256 that snapshots share.
#[derive(Clone, Debug, Default)]
struct Endpoints {
    blocks: BTreeMap<u8, Arc<Block>>,
    len: usize,
}

type Block = BTreeMap<u8, Arc<Compiled>>;

impl Endpoints {
    fn get(&self, id: EndpointId) -> Option<&Arc<Compiled>> {
        let [block, at] = id.0.to_be_bytes();
        self.blocks.get(&block)?.get(&at)
    }

    fn put(&mut self, id: EndpointId, compiled: Arc<Compiled>) -> Option<Arc<Compiled>> {
        let [block, at] = id.0.to_be_bytes();
        let old = Arc::make_mut(self.blocks.entry(block).or_default()).insert(at, compiled);
        self.len += usize::from(old.is_none());
        old
    }

    fn take(&mut self, id: EndpointId) -> Option<Arc<Compiled>> {
        let [block, at] = id.0.to_be_bytes();
        let old = Arc::make_mut(self.blocks.get_mut(&block)?).remove(&at)?;
        self.len -= 1;
        Some(old)
    }

    fn ids(&self) -> Vec<EndpointId> {
        self.blocks
            .iter()
            .flat_map(|(high, block)| {
                block
                    .keys()
                    .map(|low| EndpointId(u16::from_be_bytes([*high, *low])))
            })
            .collect()
    }
}

/// A rule that could not be compiled. It allows nothing; the endpoint's other rules apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {endpoint}, selector {selector:?}: {why}")]
pub struct RuleError {
    /// Endpoint that the rule applies to.
    pub endpoint: EndpointId,
    /// Selector of the rule, as the policy has it.
    pub selector: String,
    /// What is wrong with it.
    pub why: String,
}

/// Where the current [`PolicyTable`] is found, and the only way to change it.
#[derive(Debug, Default)]
pub struct PolicyHandle {
    current: ArcSwap<PolicyTable>,
    writer: Mutex<Compiler>,
}

impl PolicyHandle {
    /// A handle without any rules: everything is denied.
    pub fn new() -> Self {
        Self::default()
    }

    /// The table in force. Loading it is cheap. Hold it for one batch of queries at most.
    pub fn load(&self) -> Guard<Arc<PolicyTable>> {
        self.current.load()
    }

    /// Puts exactly these rules in force. Says which rules could not be compiled.
    pub fn replace_all(&self, all: &[RulesOf]) -> Vec<RuleError> {
        self.swap(all, |table| {
            let kept: HashSet<_> = all.iter().map(|of| of.endpoint).collect();
            table
                .endpoints()
                .into_iter()
                .filter(|id| !kept.contains(id))
                .collect()
        })
    }

    /// Replaces the rules of the endpoints in `changed`, and drops the rules of the endpoints in
    /// `removed`. All other rules stay.
    pub fn apply(&self, changed: &[RulesOf], removed: &[EndpointId]) -> Vec<RuleError> {
        self.swap(changed, |_| removed.to_vec())
    }

    fn swap(
        &self,
        changed: &[RulesOf],
        removed: impl FnOnce(&PolicyTable) -> Vec<EndpointId>,
    ) -> Vec<RuleError> {
        let mut compiler = self.writer.lock();
        let mut table = PolicyTable::clone(&self.current.load());
        let mut errors = Vec::new();
        let mut replaced = Vec::new();
        for id in removed(&table) {
            replaced.extend(table.endpoints.take(id));
        }
        for of in changed {
            let compiled = Arc::new(compiler.compile(of, &mut errors));
            replaced.extend(table.endpoints.put(of.endpoint, compiled));
        }
        // The old rules are released after the new rules are compiled, so that what both have in
        // common is not built twice.
        for old in &replaced {
            compiler.release(old);
        }
        table.names = compiler.names();
        self.current.store(Arc::new(table));
        errors
    }

    #[cfg(test)]
    fn sizes(&self) -> (usize, usize, usize) {
        self.writer.lock().sizes()
    }
}
