//! Named ports of a pod, as its identity carries them.
//!
//! They are labels that the agent makes (`gen:io.cilium.k8s.named-ports=http.TCP.80_dns.UDP.53`,
//! Cilium's spelling since 1.20), so that pods whose port names mean different ports have different
//! identities, and a name has one meaning at each identity.

use std::collections::BTreeMap;

pub use netpol::name::PortName;
use netpol::policy::Protocol;

use crate::labels::{GENERATED, Label, LabelSet};

/// Key of the first label of named ports; further ones end in `-1`, `-2`, ….
const KEY: &str = "io.cilium.k8s.named-ports";
/// Maximum length of a label's value in Kubernetes, in bytes.
const VALUE_MAX: usize = 63;

/// The protocol and port that a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProtocolPort {
    /// IP protocol number: TCP, UDP or SCTP.
    pub protocol: u8,
    /// Port, never 0.
    pub port: u16,
}

/// A text that is no named port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamedPortError {
    /// The name of the port is not valid.
    #[error(
        "`{0}` is not a port name: write at most 15 letters, digits and single dashes inside, at \
         least one of them a letter, for example http or dns-tcp"
    )]
    Name(String),
    /// The text is not of the form `name=port/protocol`.
    #[error("`{0}` is not a named port: write for example http=80/TCP or dns=53/UDP")]
    Form(String),
    /// A name that stands for two ports.
    #[error("port name {0} occurs twice: give each port a different name")]
    Twice(PortName),
}

/// Reads the name of a port, an IANA service name (RFC 6335 section 5.1) in any case.
pub fn port_name(text: &str) -> Result<PortName, NamedPortError> {
    let name = PortName::new(&text.to_ascii_lowercase());
    name.ok_or_else(|| NamedPortError::Name(text.to_owned()))
}

/// The named ports of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedPorts(BTreeMap<PortName, ProtocolPort>);

impl NamedPorts {
    /// Reads texts `name=port[/protocol]`; the protocol is TCP unless it says UDP or SCTP.
    pub fn parse<S: AsRef<str>>(texts: &[S]) -> Result<Self, NamedPortError> {
        let mut found = BTreeMap::new();
        for text in texts {
            let form = || NamedPortError::Form(text.as_ref().to_owned());
            let (name, target) = text.as_ref().split_once('=').ok_or_else(form)?;
            let (port, protocol) = target.split_once('/').unwrap_or((target, "TCP"));
            let target = protocol_port(protocol, port).ok_or_else(form)?;
            let name = port_name(name)?;
            if found.insert(name.clone(), target).is_some() {
                return Err(NamedPortError::Twice(name));
            }
        }
        Ok(Self(found))
    }

    /// The named ports that labels carry.
    pub fn of(labels: &LabelSet) -> Self {
        let named = parts(labels).filter_map(|(name, port)| Some((port_name(name).ok()?, port)));
        Self(named.collect())
    }

    /// The labels that carry these ports.
    pub fn labels(&self) -> Vec<Label> {
        let mut values: Vec<String> = Vec::new();
        for (name, target) in &self.0 {
            let part = format!("{name}.{}.{}", word(target.protocol), target.port);
            match values.last_mut() {
                Some(value) if value.len() + 1 + part.len() <= VALUE_MAX => {
                    value.push('_');
                    value.push_str(&part);
                }
                _ => values.push(part),
            }
        }
        let labels = values.iter().enumerate().map(|(n, value)| {
            let key = if n == 0 {
                KEY.to_owned()
            } else {
                format!("{KEY}-{n}")
            };
            Label::new(GENERATED, &key, value)
        });
        labels.collect()
    }

    /// Each name with its port.
    pub fn iter(&self) -> impl Iterator<Item = (&PortName, ProtocolPort)> {
        self.0.iter().map(|(name, port)| (name, *port))
    }

    /// The ports as texts that [`NamedPorts::parse`] reads.
    pub fn texts(&self) -> Vec<String> {
        let text = |(name, target): (&PortName, &ProtocolPort)| {
            format!("{name}={}/{}", target.port, word(target.protocol))
        };
        self.0.iter().map(text).collect()
    }
}

