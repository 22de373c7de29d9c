//! Endpoints as the test knows them.

use super::node::spec;
use crate::{
    endpoint::spec::EndpointSpec,
    labels::{K8S, Label, LabelSet, NAMESPACE_KEY},
    named_port::NamedPorts,
    policy::mode::PolicyMode,
};

/// The namespace in which endpoints are unless they have the label of another.
pub const DEFAULT: &str = "default";

/// Another namespace. No document describes it.
pub const SHOP: &str = "shop";

/// Named ports of an endpoint: name, protocol, port.
pub type PortNames = &'static [(&'static str, u8, u16)];

/// Namespace, labels and named ports of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: &'static str,
    pub web: bool,
    pub ports: PortNames,
    /// Its own `enable-policy`.
    pub mode: Option<PolicyMode>,
}

impl Pod {
    /// app=db, without named ports.
    pub const DB: Self = Self {
        namespace: DEFAULT,
        web: false,
        ports: &[],
        mode: None,
    };

    /// app=web, without named ports.
    pub const WEB: Self = Self {
        namespace: DEFAULT,
        web: true,
        ports: &[],
        mode: None,
    };

    pub fn spec(self, host: u8) -> EndpointSpec {
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

    pub const fn app(self) -> &'static str {
        match self.web {
            true => "web",
            false => "db",
        }
    }

    /// Labels that policies name.
    pub fn labels(self) -> LabelSet {
        let app = Label::new(K8S, "app", self.app());
        LabelSet::new(vec![app, Label::new(K8S, NAMESPACE_KEY, self.namespace)])
    }
}
