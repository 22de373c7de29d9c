//! Endpoints at random, and the ports that they name.

use proptest::{prelude::*, sample::select};

use super::language::PORT_NAMES;
pub(in crate::core::tests) use crate::core::testing::pod::{DEFAULT, Pod, SHOP};
use crate::policy::{
    mode::PolicyMode,
    rule::{PortRule, Ports},
};

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
    /// Whether a rule is about this port of the pod.
    pub(in crate::core::tests) fn is_at(self, rule: &PortRule, protocol: u8, port: u16) -> bool {
        let is = match &rule.ports {
            Ports::Range(first, last) => (*first..=*last).contains(&port),
            Ports::Named(wanted) => self.ports.iter().any(|(name, number, at)| {
                (wanted.to_string(), protocol, port) == ((*name).to_owned(), *number, *at)
            }),
        };
        is && rule.protocol.numbers().contains(&protocol)
    }
}
