//! A destination as people write it: a host with or without a port, or a URL.

use std::{net::IpAddr, str::FromStr};

use agent_core::{
    labels::{Label, LabelError},
    policy::{
        ask::Peer,
        trace::{Port, PortError},
    },
};

/// Default ports of URL schemes.
const PORTS_OF_SCHEMES: [(&str, u16); 4] = [("https", 443), ("http", 80), ("wss", 443), ("ws", 80)];
const TCP: u8 = 6;

/// A host, with the port that the text names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// DNS name, pod or Service, or IP address without brackets.
    pub host: String,
    /// Port that the text or its URL scheme names; `None` = neither names one.
    pub port: Option<Port>,
}

/// Why a text is no destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    /// A port that cannot be read.
    #[error(transparent)]
    Port(#[from] PortError),
    /// A URL without a host.
    #[error(
        "`{0}` names no host: write for example https://www.example.com or www.example.com:443"
    )]
    NoHost(String),
    /// A name with an empty label.
    #[error(
        "`{0}` is not a DNS name, because nothing is between two of its dots: write for example \
         www.example.com:443"
    )]
    EmptyLabel(String),
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, DestinationError> {
        let found = match text.split_once("://") {
            Some((scheme, rest)) => of_url(text, scheme, rest),
            None => host_and_port(text),
        }?;
        match found.host.starts_with('.') || found.host.contains("..") {
            true => Err(DestinationError::EmptyLabel(text.to_owned())),
            false => Ok(found),
        }
    }
}

/// The host and the port of a URL; the port of its scheme if it has none.
fn of_url(text: &str, scheme: &str, rest: &str) -> Result<Destination, DestinationError> {
    let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    let host = authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host);
    // A URL may end its authority with a colon and no port.
    let mut found = host_and_port(host.strip_suffix(':').unwrap_or(host))?;
    if found.host.is_empty() {
        return Err(DestinationError::NoHost(text.to_owned()));
    }
    let of_scheme = PORTS_OF_SCHEMES.iter();
    let mut of_scheme = of_scheme.filter(|(name, _)| name.eq_ignore_ascii_case(scheme));
    let of_scheme = of_scheme.next().map(|(_, number)| Port {
        protocol: TCP,
        number: *number,
    });
    found.port = found.port.or(of_scheme);
    Ok(found)
}

fn host_and_port(text: &str) -> Result<Destination, DestinationError> {
    let bare = |host: &str| {
        host.trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned()
    };
    if text.parse::<IpAddr>().is_ok() || text.ends_with(']') {
        return Ok(Destination {
            host: bare(text),
            port: None,
        });
    }
    Ok(match text.rsplit_once(':') {
        Some((host, port)) => Destination {
            host: bare(host),
            port: Some(port.parse()?),
        },
        None => Destination {
            host: text.to_owned(),
            port: None,
        },
    })
}

/// Receiver of a traced packet: labels, an endpoint, or a destination with or without a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receiver {
    /// Labels, an endpoint, an IP address or a DNS name.
    pub peer: String,
    /// Port of the destination; `None` for labels, or if the text names none.
    pub port: Option<Port>,
}

/// Why a text is no side of a traced packet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// A label that cannot be read.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// A destination that cannot be read.
    #[error(transparent)]
    Destination(#[from] DestinationError),
    /// Neither a label nor a destination.
    #[error(
        "`{0}` is neither a label nor a destination: write for example k8s:app=web, \
         www.example.com:443, https://www.example.com or 203.0.113.7"
    )]
    Receiver(String),
    /// A destination as the sender.
    #[error(
        "`{0}` is not a sender: write its labels, for example k8s:app=web, or an endpoint of the \
         running agent"
    )]
    Sender(String),
}

impl FromStr for Receiver {
    type Err = PeerError;

    fn from_str(text: &str) -> Result<Self, PeerError> {
        if is_destination(text) {
            let Destination { host, port } = text.parse()?;
            return Ok(Self { peer: host, port });
        }
        match Peer::parse(text)? {
            Peer::Labels(labels) if !labels.iter().all(is_label) => {
                Err(PeerError::Receiver(text.to_owned()))
            }
            _ => Ok(Self {
                peer: text.to_owned(),
                port: None,
            }),
        }
    }
}

