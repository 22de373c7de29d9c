//! Flags about names of EgressFirewalls, and about the DNS servers that are trusted for names.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use agent_core::core::config::DNS_SERVICE;
use clap::Args;

use super::ConfigError;

/// Port of a DNS server that is given without one.
const DNS_PORT: u16 = 53;

#[derive(Clone, Debug, Args)]
pub struct FirewallArgs {
    /// A DNS server that is trusted for names in EgressFirewalls, and with --tofqdns-servers=trusted for
    /// toFQDNs, for example 10.96.0.10 or 192.0.2.53:5353 or `[2001:db8::53]:53`. Only answers of trusted
    /// servers open or deny an address there: otherwise the owner of two pods, one of them a DNS server,
    /// would open any address to every pod. Without this flag, or with the value `cluster` beside
    /// addresses: the addresses of --dns-service and of the pods behind it, and --k8s-dns-alias for it;
    /// several with commas
    #[arg(
        long,
        value_name = "ADDRESS[:PORT]|cluster",
        value_delimiter = ',',
        env = "HOLDFAST_DNS_SERVER"
    )]
    pub dns_server: Vec<DnsServer>,
    /// The cluster's DNS Service. The DNS servers behind its port 53 are trusted for names, unless
    /// --dns-server is given without `cluster`. OpenShift: openshift-dns/dns-default
    #[arg(
        long,
        value_name = "NAMESPACE/NAME",
        default_value = DNS_SERVICE,
        env = "HOLDFAST_DNS_SERVICE"
    )]
    pub dns_service: String,
}

/// Stands for the servers of `--dns-service`.
const CLUSTER: &str = "cluster";

/// One value of `--dns-server`: `cluster`, or an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DnsServer {
    /// The servers of the Service that `--dns-service` names.
    Cluster,
    /// Address and port; the port is 53 if the flag names none.
    At(SocketAddr),
}

/// DNS servers that are trusted for names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TrustedArgs {
    /// Servers that `--dns-server` names by address.
    pub(super) given: Vec<SocketAddr>,
    /// Those of the DNS Service are trusted beside them.
    pub(super) with_service: bool,
    /// The DNS Service, `namespace/name`.
    pub(super) service: String,
}

impl FromStr for DnsServer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == CLUSTER {
            return Ok(Self::Cluster);
        }
        let address = text.parse::<SocketAddr>().ok().or_else(|| {
            let address: IpAddr = text.parse().ok()?;
            Some(SocketAddr::new(address, DNS_PORT))
        });
        let example = "write for example 10.96.0.10, 192.0.2.53:5353, [2001:db8::53]:53 or cluster";
        let address = address.ok_or_else(|| format!("`{text}` is not an address; {example}"))?;
        let ip = address.ip().to_canonical();
        // Queries to loopback never leave a pod, and the other ones have many receivers.
        if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || address.port() == 0 {
            return Err(format!(
                "`{text}` is not a server that pods can ask; {example}"
            ));
        }
        Ok(Self::At(SocketAddr::new(ip, address.port())))
    }
}

impl FirewallArgs {
    /// The servers that are trusted.
    pub(super) fn settings(&self) -> Result<TrustedArgs, ConfigError> {
        let is_sound = self
            .dns_service
            .split_once('/')
            .is_some_and(|(namespace, name)| {
                !namespace.is_empty() && !name.is_empty() && !name.contains('/')
            });
        if !is_sound {
            return Err(ConfigError {
                flag: "dns-service",
                reason: format!(
                    "`{}` is not namespace/name; write for example {DNS_SERVICE}",
                    self.dns_service
                ),
            });
        }
        let given = self.dns_server.iter().filter_map(|server| match server {
            DnsServer::Cluster => None,
            DnsServer::At(address) => Some(*address),
        });
        Ok(TrustedArgs {
            given: given.collect(),
            with_service: self.dns_server.contains(&DnsServer::Cluster),
            service: self.dns_service.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dns_server_is_an_address_with_or_without_a_port() {
        for (text, address) in [
            ("10.96.0.10", "10.96.0.10:53"),
            ("192.0.2.53:5353", "192.0.2.53:5353"),
            ("2001:db8::53", "[2001:db8::53]:53"),
            ("[2001:db8::53]:54", "[2001:db8::53]:54"),
            ("::ffff:192.0.2.53", "192.0.2.53:53"),
        ] {
            assert_eq!(text.parse(), Ok(DnsServer::At(address.parse().unwrap())));
        }
        assert_eq!("cluster".parse(), Ok(DnsServer::Cluster));
        for bad in [
            "",
            "kube-dns",
            "127.0.0.1",
            "0.0.0.0",
            "10.0.0.1:0",
            "ff02::fb",
        ] {
            let error = bad.parse::<DnsServer>().unwrap_err();
            assert!(error.contains("10.96.0.10"), "{bad}: {error}");
        }
    }

    #[test]
    fn servers_by_address_stand_alone_or_beside_the_dns_service() {
        let of = |values: &[&str]| {
            let values = values.iter().map(|value| value.parse().unwrap());
            let args = FirewallArgs {
                dns_server: values.collect(),
                dns_service: DNS_SERVICE.to_owned(),
            };
            let trusted = args.settings().unwrap();
            (trusted.given.len(), trusted.with_service)
        };
        assert_eq!(of(&[]), (0, false));
        assert_eq!(of(&["192.0.2.53"]), (1, false));
        assert_eq!(of(&["cluster", "192.0.2.53"]), (1, true));
        assert_eq!(of(&["cluster"]), (0, true));
    }

    #[test]
    fn a_dns_service_is_a_namespace_and_a_name() {
        let of = |service: &str| FirewallArgs {
            dns_server: Vec::new(),
            dns_service: service.to_owned(),
        };
        assert!(of("openshift-dns/dns-default").settings().is_ok());
        for bad in ["", "kube-dns", "/kube-dns", "a/", "a/b/c"] {
            let error = of(bad).settings().unwrap_err().to_string();
            assert!(error.starts_with("--dns-service: "), "{error}");
            assert!(
                error.ends_with("write for example kube-system/kube-dns"),
                "{error}"
            );
        }
    }
}
