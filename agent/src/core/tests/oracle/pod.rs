//! Endpoints as the test knows them.

use proptest::prelude::*;

use super::language::NAMED;
use crate::{
    core::{event::EndpointSpec, tests::scenario::spec},
    labels::LabelSet,
    named_port::NamedPorts,
    policy::rule::{PortRule, Ports},
};

/// Labels and named ports of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core::tests) struct Pod {
    pub(in crate::core::tests) web: bool,
    /// Which of [`NAMED`].
    pub(in crate::core::tests) ports: usize,
}

pub(super) fn pod() -> impl Strategy<Value = Pod> {
    (any::<bool>(), 0..NAMED.len()).prop_map(|(web, ports)| Pod { web, ports })
}

impl Pod {
    /// app=db, without named ports.
    pub(in crate::core::tests) const DB: Self = Self {
        web: false,
        ports: 0,
    };

    /// app=web, without named ports.
    pub(in crate::core::tests) const WEB: Self = Self {
        web: true,
        ports: 0,
    };

    pub(super) fn spec(self, host: u8) -> EndpointSpec {
        let app = if self.web { "app=web" } else { "app=db" };
        let mut spec = spec(&host.to_string(), host, app);
        let texts = NAMED[self.ports].iter().map(|(name, protocol, port)| {
            let protocol = if *protocol == 6 { "TCP" } else { "UDP" };
            format!("{name}={port}/{protocol}")
        });
        let texts: Vec<String> = texts.collect();
        let labels = NamedPorts::parse(&texts).unwrap().labels();
        spec.labels.extend(labels.iter().map(ToString::to_string));
        spec
    }

    /// Labels that policies name.
    pub(super) fn labels(self) -> LabelSet {
        let app = if self.web {
            "k8s:app=web"
        } else {
            "k8s:app=db"
        };
        LabelSet::parse(&[app, "k8s:io.kubernetes.pod.namespace=default"]).unwrap()
    }

    /// Whether a rule's port is this one of the pod's.
    pub(super) fn is_at(self, rule: &PortRule, protocol: u8, port: u16) -> bool {
        let is = match &rule.ports {
            Ports::Range(first, last) => (*first..=*last).contains(&port),
            Ports::Named(wanted) => NAMED[self.ports].iter().any(|(name, number, at)| {
                (wanted.to_string(), protocol, port) == ((*name).to_owned(), *number, *at)
            }),
        };
        is && rule.protocol.numbers().contains(&protocol)
    }
}
