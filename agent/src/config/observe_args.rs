//! Arguments of `holdfast-agent observe`.

use std::{str::FromStr, time::Duration};

use agent_core::policy::trace::Port;
use clap::{Args, ValueEnum};
use daemon::command_line::{endpoint_args::EndpointFilter, values::whole};
use dns_policy::{
    duration,
    pattern::{Pattern, PatternError},
    rule::NameRule,
    wall_time,
};
use ipnet::IpNet;

use super::args::ClientArgs;

/// `observe`
#[derive(Debug, Args)]
pub struct ObserveArgs {
    /// Continue and print new packets as they occur
    #[arg(short, long)]
    pub follow: bool,
    #[command(flatten)]
    pub endpoint: EndpointFilter,
    #[command(flatten)]
    pub filter: PacketFilter,
    /// Only packets since then: a time, such as 2026-11-27T14:00:00Z, or how long ago it was, such as 90s or 5m
    #[arg(long, value_name = "TIME")]
    pub since: Option<Since>,
    /// Only the last N packets of those that the other flags select; with --follow, before new ones
    #[arg(long, value_name = "N", value_parser = whole(0..=usize::MAX))]
    pub last: Option<usize>,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Which packets are printed. Of a flag that is repeated, one value must select the packet.
#[derive(Clone, Debug, Default, Args)]
pub struct PacketFilter {
    /// Only packets with this verdict
    #[arg(long, value_name = "VERDICT", value_enum)]
    pub verdict: Option<PacketVerdict>,
    /// Only packets to or from an address that the endpoint learned for this name, such as
    /// www.example.com or *.example.com; may be repeated
    #[arg(long = "name", value_name = "PATTERN", value_parser = name_pattern)]
    pub names: Vec<Pattern>,
    /// Only packets to or from this address or block, such as 203.0.113.7 or 10.0.0.0/8; may be
    /// repeated
    #[arg(long = "address", value_name = "ADDRESS", value_parser = block)]
    pub addresses: Vec<IpNet>,
    /// Only packets with this destination port: 443, 443/TCP, 53/UDP, 8/ICMP (the type). A number
    /// without a protocol is of any; may be repeated
    #[arg(long = "port", value_name = "PORT")]
    pub ports: Vec<PortFilter>,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PacketVerdict {
    /// It was dropped
    Dropped,
    /// It was forwarded, or redirected to the DNS proxy
    Forwarded,
}

/// A port, of one protocol or of any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortFilter {
    /// Port, or ICMP type.
    pub number: u16,
    /// IP protocol number; none = any.
    pub protocol: Option<u8>,
}

impl FromStr for PortFilter {
    type Err = <Port as FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let port: Port = text.parse()?;
        Ok(Self {
            number: port.number,
            protocol: text.contains('/').then_some(port.protocol),
        })
    }
}

/// An instant, or how long ago it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// Nanoseconds since 1970.
    At(u64),
    /// Before now.
    Ago(Duration),
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let at = wall_time::parse(text).map(Self::At);
        let since = at.or_else(|| duration::parse(text).ok().map(Self::Ago));
        since.ok_or_else(|| {
            "write a time with its offset from UTC, such as 2026-11-27T14:00:00Z, or how long ago it \
             was, such as 90s, 5m or 1h30m"
                .to_owned()
        })
    }
}

fn name_pattern(text: &str) -> Result<Pattern, PatternError> {
    Pattern::parse(&NameRule::Pattern(text.to_owned()))
}

fn block(text: &str) -> Result<IpNet, String> {
    let address = text.parse::<std::net::IpAddr>().map(IpNet::from);
    address.or_else(|_| text.parse()).map_err(|_| {
        "write an address or a block, such as 203.0.113.7, 10.0.0.0/8 or 2001:db8::/32".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_and_wrong_ones_say_what_to_write() {
        assert_eq!("5m".parse(), Ok(Since::Ago(Duration::from_secs(300))));
        assert_eq!("1970-01-01T00:00:01Z".parse(), Ok(Since::At(1_000_000_000)));
        for text in ["yesterday", "2026-11-27", "14:00", ""] {
            let error = text.parse::<Since>().unwrap_err();
            assert!(error.contains("5m"), "{error}");
        }
        assert_eq!(block("203.0.113.7").unwrap().prefix_len(), 32);
        assert_eq!(block("2001:db8::/32").unwrap().prefix_len(), 32);
        assert!(block("www.example.com").is_err());
        let protocols = ["53", "53/udp"].map(|text| text.parse::<PortFilter>().unwrap().protocol);
        assert_eq!(protocols, [None, Some(17)]);
        assert!(name_pattern("a b").is_err());
    }
}
