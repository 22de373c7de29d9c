//! Which DNS servers are trusted for names, and the answers that open nothing because their server is
//! not (`--tofqdns-servers`).
//!
//! An address has one identity on the node: its labels open it to every endpoint whose policy selects
//! the name, whichever pod asked. So the owner of two pods, one of them a DNS server, could open any
//! address to the pods of others. With [`NameServers::Trusted`], an answer of another server is not
//! learned: it labels nothing, no file and no lease keeps it, and its pod gets it unchanged.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use dns_policy::{mapping::Mapping, name::Fqdn};

use super::{
    state::State,
    why::{MeantBy, UntrustedAnswer},
};
use crate::{
    core::state::{
        passed_answers::{ADDRESSES, NAMED, PassedAnswer},
        policy_model::subject::Subject,
    },
    fqdn::servers::NameServers,
    name_objects::TrustedServers,
    policy::lint::foreign_servers::{self, KnownServers},
};

impl State {
    /// Reads again which DNS servers are trusted: those of the flag, and those of the DNS Service
    /// unless the flag excludes them.
    pub(super) fn refresh_servers(&mut self) {
        let given: BTreeSet<_> = self.config.dns_servers.iter().copied().collect();
        let mut servers = match given.is_empty() || self.config.with_dns_service {
            true => self.cluster.services.dns_servers(&self.config.dns_service),
            false => TrustedServers::default(),
        };
        servers.asked.extend(&given);
        servers.backends.extend(&given);
        self.resolved.trust(Arc::new(servers));
    }

    /// Whether pods ask a trusted server at this address.
    pub(super) fn is_trusted(&self, server: SocketAddr) -> bool {
        let server = SocketAddr::new(server.ip().to_canonical(), server.port());
        self.resolved.trusted_servers().contains(&server)
    }

    /// Whether an answer may give its addresses the labels of `toFQDNs` rules. Counts and remembers
    /// one that may not, or would not with `--tofqdns-servers=trusted`.
    pub(super) fn counts_for_names(&mut self, mapping: &Mapping) -> bool {
        if self.is_trusted(mapping.server) {
            return true;
        }
        let counts = self.config.name_servers == NameServers::Any;
        if self.policy.labels_of_name(&mapping.name).is_some() {
            self.counters.answers_untrusted += 1;
            if !counts {
                let server = mapping.server;
                let addresses = mapping.addresses.iter().take(ADDRESSES);
                self.learned.passed.note(PassedAnswer {
                    server: SocketAddr::new(server.ip().to_canonical(), server.port()),
                    name: mapping.name.clone(),
                    endpoint: mapping.endpoint.id,
                    addresses: addresses.copied().collect(),
                });
            }
        }
        counts
    }
}

impl State {
    /// Answers that gave an address to a name of a subject's `toFQDNs` rules and do not count: of one
    /// name, or with one address.
    pub(super) fn passed_answers(
        &self,
        subject: &Subject,
        name: Option<&Fqdn>,
        address: Option<IpAddr>,
    ) -> Vec<UntrustedAnswer> {
        let mut found: BTreeMap<(&Fqdn, IpAddr), Vec<SocketAddr>> = BTreeMap::new();
        for passed in self.learned.passed.0.iter().rev() {
            let is_meant = name.is_none_or(|name| *name == passed.name)
                && super::why::selects_name(subject.policy(), &passed.name);
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

    /// Servers whose answers opened nothing, each with a name and a pod that asked it.
    pub(super) fn passed_warnings(&self) -> Vec<String> {
        let mut servers: BTreeMap<SocketAddr, Vec<&PassedAnswer>> = BTreeMap::new();
        for passed in &self.learned.passed.0 {
            // A server that became trusted, and pods that went.
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

    /// Policies that let a server of one namespace answer names that another one's policy opens.
    pub(super) fn foreign_servers(&self) -> Vec<String> {
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
        match trusted.first() {
            None => "none is known".to_owned(),
            Some(first) if trusted.len() == 1 => first.to_string(),
            Some(first) => format!("{first} and {} more", trusted.len() - 1),
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
