//! Ports at which connections between two ends may be opened.

use std::collections::BTreeMap;

use crate::{
    policy::Protocol,
    ports::{PortSet, Span},
};

/// A set of ports, by protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenPorts {
    /// Every port of every protocol, and protocols without ports.
    All,
    /// Only these ports: ranges that neither overlap nor touch. Protocols without ports are closed.
    Only(BTreeMap<Protocol, Vec<Span>>),
}

impl OpenPorts {
    /// The set of an end for which no rule opens a port.
    pub const fn none() -> Self {
        Self::Only(BTreeMap::new())
    }

    /// Whether no port is open.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Only(open) if open.is_empty())
    }

    /// The ports that are in at least one of two sets.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::All, _) | (_, Self::All) => Self::All,
            (Self::Only(one), Self::Only(other)) => {
                one.into_iter().chain(other).flat_map(pairs).collect()
            }
        }
    }

    /// The ports that are in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::All, open) | (open, Self::All) => open,
            (Self::Only(one), Self::Only(other)) => {
                let both = one.into_iter().filter_map(|(protocol, spans)| {
                    let spans: PortSet = spans.into_iter().collect();
                    let common = spans.common(&other.get(&protocol)?.iter().copied().collect());
                    Some((protocol, common.spans().collect()))
                });
                both.flat_map(pairs).collect()
            }
        }
    }

    /// Each range with its protocol, such as `8000-8080/TCP`; `any` for everything.
    pub fn texts(&self) -> Vec<String> {
        match self {
            Self::All => vec!["any".to_owned()],
            Self::Only(open) => {
                let ranges = open.iter().flat_map(|(protocol, spans)| {
                    let text = |span: &Span| format!("{span}/{}", protocol.as_str());
                    spans.iter().map(text)
                });
                ranges.collect()
            }
        }
    }
}

fn pairs((protocol, spans): (Protocol, Vec<Span>)) -> impl Iterator<Item = (Protocol, Span)> {
    spans.into_iter().map(move |span| (protocol, span))
}

impl FromIterator<(Protocol, Span)> for OpenPorts {
    fn from_iter<I: IntoIterator<Item = (Protocol, Span)>>(ports: I) -> Self {
        let mut by_protocol: BTreeMap<Protocol, Vec<Span>> = BTreeMap::new();
        for (protocol, span) in ports {
            by_protocol.entry(protocol).or_default().push(span);
        }
        let merged = by_protocol.into_iter().map(|(protocol, spans)| {
            let spans: PortSet = spans.into_iter().collect();
            (protocol, spans.spans().collect())
        });
        Self::Only(merged.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(ports: &[(Protocol, u16, u16)]) -> OpenPorts {
        let ports = ports.iter();
        ports
            .map(|(protocol, first, last)| (*protocol, Span::new(*first, *last).unwrap()))
            .collect()
    }

    #[test]
    fn sets_add_up_on_one_side_and_intersect_between_sides() {
        use Protocol::{Tcp, Udp};
        let one = open(&[(Tcp, 80, 80), (Tcp, 81, 90)]);
        let other = open(&[(Tcp, 85, 95), (Udp, 53, 53)]);
        assert_eq!(one.texts(), ["80-90/TCP"]);
        let both = one.clone().or(other.clone());
        assert_eq!(both.texts(), ["80-95/TCP", "53/UDP"]);
        assert_eq!(one.clone().and(other).texts(), ["85-90/TCP"]);
        assert_eq!(one.clone().and(OpenPorts::All), one);
        assert_eq!(one.clone().or(OpenPorts::All).texts(), ["any"]);
        let none = one.and(open(&[(Udp, 80, 80)]));
        assert!(none.is_empty());
        assert_eq!(none.texts(), [""; 0]);
        assert_eq!(open(&[(Tcp, 0, u16::MAX)]).texts(), ["any/TCP"]);
    }
}
