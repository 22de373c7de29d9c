//! `explain`: from a client's address to the verdict, with the very code that
//! judges queries.

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr},
};

use dns_policy::{
    endpoint_name::NoEndpoint,
    name::Fqdn,
    rule::{EndpointRules, PortRules, RulesOf, SelectorRule, Servers, Transport},
    table::{PolicyHandle, Question},
    verdict::{DenyReason, Verdict},
};
use serde::{Deserialize, Serialize};
use shared_maps::{EndpointId, IdentityId};

use super::{endpoints, policy::RuleView, status::rules_text};
use crate::{
    link::state::RulesOrigin,
    resolve::{QueryClient, Resolver},
    shared_state::Shared,
};

/// Why a query is not judged.
const WITHOUT_PROXY: &str = "no DNS rule is about this server, and another rule lets queries to it pass \
                             without the proxy: they are not judged, and nothing is learned from the \
                             answers";

/// Query about which a user requests an explanation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ExplainQuestion {
    /// An endpoint, in any form that people use, or any address.
    pub client: String,
    pub name: String,
    /// Address of the server. `None`: each rule is tried with a server that it selects.
    pub server: Option<IpAddr>,
    pub port: u16,
    /// Whether the query comes over TCP instead of UDP.
    pub tcp: bool,
}

/// The answer: every step from the client to the verdict.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Explanation {
    pub client: IpAddr,
    /// Kind of the client: `endpoint`, `host` or `unknown`.
    pub who: String,
    /// Number of the client's endpoint, if it has one.
    pub endpoint: Option<u16>,
    /// Identity of the client's endpoint, if it has one.
    pub identity: Option<u32>,
    /// Host-side interface of the client's endpoint, if it has one.
    pub ifindex: Option<u32>,
    /// Name as it is judged.
    pub name: String,
    /// Address of the server; `None` if the question names no server.
    pub server: Option<IpAddr>,
    /// Identity of the server; `None` if the question names no server.
    pub server_identity: Option<u32>,
    pub port: u16,
    /// `udp` or `tcp`.
    pub protocol: String,
    pub rules_from: RulesOrigin,
    /// The endpoint's rules for this port, each judged alone.
    pub rules: Vec<JudgedRule>,
    /// `allow`, `deny`, or `direct`: the query passes without the proxy.
    pub verdict: String,
    pub reason: String,
}

/// A rule and whether it applies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JudgedRule {
    #[serde(flatten)]
    pub rule: RuleView,
    /// Whether the rule is about the server; `None` if no server was given.
    pub server_selected: Option<bool>,
    /// Whether the rule allows the name; `None` if it is not about the server.
    pub name_allowed: Option<bool>,
    /// Whether queries to its servers pass without the proxy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_proxy: bool,
}

pub(super) fn answer(
    shared: &Shared,
    question: &ExplainQuestion,
) -> Result<Explanation, Unexplained> {
    let client = address(shared, &question.client)?;
    Ok(explain(shared, client, question))
}

/// Why there is no explanation.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unexplained {
    /// The question names no known endpoint.
    #[error(transparent)]
    NoEndpoint(#[from] NoEndpoint),
    /// The endpoint has no known address, and the client of a query is found by its address.
    #[error(
        "endpoint {0} has no address that this proxy knows: give the address from which it sends queries"
    )]
    NoAddress(u16),
}

/// The address of the client. It need not be the address of an endpoint.
fn address(shared: &Shared, text: &str) -> Result<IpAddr, Unexplained> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let (id, named) = endpoints::endpoint(shared, text)?;
    let address = named.addresses().into_iter().next();
    address.ok_or(Unexplained::NoAddress(id.0))
}

fn explain(shared: &Shared, client: IpAddr, question: &ExplainQuestion) -> Explanation {
    let name = Fqdn::normalise(&question.name);
    let transport = if question.tcp {
        Transport::Tcp
    } else {
        Transport::Udp
    };
    let mut explanation = Explanation::of(shared, client, question, &name, transport);
    let Some(id) = explanation.identify(shared) else {
        return explanation;
    };
    let asked = |server: IdentityId, address: IpAddr| Question {
        endpoint: id,
        port: question.port,
        transport,
        server,
        address,
        name: name.as_str(),
    };
    let table = shared.policy.load();
    let rules = table.describe(id).unwrap_or_default();
    let port = rules_at(rules, question.port, transport);
    let server = question
        .server
        .map(|address| (shared.maps.server(address), address));
    explanation.rules = judged(&port, server, &asked);
    if let Some((identity, address)) = server
        && passes_without_proxy(&port, identity, address)
    {
        explanation.verdict = "direct".to_owned();
        explanation.reason = WITHOUT_PROXY.to_owned();
        return explanation;
    }
    let is_allowed = |rule: &JudgedRule| rule.name_allowed == Some(true);
    let verdict = match server {
        Some((identity, address)) => table.check(&asked(identity, address)),
        None if explanation.rules.iter().any(is_allowed) => Verdict::Allow,
        // Every server gets the same verdict, so any of them gives the reason.
        None => {
            let (identity, address) = any_server(&port);
            table.check(&asked(identity, address))
        }
    };
    (explanation.verdict, explanation.reason) = words(verdict, server.is_some());
    explanation
}