/// Checks the sender of a traced packet.
pub(super) fn sender(text: &str) -> Result<String, PeerError> {
    let is_sender = match Peer::parse(text)? {
        Peer::Labels(labels) => !is_destination(text) && labels.iter().all(is_label),
        Peer::Address(_) | Peer::Name(_) => true,
    };
    match is_sender {
        true => Ok(text.to_owned()),
        false => Err(PeerError::Sender(text.to_owned())),
    }
}

/// Whether a text is a URL, or has a port or brackets: a label has none of them. The label `a:443` is
/// written `a:443=`.
fn is_destination(text: &str) -> bool {
    if text.contains("://") || text.starts_with('[') {
        return true;
    }
    let port = text.rsplit_once(':').map(|(_, port)| port);
    let has_port = port.is_some_and(|port| port.parse::<Port>().is_ok());
    has_port && !text.contains(['=', ',']) && text.parse::<IpAddr>().is_err()
}

/// Whether the text may be meant as a label: the source of a label is a word, without dots and slashes.
fn is_label(label: &Label) -> bool {
    !label.source().contains(['.', '/'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destination(host: &str, port: Option<&str>) -> Destination {
        Destination {
            host: host.to_owned(),
            port: port.map(|port| port.parse().unwrap()),
        }
    }

    #[test]
    fn urls_hosts_and_ports_are_read() {
        for (text, host, port) in [
            ("www.example.com", "www.example.com", None),
            ("www.example.com:443", "www.example.com", Some("443")),
            ("203.0.113.7:53/UDP", "203.0.113.7", Some("53/UDP")),
            ("2001:db8::1", "2001:db8::1", None),
            ("[2001:db8::1]", "2001:db8::1", None),
            ("[2001:db8::1]:443", "2001:db8::1", Some("443")),
            ("shop/web:80", "shop/web", Some("80")),
            ("https://www.example.com", "www.example.com", Some("443")),
            (
                "HTTP://www.example.com/a:b?c",
                "www.example.com",
                Some("80"),
            ),
            (
                "https://u:p@www.example.com:8443/a@b",
                "www.example.com",
                Some("8443"),
            ),
            ("https://[2001:db8::1]/", "2001:db8::1", Some("443")),
            ("https://[2001:db8::1]:8443", "2001:db8::1", Some("8443")),
            ("https://www.example.com:/", "www.example.com", Some("443")),
            (
                "postgres://db.example.com:5432/x",
                "db.example.com",
                Some("5432"),
            ),
            ("postgres://db.example.com/x", "db.example.com", None),
        ] {
            assert_eq!(text.parse(), Ok(destination(host, port)), "{text}");
            let receiver = text.parse::<Receiver>().unwrap();
            let wanted = destination(host, port);
            assert_eq!((receiver.peer, receiver.port), (wanted.host, wanted.port));
        }
        for text in ["https://", "https:///a", "https://:443"] {
            let error = text.parse::<Destination>().unwrap_err();
            assert!(error.to_string().contains("names no host"), "{error}");
        }
        for text in ["www..example.com:443", "https://.example.com"] {
            let error = text.parse::<Destination>().unwrap_err();
            assert!(
                error.to_string().contains("between two of its dots"),
                "{error}"
            );
        }
        let error = "www.example.com:http".parse::<Destination>().unwrap_err();
        assert!(
            error.to_string().contains("`http` is not a port"),
            "{error}"
        );
    }

    #[test]
    fn labels_are_no_destinations() {
        for text in [
            "k8s:app=web,k8s:tier=front",
            "k8s:app=web:443",
            "k8s:443=",
            "reserved:host",
            "cidr:10.0.0.0/8",
            "k8s:app=web,gen:io.cilium.k8s.named-ports=http.TCP.80",
            "shop/web",
            "cli/pod1/eth0",
        ] {
            let receiver = text.parse::<Receiver>().unwrap();
            assert_eq!((receiver.peer.as_str(), receiver.port), (text, None));
            assert_eq!(sender(text).as_deref(), Ok(text));
        }
        for text in ["www.example.com:http", "a/b:c"] {
            let error = text.parse::<Receiver>().unwrap_err().to_string();
            assert!(error.contains("www.example.com:443"), "{error}");
        }
        for text in ["https://www.example.com", "www.example.com:443", "web:443"] {
            let error = sender(text).unwrap_err().to_string();
            assert!(error.contains("k8s:app=web"), "{error}");
        }
    }
}
