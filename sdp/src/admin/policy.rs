//! `policy`: the DNS rules in force.

use std::fmt::Write as _;

use dns_policy::{
    endpoint_name::NoEndpoint,
    rule::{NameRules, SelectorRule, Servers},
};
use serde::{Deserialize, Serialize};
use shared_maps::EndpointId;

use super::{endpoints, status::rules_text};
use crate::{link::state::RulesOrigin, shared_state::Shared};

/// Filter for the rules that are shown.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PolicyQuestion {
    /// Endpoint whose rules are shown. `None`: the rules of every endpoint.
    pub endpoint: Option<String>,
}

/// DNS rules in force, with their source.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PolicyAnswer {
    pub rules: RulesOrigin,
    /// Endpoints with their rules, in ascending order of number.
    pub endpoints: Vec<EndpointView>,
}

/// DNS rules of one endpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EndpointView {
    pub endpoint: u16,
    /// Rules of the endpoint. Queries to a port and transport without an entry are denied.
    pub ports: Vec<PortView>,
}

/// Rules for one port and protocol of servers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PortView {
    pub port: u16,
    /// `udp` or `tcp`.
    pub protocol: String,
    /// A query is allowed if any of these rules allows it.
    pub rules: Vec<RuleView>,
}

/// One DNS rule in the words of `policy` and `explain`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RuleView {
    /// The selector in the words of the policy.
    pub selector: String,
    /// Servers that the rule is about, in words.
    pub servers: String,
    /// Names that the rule allows, in words.
    pub names: Vec<String>,
}

impl RuleView {
    /// The view of a rule.
    pub(crate) fn of(rule: &SelectorRule) -> Self {
        Self {
            selector: rule.selector.clone(),
            servers: match &rule.servers {
                Servers::Any => "any".to_owned(),
                Servers::Identities(ids) if ids.is_empty() => "none selected now".to_owned(),
                Servers::Identities(ids) => format!("identities {}", list(ids)),
                Servers::Prefixes(prefixes) => list(prefixes),
            },
            names: match &rule.names {
                NameRules::All => vec!["every name".to_owned()],
                NameRules::Regex(text) => vec![format!("expression {text}")],
                NameRules::Names(names) => {
                    names.iter().map(|name| name.text().to_owned()).collect()
                }
            },
        }
    }
}

pub(super) fn answer(
    shared: &Shared,
    question: &PolicyQuestion,
) -> Result<PolicyAnswer, NoEndpoint> {
    let table = shared.policy.load();
    let ids = match &question.endpoint {
        Some(text) => vec![endpoints::endpoint(shared, text)?.0],
        None => table.endpoints(),
    };
    let view = |id: EndpointId| {
        let ports = table.describe(id).unwrap_or_default().ports;
        let ports = ports.iter().map(|port| PortView {
            port: port.port,
            protocol: port.transport.as_str().to_owned(),
            rules: port.rules.iter().map(RuleView::of).collect(),
        });
        EndpointView {
            endpoint: id.0,
            ports: ports.collect(),
        }
    };
    Ok(PolicyAnswer {
        rules: shared.agent.link.status().rules,
        endpoints: ids.into_iter().map(view).collect(),
    })
}

impl PolicyAnswer {
    /// The rules as lines for a terminal.
    pub(crate) fn text(&self) -> String {
        let mut out = format!("rules: {}\n", rules_text(&self.rules));
        if self.endpoints.is_empty() {
            out.push_str("no endpoint has DNS rules: every query is refused\n");
        }
        for endpoint in &self.endpoints {
            let _ = writeln!(out, "endpoint {}", endpoint.endpoint);
            if endpoint.ports.is_empty() {
                out.push_str("  no DNS rules: no policy sends its queries to the proxy\n");
            }
            for port in &endpoint.ports {
                let _ = writeln!(out, "  {}/{}", port.port, port.protocol);
                for rule in &port.rules {
                    let _ = writeln!(
                        out,
                        "    {} (servers: {}): {}",
                        rule.selector,
                        rule.servers,
                        rule.names.join(", ")
                    );
                }
            }
        }
        out
    }
}

fn list<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    items
        .into_iter()
        .map(|item| item.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}
