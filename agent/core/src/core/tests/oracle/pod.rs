//! Endpoints as the test knows them.

use proptest::{prelude::*, sample::select};

use super::language::{PORT_NAMES, PortNames};
use crate::{
    core::tests::scenario::spec,
    endpoint::spec::EndpointSpec,
    labels::{K8S, Label, LabelSet, NAMESPACE_KEY},
    named_port::NamedPorts,
    policy::{
        mode::PolicyMode,
        rule::{PortRule, Ports},
    },
};

/// The namespace in which endpoints are unless they have the label of another.
pub(in crate::core::tests) const DEFAULT: &str = "default";

/// Another namespace. No document describes it.
pub(in crate::core::tests) const SHOP: &str = "shop";

/// Namespace, labels and named ports of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core::tests) struct Pod {
    pub(in crate::core::tests) namespace: &'static str,
    pub(in crate::core::tests) web: bool,
    pub(in crate::core::tests) ports: PortNames,
    /// Its own `enable-policy`.
    pub(in crate::core::tests) mode: Option<PolicyMode>,
}

pub(super) fn pod() -> impl Strategy<Value = Pod> {
    let mode = prop_oneof![
        4 => Just(None),
        1 => Just(Some(PolicyMode::Default)),
        1 => Just(Some(PolicyMode::Always)),
        1 => Just(Some(PolicyMode::Never)),
    ];
    (namespace(), any::<bool>(), select(PORT_NAMES), mode).prop_map(
        |(namespace, web, ports, mode)| Pod {
            namespace,
            web,
            ports,
            mode,
        },
    )
}

pub(super) fn namespace() -> impl Strategy<Value = &'static str> {
    select(&[DEFAULT, DEFAULT, SHOP][..])
}

impl Pod {
    /// app=db, without named ports.
    pub(in crate::core::tests) const DB: Self = Self {
        namespace: DEFAULT,
        web: false,
        ports: &[],
        mode: None,
    };

    /// app=web, without named ports.
    pub(in crate::core::tests) const WEB: Self = Self {
        namespace: DEFAULT,
        web: true,
        ports: &[],
        mode: None,
    };

    pub(super) fn spec(self, host: u8) -> EndpointSpec {
        let app = format!("app={}", self.app());
        let mut spec = spec(&host.to_string(), host, &app);
        let texts = self.ports.iter().map(|(name, protocol, port)| {
            let protocol = if *protocol == 6 { "TCP" } else { "UDP" };
            format!("{name}={port}/{protocol}")
        });
        let texts: Vec<String> = texts.collect();
        let labels = NamedPorts::parse(&texts).unwrap().labels();
        let mode = self.mode.map(PolicyMode::label);
        let namespace =
            (self.namespace != DEFAULT).then(|| Label::new(K8S, NAMESPACE_KEY, self.namespace));
        let made = labels.into_iter().chain(mode).chain(namespace);
        spec.labels.extend(made.map(|label| label.to_string()));
        spec
    }

    pub(super) const fn app(self) -> &'static str {
        match self.web {
            true => "web",
            false => "db",
        }
    }

    /// Labels that policies name.
    pub(super) fn labels(self) -> LabelSet {
        let app = Label::new(K8S, "app", self.app());
        LabelSet::new(vec![app, Label::new(K8S, NAMESPACE_KEY, self.namespace)])
    }

    /// Whether a rule's port is this one of the pod's.
    pub(super) fn is_at(self, rule: &PortRule, protocol: u8, port: u16) -> bool {
        let is = match &rule.ports {
            Ports::Range(first, last) => (*first..=*last).contains(&port),
            Ports::Named(wanted) => self.ports.iter().any(|(name, number, at)| {
                (wanted.to_string(), protocol, port) == ((*name).to_owned(), *number, *at)
            }),
        };
        is && rule.protocol.numbers().contains(&protocol)
    }
}
