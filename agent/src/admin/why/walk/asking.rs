//! Hops from the endpoint to the addresses that it knows.

use std::net::{IpAddr, SocketAddr};

use agent_core::{
    core::{
        snapshot::NameView,
        why::{ClosedServers, MeantBy},
    },
    policy::{lint::firewalls::ALLOW_BEFORE, trace::RuleView},
};

use super::{STATUS, Walk, hop};
use crate::admin::model::{Hop, HopState};

const REFUSED: &str = "--tofqdns-refuse-prefix";

impl Walk<'_> {
    pub(super) fn endpoint(&self) -> Hop {
        let endpoint = &self.found.endpoint;
        let who = format!(
            "{} ({}), identity {}, {}",
            endpoint.id,
            endpoint.called(),
            endpoint.identity,
            endpoint.labels.join(",")
        );
        let hop = |state, text: String, remedy: &str| hop("endpoint", None, state, text, remedy);
        let lxc = match self.lxc {
            Ok(lxc) => lxc,
            Err(why) => return hop(HopState::Unknown, format!("{who}; {why}"), ""),
        };
        let wanted = (endpoint.id, endpoint.identity);
        if let Some((address, has)) = lxc.iter().find(|(_, has)| *has != Some(wanted)) {
            let has = match has {
                Some((id, identity)) => format!("as endpoint {id}, identity {identity}"),
                None => "not at all".to_owned(),
            };
            let text = format!("{who}; cilium_lxc has {address} {has}");
            return hop(HopState::Missing, text, STATUS);
        }
        if let Some(problem) = &endpoint.problem {
            let text = format!("{who}; its policy is not in force: {problem}");
            return hop(HopState::Missing, text, STATUS);
        }
        let text = format!("{who}; cilium_lxc agrees");
        hop(HopState::Found, text, "")
    }

    pub(super) fn policy(&self) -> Hop {
        let endpoint = &self.found.endpoint;
        let text = match self.restricted() {
            Some([]) => format!(
                "{} is restricted (enable-policy is {}); no document is about this endpoint",
                self.direction(),
                endpoint.enable_policy
            ),
            Some(documents) => format!(
                "{} is restricted; documents about this endpoint: {}",
                self.direction(),
                documents.join(", ")
            ),
            None if endpoint.enable_policy == "never" => {
                "enable-policy is never: nothing is restricted".to_owned()
            }
            None if endpoint.policies.is_empty() => {
                "no document is about this endpoint: nothing is restricted".to_owned()
            }
            None => format!(
                "no document restricts {}: what no rule denies passes",
                self.direction()
            ),
        };
        let behind = endpoint.policy_revision < self.found.wanted_revision;
        if behind {
            let text = format!(
                "{text}; its policy map realises revision {}, not {} yet",
                endpoint.policy_revision, self.found.wanted_revision
            );
            return hop("policy", None, HopState::Missing, text, STATUS);
        }
        hop("policy", None, HopState::Found, text, "")
    }

    /// Whether the endpoint may ask for the name; `None` where that does not matter.
    pub(super) fn dns(&self, name: &str) -> Option<Hop> {
        let hop = |state, text: String, remedy: &str| Some(hop("dns", None, state, text, remedy));
        let restricted = self.restricted().is_some();
        if self.found.endpoint.dns_rules.is_empty() {
            let text = "no DNS rule is about this endpoint: no answer of its queries is learned";
            let remedy = "add an egress rule to its DNS servers with toPorts.rules.dns";
            // Without a restriction, nothing needs to be learned.
            return if restricted && self.found.names.is_empty() {
                hop(HopState::Missing, text.to_owned(), remedy)
            } else {
                hop(HopState::Absent, text.to_owned(), "")
            };
        }
        let (servers, ports) = (self.dns_servers(), self.dns_ports());
        if !ports.is_empty() {
            let text = format!(
                "it may look up the name at {} ({})",
                servers.join(", "),
                ports.join(", ")
            );
            return hop(HopState::Found, text, "");
        }
        if let Some(closed) = self.found.dns.closed.first() {
            return Some(closed_servers(closed));
        }
        if servers.is_empty() {
            let mut text =
                format!("no DNS rule allows it to look up {name}: its queries are refused");
            if !self.found.dns.direct.is_empty() {
                text.push_str(&format!(
                    "; those to {} pass without the proxy, and nothing is learned from the answers",
                    self.found.dns.direct.join(", ")
                ));
            }
            let remedy = "add the name (matchName or matchPattern) to toPorts.rules.dns of the \
                          egress rule to its DNS servers";
            return hop(HopState::Missing, text, remedy);
        }
        let text = format!("it may look up the name at {}", servers.join(", "));
        let remedy = "is the DNS server's label or block right? `selectors list` shows the \
                      identities that each selector selects";
        hop(HopState::Missing, text, remedy)
    }

    /// Selectors of the DNS servers at which the endpoint may look up the name.
    fn dns_servers(&self) -> Vec<String> {
        let mut servers: Vec<String> = Vec::new();
        for rule in &self.found.dns.allowed {
            let no_server = rule.servers.as_ref().is_some_and(Vec::is_empty);
            let no_server = if no_server {
                ", which selects no server now"
            } else {
                ""
            };
            let server = format!("{}{no_server}", rule.selector);
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
        servers
    }

    /// Ports and protocols of the DNS rules that select a server now.
    fn dns_ports(&self) -> Vec<String> {
        let usable = self.found.dns.allowed.iter();
        let usable = usable.filter(|rule| rule.servers.as_ref().is_none_or(|ids| !ids.is_empty()));
        let mut ports: Vec<String> = usable
            .map(|rule| format!("{}/{}", rule.port, rule.protocol))
            .collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    /// Firewalls of the endpoint that leave a family open.
    pub(super) fn open_families(&self) -> impl Iterator<Item = Hop> {
        let open = self.found.open_families.iter();
        open.map(|text| hop("firewall", None, HopState::Absent, text.clone(), ""))
    }

    pub(super) fn selector(&self, name: &str) -> Hop {
        let by_name = &self.found.by_name;
        let found = by_name
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("; ");
        if by_name.is_empty() {
            let to_fqdns = "add the name (matchName or matchPattern) to toFQDNs of an egress rule";
            let (text, remedy) = match (self.found.has_tier, self.restricted()) {
                (false, _) => (
                    format!("no toFQDNs rule of its policy selects {name}"),
                    to_fqdns,
                ),
                (true, restricted) => (
                    format!("no toFQDNs and no dnsName of its policy selects {name}"),
                    match restricted {
                        Some(_) => to_fqdns,
                        None => {
                            "add a rule with its dnsName to the EgressFirewall, before the rule \
                             that denies other addresses"
                        }
                    },
                ),
            };
            return hop("selector", None, HopState::Missing, text, remedy);
        }
        hop("selector", None, HopState::Found, found, "")
    }

    pub(super) fn names(&self, name: Option<&str>) -> Hop {
        match name {
            Some(name) => self.addresses_of(name),
            None => self.names_of_address(),
        }
    }

    fn names_of_address(&self) -> Hop {
        let hop = |state, text: String, remedy: &str| hop("names", None, state, text, remedy);
        let mut names: Vec<String> = self
            .found
            .names
            .iter()
            .map(|view| {
                let name = view.name.trim_end_matches('.');
                format!("{name} (endpoint {})", view.endpoint)
            })
            .collect();
        names.dedup();
        if names.is_empty() {
            if let Some((why, remedy)) = self.untrusted() {
                return hop(HopState::Missing, why, &remedy);
            }
            let refused = self.found.addresses.first().and_then(|found| found.refused);
            let text = match refused {
                None => "no name of the address was learned".to_owned(),
                Some(prefix) => format!(
                    "no answer gives the address the label of a name: it is in {prefix} \
                     ({REFUSED}); a toCIDR rule opens it"
                ),
            };
            hop(HopState::Absent, text, "")
        } else {
            let text = format!("learned for {}", names.join(", "));
            match self.untrusted() {
                None => hop(HopState::Found, text, ""),
                Some((why, remedy)) => hop(HopState::Missing, format!("{text}; {why}"), &remedy),
            }
        }
    }

    /// Which answers do not count for the endpoint's rules, and what to do; `None` if all count.
    fn untrusted(&self) -> Option<(String, String)> {
        let all = &self.found.untrusted;
        let first = all.first()?;
        let texts = |servers: &[SocketAddr]| {
            let texts: Vec<String> = servers.iter().map(SocketAddr::to_string).collect();
            texts.join(", ")
        };
        let (of, servers) = match first.servers.as_slice() {
            [] => (
                "a DNS server that does not count".to_owned(),
                "that server".to_owned(),
            ),
            [one] => (format!("{one}, which does not count"), one.to_string()),
            several => (
                format!("{}, which do not count", texts(several)),
                texts(several),
            ),
        };
        let more = match all.len() - 1 {
            0 => String::new(),
            more => format!(", as did answers with {more} more addresses"),
        };
        let rules = match first.meant_by {
            MeantBy::Firewall => "EgressFirewalls",
            MeantBy::ToFqdns => "toFQDNs (--tofqdns-servers=trusted)",
        };
        let why = format!(
            "the answer with {} for {} came from {of} for {rules}{more}",
            first.address,
            first.name.as_str().trim_end_matches('.'),
        );
        let trusted = match self.found.trusted_dns.as_slice() {
            [] => "no server is trusted now".to_owned(),
            servers => format!("trusted now: {}", texts(servers)),
        };
        let remedy = format!(
            "let the pod ask a trusted DNS server ({trusted}), or trust {servers}: with --dns-server, \
             which must list every trusted server (`cluster` stands for the DNS Service), or as a \
             backend of the DNS Service (--dns-service)"
        );
        Some((why, remedy))
    }

    fn addresses_of(&self, name: &str) -> Hop {
        let left = |at: u64| at.saturating_sub(self.now.nanos()) / 1_000_000_000;
        let hop = |state, text: String, remedy: &str| hop("names", None, state, text, remedy);
        let known = |view: &NameView| match view.source.as_str() {
            "connection" => format!("{} (expired, kept for a connection)", view.address),
            _ if view.expires_at <= self.now.nanos() => format!("{} (expired)", view.address),
            _ => format!("{} ({} s left)", view.address, left(view.expires_at)),
        };
        let list = |views: &[NameView]| views.iter().map(known).collect::<Vec<_>>().join(", ");
        let refused: Vec<String> = self.found.refused.iter().map(IpAddr::to_string).collect();
        let refused = format!(
            "answers had {}, which gets no label of a name ({REFUSED}): a toCIDR rule opens it",
            refused.join(", ")
        );
        if !self.found.names.is_empty() {
            let mut text = format!("this endpoint learned {}", list(&self.found.names));
            if !self.found.refused.is_empty() {
                text = format!("{text}; {refused}");
            }
            return match self.untrusted() {
                None => hop(HopState::Found, text, ""),
                Some((why, remedy)) => hop(HopState::Missing, format!("{text}; {why}"), &remedy),
            };
        }
        if !self.found.refused.is_empty() {
            return hop(HopState::Absent, refused, "");
        }
        if !self.found.elsewhere.is_empty() {
            let text = format!(
                "this endpoint learned no address of {name}; others of the node did: {}",
                list(&self.found.elsewhere)
            );
            return match self.untrusted() {
                None => hop(HopState::Absent, text, ""),
                Some((why, remedy)) => hop(HopState::Missing, format!("{text}; {why}"), &remedy),
            };
        }
        if let Some((why, remedy)) = self.untrusted() {
            return hop(HopState::Missing, why, &remedy);
        }
        let text = format!("no address of {name} was learned, or its TTL has ended");
        if !self.learning {
            let remedy = "no DNS proxy is connected to this agent: start holdfast-sdp, or start \
                          the agent without --disable-builtin-dns-proxy";
            return hop(HopState::Missing, text, remedy);
        }
        let remedy = "look the name up from the pod again. If that changes nothing, \
                      `holdfast-sdp explain` shows the verdict for the query. An answer never opens \
                      an address of this node or of an endpoint: allow those with toEntities or \
                      toEndpoints";
        hop(HopState::Missing, text, remedy)
    }
}

fn closed_servers(closed: &ClosedServers) -> Hop {
    let rules = closed.rules.iter().map(RuleView::to_string);
    let rules: Vec<String> = rules.collect();
    let by = match rules.is_empty() {
        true => "no rule allows".to_owned(),
        false => format!("{} denies", rules.join("; ")),
    };
    let text = format!(
        "it may look up the name at {}, but {by} packets to port 53 there: no query is answered",
        closed.selector
    );
    hop("dns", None, HopState::Missing, text, ALLOW_BEFORE)
}