/// What a name stands for at an identity with these labels.
pub fn find(labels: &LabelSet, name: &PortName) -> Option<ProtocolPort> {
    let mut parts = parts(labels).filter(|(known, _)| *known == name.as_str());
    parts.next().map(|(_, target)| target)
}

/// Whether a label carries named ports.
pub fn is_label(label: &Label) -> bool {
    let key = |rest: &str| {
        rest.is_empty()
            || rest
                .strip_prefix('-')
                .is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()))
    };
    label.source() == GENERATED && label.key().strip_prefix(KEY).is_some_and(key)
}

fn parts(labels: &LabelSet) -> impl Iterator<Item = (&str, ProtocolPort)> {
    let values = labels.iter().filter(|label| is_label(label));
    let parts = values.flat_map(|label| label.value().split('_'));
    parts.filter_map(|part| {
        let (name, target) = part.split_once('.')?;
        let (protocol, port) = target.split_once('.')?;
        Some((name, protocol_port(protocol, port)?))
    })
}

fn protocol_port(protocol: &str, port: &str) -> Option<ProtocolPort> {
    let protocol = Protocol::parse(&protocol.to_ascii_uppercase())?.number();
    let port = port.parse().ok().filter(|port| *port != 0)?;
    Some(ProtocolPort { protocol, port })
}

const fn word(protocol: u8) -> &'static str {
    match protocol {
        17 => "UDP",
        132 => "SCTP",
        _ => "TCP",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_service_names() {
        for good in [
            "http",
            "dns-tcp",
            "a",
            "1a",
            "a-9",
            "abcdefghijklmno",
            "HTTP",
        ] {
            assert!(port_name(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "80",
            "-a",
            "a-",
            "a--b",
            "a_b",
            "a.b",
            "abcdefghijklmnop",
            "ä",
        ] {
            assert!(port_name(bad).is_err(), "{bad}");
        }
        assert_eq!(port_name("HTTP"), port_name("http"));
    }

    #[test]
    fn texts_that_are_not_a_named_port_are_refused() {
        for bad in [
            "http",
            "http=",
            "http=0",
            "http=65536",
            "http=80/ICMP",
            "http=80/TCP/1",
        ] {
            assert!(matches!(
                NamedPorts::parse(&[bad]),
                Err(NamedPortError::Form(_))
            ));
        }
        let twice = NamedPorts::parse(&["http=80", "HTTP=81"]);
        assert!(matches!(twice, Err(NamedPortError::Twice(_))));
    }

    #[test]
    fn labels_contain_them() {
        let texts = ["dns=53/UDP", "dns-tcp=53/TCP", "http=80/TCP", "sig=9/SCTP"];
        let ports = NamedPorts::parse(&texts).unwrap();
        let labels = LabelSet::new(ports.labels());
        let first =
            "gen:io.cilium.k8s.named-ports=dns.UDP.53_dns-tcp.TCP.53_http.TCP.80_sig.SCTP.9";
        assert_eq!(labels.texts(), [first]);
        assert_eq!(NamedPorts::of(&labels), ports);
        assert_eq!(ports.texts(), {
            let mut sorted = texts.map(str::to_owned);
            sorted.sort_unstable_by_key(|text| text.split('=').next().map(str::to_owned));
            sorted
        });
        let at = |name: &str| find(&labels, &port_name(name).unwrap());
        let http = ProtocolPort {
            protocol: 6,
            port: 80,
        };
        assert_eq!(at("http"), Some(http));
        assert_eq!(at("https"), None);
    }

    #[test]
    fn many_of_them_take_several_labels() {
        let texts: Vec<String> = (0..20).map(|n| format!("port-{n}={}", 1000 + n)).collect();
        let ports = NamedPorts::parse(&texts).unwrap();
        let labels = ports.labels();
        assert!(labels.len() > 2);
        assert!(labels.iter().all(|label| label.value().len() <= VALUE_MAX));
        assert!(labels.iter().all(is_label));
        assert_eq!(NamedPorts::of(&LabelSet::new(labels)), ports);
        assert!(!is_label(&Label::new("k8s", KEY, "http.TCP.80")));
    }
}