/// The rules for one port and transport, as one list.
fn rules_at(rules: EndpointRules, port: u16, transport: Transport) -> PortRules {
    let ports = rules.ports.into_iter();
    let at_port = ports.filter(|of| of.port == port && of.transport == transport);
    PortRules {
        port,
        transport,
        rules: at_port.flat_map(|of| of.rules).collect(),
    }
}

/// A server for which queries come to the proxy; an unknown server if no rule names a server.
fn any_server(port: &PortRules) -> (IdentityId, IpAddr) {
    let rule = port.at_proxy().into_iter().flatten().next();
    let unknown = (IdentityId::UNKNOWN, IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    rule.map_or(unknown, |rule| a_server_of(&rule))
}

/// Judges each rule alone: for the given server, or for one of the rule's servers that are queried
/// through the proxy.
fn judged<'a>(
    port: &PortRules,
    server: Option<(IdentityId, IpAddr)>,
    asked: &dyn Fn(IdentityId, IpAddr) -> Question<'a>,
) -> Vec<JudgedRule> {
    let rules = port.rules.iter().zip(port.at_proxy());
    let judged = rules.map(|(rule, at_proxy)| match (server, at_proxy) {
        (Some((identity, address)), _) => {
            let mut judged = judge(rule, &asked(identity, address), true);
            judged.without_proxy = judged.server_selected == Some(true)
                && passes_without_proxy(port, identity, address);
            judged
        }
        (None, Some(kept)) => {
            let (identity, address) = a_server_of(&kept);
            judge(rule, &asked(identity, address), false)
        }
        (None, None) => JudgedRule {
            rule: RuleView::of(rule),
            server_selected: None,
            name_allowed: None,
            without_proxy: true,
        },
    });
    judged.collect()
}

/// Whether a rule lets queries to a server pass, and no rule sends them to the proxy.
fn passes_without_proxy(port: &PortRules, identity: IdentityId, address: IpAddr) -> bool {
    let mut rules = port.rules.iter();
    !port.sends_to_proxy(identity, address)
        && rules.any(|rule| rule.servers.select(identity, address))
}

/// The verdict of this rule if it were the only one.
fn judge(rule: &SelectorRule, question: &Question<'_>, server_given: bool) -> JudgedRule {
    let alone = PolicyHandle::new();
    let port = PortRules {
        port: question.port,
        transport: question.transport,
        rules: vec![rule.clone()],
    };
    let endpoint: EndpointId = question.endpoint;
    alone.replace_all(&[RulesOf {
        endpoint,
        rules: EndpointRules { ports: vec![port] },
    }]);
    let verdict = alone.load().check(question);
    let selected = verdict != Verdict::Deny(DenyReason::ServerNotSelected);
    JudgedRule {
        rule: RuleView::of(rule),
        server_selected: server_given.then_some(selected),
        name_allowed: selected.then_some(verdict == Verdict::Allow),
        without_proxy: false,
    }
}

fn a_server_of(rule: &SelectorRule) -> (IdentityId, IpAddr) {
    let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    match &rule.servers {
        Servers::Any => (IdentityId::UNKNOWN, nowhere),
        Servers::Identities(ids) => (ids.first().copied().unwrap_or(IdentityId::UNKNOWN), nowhere),
        Servers::Prefixes(prefixes) => (
            IdentityId::UNKNOWN,
            prefixes.first().map_or(nowhere, ipnet::IpNet::addr),
        ),
    }
}

fn words(verdict: Verdict, server_given: bool) -> (String, String) {
    let (verdict, reason) = match verdict {
        Verdict::Allow if server_given => {
            ("allow", "a rule is about the server and allows the name")
        }
        Verdict::Allow => (
            "allow",
            "a rule allows the name, at the servers it is about",
        ),
        Verdict::Deny(DenyReason::NoRules) => (
            "deny",
            "the endpoint has no DNS rules: no policy sends its queries here",
        ),
        Verdict::Deny(DenyReason::NoRulesForPort) => (
            "deny",
            "the endpoint has no DNS rules for this port and protocol",
        ),
        Verdict::Deny(DenyReason::ServerNotSelected) => ("deny", "no rule is about this server"),
        Verdict::Deny(DenyReason::NameNotAllowed) => ("deny", "no rule allows the name"),
    };
    (verdict.to_owned(), reason.to_owned())
}

