//! Turns rules into matchers. Equal matchers are shared.

use std::{collections::HashMap, sync::Arc};

use shared_maps::IdentityId;

use super::{
    Compiled, CompiledRule, CompiledServers, PortEntry, RuleError,
    matcher::{Expression, Matcher},
    names::{Dictionary, Names},
};
use crate::{
    pattern::{Pattern, PatternError, restored},
    rule::{NameRule, NameRules, RulesOf, Servers},
};

/// Everything compiled so far, with the number of its uses.
#[derive(Debug, Default)]
pub(super) struct Compiler {
    names: Dictionary,
    matchers: HashMap<Arc<Matcher>, usize>,
    servers: HashMap<Arc<[IdentityId]>, usize>,
}

impl Compiler {
    /// Snapshot of the names that the matchers refer to.
    pub(super) fn names(&self) -> Names {
        self.names.snapshot()
    }

    /// Compiles the rules of one endpoint. A rule that cannot be compiled allows nothing.
    pub(super) fn compile(&mut self, of: &RulesOf, errors: &mut Vec<RuleError>) -> Compiled {
        let mut ports: Vec<PortEntry> = Vec::new();
        for port in &of.rules.ports {
            let rules = port.rules.iter().map(|rule| CompiledRule {
                selector: rule.selector.as_str().into(),
                servers: self.servers(&rule.servers),
                is_plain: !rule.has_names(),
                names: self.matcher(&rule.names, |why| {
                    errors.push(RuleError {
                        endpoint: of.endpoint,
                        selector: rule.selector.clone(),
                        why,
                    });
                }),
            });
            ports.push(PortEntry {
                port: port.port,
                transport: port.transport,
                rules: rules.collect(),
            });
        }
        Compiled {
            ports: ports.into(),
        }
    }

    /// Releases the result of [`Self::compile`].
    pub(super) fn release(&mut self, compiled: &Compiled) {
        for rule in compiled.ports.iter().flat_map(|p| &p.rules) {
            if let CompiledServers::Identities(ids) = &rule.servers {
                drop_use(&mut self.servers, ids);
            }
            if drop_use(&mut self.matchers, &rule.names) {
                let matcher = &rule.names;
                for id in matcher
                    .exact
                    .iter()
                    .chain(&matcher.one_label)
                    .chain(&matcher.labels)
                {
                    self.names.release(*id);
                }
            }
        }
    }

    fn servers(&mut self, servers: &Servers) -> CompiledServers {
        match servers {
            Servers::Any => CompiledServers::Any,
            Servers::Prefixes(prefixes) => CompiledServers::Prefixes(prefixes.as_slice().into()),
            Servers::Identities(ids) => {
                let ids: Arc<[IdentityId]> = ids.iter().copied().collect();
                CompiledServers::Identities(add_use(&mut self.servers, ids).0)
            }
        }
    }

    fn matcher(&mut self, names: &NameRules, mut error: impl FnMut(String)) -> Arc<Matcher> {
        let mut matcher = Matcher::default();
        match names {
            NameRules::All => matcher.all = true,
            NameRules::Regex(text) => match restored::names_of(text) {
                NameRules::Regex(text) => match restored::compile(&text) {
                    Ok(regex) => matcher.expressions = [Expression { text, regex }].into(),
                    Err(e) => error(format!("regular expression {text:?}: {e}")),
                },
                known => return self.matcher(&known, error),
            },
            NameRules::Names(rules) => matcher = self.patterns(rules, error),
        }
        let (shared, first) = add_use(&mut self.matchers, Arc::new(matcher));
        if !first {
            // The uses of the names in the shared matcher are already counted.
            let ids = shared
                .exact
                .iter()
                .chain(&shared.one_label)
                .chain(&shared.labels);
            for id in ids {
                self.names.release(*id);
            }
        }
        shared
    }

    fn patterns(&mut self, rules: &[NameRule], mut error: impl FnMut(String)) -> Matcher {
        let mut patterns = Vec::with_capacity(rules.len());
        for rule in rules {
            match Pattern::parse(rule) {
                Ok(pattern) => patterns.push(pattern),
                // A rule without text contributes nothing.
                Err(PatternError::Empty { .. }) => {}
                Err(e) => error(e.to_string()),
            }
        }
        if patterns.contains(&Pattern::All) {
            return Matcher {
                all: true,
                ..Matcher::default()
            };
        }
        patterns.sort_unstable();
        patterns.dedup();
        let (mut exact, mut one_label, mut labels, mut globs) = (vec![], vec![], vec![], vec![]);
        for pattern in patterns {
            match pattern {
                Pattern::All => {}
                Pattern::Exact(name) => exact.push(self.names.take(name.as_str())),
                Pattern::OneLabel(suffix) => one_label.push(self.names.take(suffix.as_str())),
                Pattern::Labels(suffix) => labels.push(self.names.take(suffix.as_str())),
                Pattern::Glob(glob) => globs.push(Arc::new(glob)),
            }
        }
        for ids in [&mut exact, &mut one_label, &mut labels] {
            ids.sort_unstable();
        }
        Matcher {
            all: false,
            exact: exact.into(),
            one_label: one_label.into(),
            labels: labels.into(),
            globs: globs.into(),
            expressions: Box::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, usize, usize) {
        (self.names.len(), self.matchers.len(), self.servers.len())
    }
}

/// The shared value equal to `value`, and whether it is new.
fn add_use<T: ?Sized + Eq + std::hash::Hash>(
    uses: &mut HashMap<Arc<T>, usize>,
    value: Arc<T>,
) -> (Arc<T>, bool) {
    if let Some((shared, count)) = uses.get_key_value(&value).map(|(k, c)| (Arc::clone(k), *c)) {
        uses.insert(Arc::clone(&shared), count + 1);
        return (shared, false);
    }
    uses.insert(Arc::clone(&value), 1);
    (value, true)
}

/// Removes one use. Returns whether it was the last one.
fn drop_use<T: ?Sized + Eq + std::hash::Hash>(
    uses: &mut HashMap<Arc<T>, usize>,
    value: &Arc<T>,
) -> bool {
    match uses.get_mut(value) {
        Some(count) if *count > 1 => {
            *count -= 1;
            false
        }
        Some(_) => {
            uses.remove(value);
            true
        }
        None => false,
    }
}
