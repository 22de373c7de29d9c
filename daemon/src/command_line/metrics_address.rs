//! `--metrics-address`.

use std::{fmt, net::SocketAddr, str::FromStr};

/// Address of metrics and health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// There is no address: metrics and health are off.
    Off,
    /// Every address of the node.
    AnyHost(u16),
    /// This socket alone.
    At(SocketAddr),
}

/// A text that is not a valid address of metrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address: write HOST:PORT, such as 127.0.0.1:9962, :PORT or off")]
pub struct MetricsAddressError(String);

impl FromStr for MetricsAddress {
    type Err = MetricsAddressError;

    fn from_str(text: &str) -> Result<Self, MetricsAddressError> {
        let wrong = || MetricsAddressError(text.to_owned());
        if text.is_empty() || text == "off" {
            return Ok(Self::Off);
        }
        match text.strip_prefix(':') {
            Some(port) => port.parse().map(Self::AnyHost).map_err(|_| wrong()),
            None => text.parse().map(Self::At).map_err(|_| wrong()),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::AnyHost(port) => write!(f, ":{port}"),
            Self::At(address) => address.fmt(f),
        }
    }
}

impl MetricsAddress {
    /// Addresses to try to bind, best first; empty if metrics are off.
    pub fn candidates(&self) -> Vec<SocketAddr> {
        match self {
            Self::Off => Vec::new(),
            Self::At(address) => vec![*address],
            Self::AnyHost(port) => vec![([0u16; 8], *port).into(), ([0u8; 4], *port).into()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_with_a_port_every_host_or_off() {
        for (text, candidates) in [
            ("127.0.0.1:1", &["127.0.0.1:1"][..]),
            (":7", &["[::]:7", "0.0.0.0:7"]),
            ("off", &[]),
            ("", &[]),
        ] {
            let address: MetricsAddress = text.parse().unwrap();
            let found = address.candidates();
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found, candidates, "{text}");
        }
        for text in ["somewhere", ":70000", "9962", "localhost:9962"] {
            let error = text.parse::<MetricsAddress>().unwrap_err().to_string();
            assert!(
                error.contains(text) && error.contains("HOST:PORT"),
                "{error}"
            );
        }
    }
}