impl Explanation {
    /// An explanation that has the question but no verdict yet.
    fn of(
        shared: &Shared,
        client: IpAddr,
        question: &ExplainQuestion,
        name: &Fqdn,
        transport: Transport,
    ) -> Self {
        Self {
            client,
            who: String::new(),
            endpoint: None,
            identity: None,
            ifindex: None,
            name: name.as_str().to_owned(),
            server: question.server,
            server_identity: question.server.map(|server| shared.maps.server(server).0),
            port: question.port,
            protocol: transport.as_str().to_owned(),
            rules_from: shared.agent.link.status().rules,
            rules: Vec::new(),
            verdict: "deny".to_owned(),
            reason: String::new(),
        }
    }

    /// Notes who the client is. If it is not an endpoint, notes the reason and returns `None`.
    fn identify(&mut self, shared: &Shared) -> Option<EndpointId> {
        match shared.maps.client(self.client) {
            QueryClient::Endpoint {
                id,
                identity,
                ifindex,
            } => {
                self.who = "endpoint".to_owned();
                self.endpoint = Some(id.0);
                self.identity = Some(identity.0);
                self.ifindex = Some(ifindex);
                Some(id)
            }
            QueryClient::Host => {
                self.who = "host".to_owned();
                self.reason = "the address is the node's own: it has no DNS rules here".into();
                None
            }
            QueryClient::Unknown => {
                self.who = "unknown".to_owned();
                self.reason = shared.maps.problem().unwrap_or_else(|| {
                    "no endpoint of this node has the address (cilium_lxc has no entry)".into()
                });
                None
            }
        }
    }

    /// Whether the query gets an answer.
    pub(crate) fn is_allowed(&self) -> bool {
        self.verdict != "deny"
    }

    /// The explanation as lines for a terminal.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let _ = match (self.endpoint, self.identity, self.ifindex) {
            (Some(id), Some(identity), Some(ifindex)) => writeln!(
                out,
                "client   {} is endpoint {id}, identity {identity}, interface {ifindex}",
                self.client
            ),
            _ => writeln!(out, "client   {} is {}", self.client, self.who),
        };
        let _ = match (self.server, self.server_identity) {
            (Some(server), Some(identity)) => writeln!(
                out,
                "server   {server} port {}/{} has identity {identity}",
                self.port, self.protocol
            ),
            _ => writeln!(
                out,
                "server   any server, port {}/{}",
                self.port, self.protocol
            ),
        };
        let _ = writeln!(out, "name     {}", self.name);
        let _ = writeln!(out, "rules    {}", rules_text(&self.rules_from));
        for judged in &self.rules {
            let effect = match (judged.server_selected, judged.name_allowed) {
                _ if judged.without_proxy => "queries pass without the proxy",
                (Some(false), _) | (_, None) => "not about this server",
                (_, Some(true)) => "allows it",
                (_, Some(false)) => "does not have the name",
            };
            let rule = &judged.rule;
            let _ = writeln!(
                out,
                "         {} (servers: {}): {} -> {effect}",
                rule.selector,
                rule.servers,
                rule.names.join(", ")
            );
        }
        let _ = writeln!(out, "verdict  {}: {}", self.verdict, self.reason);
        out
    }
}

#[cfg(test)]
mod tests {
    use dns_policy::rule::NameRules;

    use super::*;

    const DNS: IdentityId = IdentityId(300);
    const WEB: IdentityId = IdentityId(1 << 24);
    const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53));

    #[test]
    fn a_server_that_only_a_rule_without_names_is_about_is_not_judged_here() {
        let rule = |selector: &str, server, names| SelectorRule {
            selector: selector.to_owned(),
            servers: Servers::Identities([server].into()),
            names,
        };
        let port = PortRules {
            port: 53,
            transport: Transport::Udp,
            rules: vec![
                rule("dns", DNS, NameRules::every_name()),
                rule("fqdn:www.example.com", WEB, NameRules::All),
            ],
        };
        assert!(passes_without_proxy(&port, WEB, ADDRESS));
        assert!(!passes_without_proxy(&port, DNS, ADDRESS));
        let asked = |server, address| Question {
            endpoint: EndpointId(7),
            port: 53,
            transport: Transport::Udp,
            server,
            address,
            name: "www.example.net.",
        };
        let without = |server| -> Vec<(bool, Option<bool>)> {
            let judged = judged(&port, server, &asked).into_iter();
            judged
                .map(|rule| (rule.without_proxy, rule.name_allowed))
                .collect()
        };
        assert_eq!(without(None), [(false, Some(true)), (true, None)]);
        let at = Some((WEB, ADDRESS));
        assert_eq!(without(at), [(false, None), (true, Some(true))]);
        let at = Some((DNS, ADDRESS));
        assert_eq!(without(at), [(false, Some(true)), (false, None)]);
    }
}
