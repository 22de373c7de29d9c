//! Answers for names in policies that open nothing, because their server is not trusted.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use dns_policy::name::Fqdn;

use super::{Findings, Target};
use crate::{
    core::{
        snapshot::NameView,
        state::{
            State,
            passed_answers::{NAMED, PassedAnswer},
            policy_model::subject::Subject,
        },
    },
    first_of::first_of,
    fqdn::servers::NameServers,
    policy::{
        lint::foreign_servers::{self, KnownServers},
        model::Side,
        trace,
    },
};

/// The kind of rules that name a DNS name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeantBy {
    Firewall,
    ToFqdns,
}

/// An address of a name. No DNS server whose answers count for these rules gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UntrustedAnswer {
    /// The rules that name the DNS name.
    pub meant_by: MeantBy,
    pub name: Fqdn,
    pub address: IpAddr,
    /// Servers that answered the name lately and do not count, the latest first.
    pub servers: Vec<SocketAddr>,
}

impl State {
    /// Answers that do not count, if a rule of the subject depends on which answers count.
    pub(super) fn find_untrusted(
        &self,
        findings: &mut Findings,
        subject: &Subject,
        target: &Target,
    ) {
        if subject.has_tier() {
            let known = findings.names.iter().chain(&findings.elsewhere);
            findings.untrusted = self.untrusted_answers(&subject.policy().egress, known);
        }
        let only_trusted = self.config.name_servers == NameServers::Trusted;
        if only_trusted {
            let passed = match target {
                Target::Name(name) => self.passed_answers(subject, Some(name), None),
                Target::Address(address) => self.passed_answers(subject, None, Some(*address)),
            };
            findings.untrusted.extend(passed);
        }
        if subject.has_tier() || only_trusted {
            let trusted = self.resolved.trusted_servers().iter();
            findings.trusted_dns = trusted.copied().collect();
        }
    }

    /// Of the `known` answers, those whose name the ordered rules have, unless an answer that counts gave the same
    /// address.
    fn untrusted_answers<'a>(
        &self,
        side: &Side,
        known: impl Iterator<Item = &'a NameView>,
    ) -> Vec<UntrustedAnswer> {
        let pair =
            |view: &NameView| Some((Fqdn::normalise(&view.name), view.address.parse().ok()?));
        let pairs: BTreeSet<(Fqdn, IpAddr)> = known.filter_map(pair).collect();
        let answer = |(name, address): (Fqdn, IpAddr)| {
            let known = self.learned.names.name(&name);
            let pair = known.and_then(|entry| entry.pairs.get(&address))?;
            let servers = self.resolved.untrusted_servers(&name);
            let is_untrusted = pair.trusted_until.is_none() || !servers.is_empty();
            let is_used = is_untrusted
                && !self.resolved.has(&name, address)
                && !trace::tier_by_name(side, &name).is_empty();
            is_used.then_some(UntrustedAnswer {
                meant_by: MeantBy::Firewall,
                name,
                address,
                servers,
            })
        };
        pairs.into_iter().filter_map(answer).collect()
    }

    /// Answers that gave an address to a name of a subject's `toFQDNs` rules and do not count. If
    /// `name` or `address` is given, only answers for it are returned.
    fn passed_answers(
        &self,
        subject: &Subject,
        name: Option<&Fqdn>,
        address: Option<IpAddr>,
    ) -> Vec<UntrustedAnswer> {
        let mut found: BTreeMap<(&Fqdn, IpAddr), Vec<SocketAddr>> = BTreeMap::new();
        for passed in self.learned.passed.0.iter().rev() {
            let is_meant = name.is_none_or(|name| *name == passed.name)
                && super::selects_name(subject.policy(), &passed.name);
            let addresses = passed.addresses.iter().copied();
            let addresses = addresses.filter(|one| address.is_none_or(|wanted| wanted == *one));
            for address in addresses.filter(|_| is_meant) {
                let servers = found.entry((&passed.name, address)).or_default();
                if !servers.contains(&passed.server) {
                    servers.push(passed.server);
                }
            }
        }
        let learned = |name: &Fqdn, address: IpAddr| {
            let entry = self.learned.names.name(name);
            entry.is_some_and(|entry| entry.pairs.contains_key(&address))
        };
        let found = found
            .into_iter()
            .filter(|((name, address), _)| !learned(name, *address));
        let answers = found.map(|((name, address), servers)| UntrustedAnswer {
            name: name.clone(),
            address,
            servers,
            meant_by: MeantBy::ToFqdns,
        });
        answers.collect()
    }
}

impl State {
    /// Servers whose answers opened nothing, each with a name and a pod that asked it.
    pub(in crate::core) fn passed_warnings(&self) -> Vec<String> {
        let mut servers: BTreeMap<SocketAddr, Vec<&PassedAnswer>> = BTreeMap::new();
        for passed in &self.learned.passed.0 {
            // Servers that became trusted and removed pods are left out.
            if !self.is_trusted(passed.server) && self.endpoints.get(passed.endpoint).is_some() {
                servers.entry(passed.server).or_default().push(passed);
            }
        }
        let warnings = servers.iter().filter_map(|(server, passed)| {
            let latest = passed.last()?;
            let endpoint = self.endpoints.get(latest.endpoint)?;
            let spec = &endpoint.spec;
            let names: BTreeSet<&Fqdn> = passed.iter().map(|passed| &passed.name).collect();
            let more = match names.len() - 1 {
                0 => String::new(),
                more => format!(" and {more} more names"),
            };
            Some(format!(
                "DNS server {server} is not trusted: its answers open nothing for toFQDNs \
                 ({}{more}, asked by {}; --tofqdns-servers=trusted): let the pods ask a trusted \
                 server ({}), or {}",
                latest.name.as_str().trim_end_matches('.'),
                spec.pod.as_ref().unwrap_or(&spec.key),
                self.trusted_text(),
                self.trusting(*server),
            ))
        });
        warnings.take(NAMED).collect()
    }

    /// Policies that let a server of one namespace answer names that the policy of another namespace
    /// opens.
    pub(in crate::core) fn foreign_servers(&self) -> Vec<String> {
        let given: Vec<IpAddr> = self.config.dns_servers.iter().map(SocketAddr::ip).collect();
        let namespace = self.config.dns_service.split('/').next();
        let known = KnownServers {
            namespace: namespace.unwrap_or_default(),
            given: &given,
            only_trusted: self.config.name_servers == NameServers::Trusted,
        };
        let documents = self.policy.repository().iter().map(|document| &**document);
        let found = foreign_servers::warnings(documents, known).into_iter();
        let texts = found.map(|(key, warning)| format!("policy {key}: {warning}"));
        texts.collect()
    }

    fn trusted_text(&self) -> String {
        let trusted = self.resolved.trusted_servers();
        match trusted.is_empty() {
            true => "none is known".to_owned(),
            false => first_of(trusted, 1),
        }
    }

    /// How a server becomes trusted.
    fn trusting(&self, server: SocketAddr) -> String {
        match self.config.dns_servers.is_empty() {
            true => format!("trust it with --dns-server=cluster,{server}"),
            false => format!("add {server} to --dns-server"),
        }
    }
}
