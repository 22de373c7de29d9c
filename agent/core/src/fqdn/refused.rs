//! Prefixes whose addresses get no label of a name, whatever answers say (`--tofqdns-refuse-prefix`).
//!
//! The owner of any name that a pod may look up chooses its addresses (DNS rebinding). Without
//! this, an answer would open a cloud's metadata service to a pod that may reach that name.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;

use super::embedded;

/// What is refused by default: link-local addresses, among them the metadata services of most clouds,
/// and the addresses of services that are not link-local and give a machine its metadata or
/// credentials. docs/src/names.md has the source of each.
pub const DEFAULT: [&str; 12] = [
    // AWS (and its Pod Identity agent at .23), Azure, Google, Oracle, OpenStack, DigitalOcean,
    // Hetzner, IBM, Tencent (.0.23) and Scaleway (.42.42).
    "169.254.0.0/16",
    "fe80::/10",
    // AWS: instance metadata, and the Pod Identity agent of EKS.
    "fd00:ec2::254/128",
    "fd00:ec2::23/128",
    // Google.
    "fd20:ce::254/128",
    // Azure's WireServer.
    "168.63.129.16/32",
    // Alibaba.
    "100.100.100.200/32",
    "fd00:100::100:200/128",
    // Oracle, and Oracle Classic.
    "fd00:c1::a9fe:a9fe/128",
    "192.0.0.192/32",
    // Scaleway.
    "fd00:42::42/128",
    // Linode.
    "fd00:a9fe:a9fe::1/128",
];

/// Prefixes whose addresses get no label of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedPrefixes(Vec<IpNet>);

impl RefusedPrefixes {
    /// No prefix is refused, as with Cilium.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// The refused prefix that covers an address, or the IPv4 address within it.
    pub fn covering(&self, address: IpAddr) -> Option<IpNet> {
        let within = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(embedded::ipv4_in(v6).map(IpAddr::V4)),
        };
        let mut all = std::iter::once(address).chain(within.into_iter().flatten());
        all.find_map(|address| self.0.iter().copied().find(|net| net.contains(&address)))
    }

    /// Whether a prefix is a single address that is refused.
    pub fn covers(&self, prefix: IpNet) -> bool {
        let is_address = prefix.prefix_len() == prefix.max_prefix_len();
        is_address && self.covering(prefix.addr()).is_some()
            || self.0.iter().any(|net| net.contains(&prefix))
    }

    /// From the values of the flag: prefixes, or `none` alone.
    pub fn of(values: &[RefusedValue]) -> Result<Self, String> {
        let prefixes = values.iter().filter_map(|value| match value {
            RefusedValue::None => None,
            RefusedValue::Prefix(prefix) => Some(*prefix),
        });
        let prefixes: Vec<IpNet> = prefixes.collect();
        if values.contains(&RefusedValue::None) && !prefixes.is_empty() {
            return Err("none stands beside prefixes; give one or the other".to_owned());
        }
        Ok(Self(prefixes))
    }
}

impl Default for RefusedPrefixes {
    fn default() -> Self {
        let parse = |text: &&str| text.parse().expect("a constant prefix");
        Self(DEFAULT.iter().map(parse).collect())
    }
}

/// One value of the flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedValue {
    /// The word `none`: no prefix is refused.
    None,
    /// A prefix, or an address.
    Prefix(IpNet),
}

impl FromStr for RefusedValue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::None);
        }
        let prefix = text.parse::<IpNet>();
        let prefix = prefix.or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        match prefix {
            Ok(prefix) => Ok(Self::Prefix(prefix.trunc())),
            Err(_) => Err("write a prefix such as 10.96.0.0/12, an address, or none".to_owned()),
        }
    }
}

impl fmt::Display for RefusedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Prefix(prefix) => prefix.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> Result<RefusedPrefixes, String> {
        let values: Result<Vec<RefusedValue>, _> = texts.iter().map(|t| t.parse()).collect();
        RefusedPrefixes::of(&values?)
    }

    #[test]
    fn metadata_addresses_are_refused_by_default() {
        let default = RefusedPrefixes::default();
        assert_eq!(of(&DEFAULT), Ok(default.clone()));
        for address in [
            "169.254.169.254",
            "169.254.20.10",
            "fe80::1",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "168.63.129.16",
            "100.100.100.200",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
        ] {
            assert!(
                default.covering(address.parse().unwrap()).is_some(),
                "{address}"
            );
        }
        for address in ["169.253.1.1", "10.0.0.1", "fd00:ec2::253", "2001:db8::1"] {
            assert_eq!(
                default.covering(address.parse().unwrap()),
                None,
                "{address}"
            );
        }
    }

    #[test]
    fn ipv6_forms_of_a_refused_ipv4_address_are_refused() {
        let default = RefusedPrefixes::default();
        let within = |v4: &str| embedded::with(v4.parse().unwrap());
        for v4 in ["169.254.169.254", "168.63.129.16", "100.100.100.200"] {
            for address in within(v4).into_iter().map(IpAddr::V6) {
                assert!(default.covering(address).is_some(), "{address}");
                assert!(default.covers(IpNet::from(address)), "{address}");
                assert_eq!(RefusedPrefixes::none().covering(address), None);
            }
        }
        for address in within("93.184.216.34").into_iter().map(IpAddr::V6) {
            assert_eq!(default.covering(address), None, "{address}");
        }
    }

    #[test]
    fn values_are_prefixes_addresses_or_none() {
        let given = of(&["10.96.1.2/12", "192.0.2.1"]).unwrap();
        let covering = |text: &str| given.covering(text.parse().unwrap()).map(|p| p.to_string());
        assert_eq!(covering("10.111.0.1").as_deref(), Some("10.96.0.0/12"));
        assert_eq!(covering("192.0.2.1").as_deref(), Some("192.0.2.1/32"));
        assert_eq!(
            covering("169.254.169.254"),
            None,
            "a list replaces the default"
        );
        assert!(given.covers("10.97.0.0/16".parse().unwrap()));
        assert!(!given.covers("10.0.0.0/8".parse().unwrap()));
        assert_eq!(of(&["none"]), Ok(RefusedPrefixes::none()));
        assert!(
            of(&["none", "10.0.0.0/8"])
                .unwrap_err()
                .contains("one or the other")
        );
        assert!(of(&["10.0.0.0/33"]).unwrap_err().contains("10.96.0.0/12"));
    }
}
