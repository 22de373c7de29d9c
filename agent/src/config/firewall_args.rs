//! Flags about names of EgressFirewalls.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use clap::Args;

use super::ConfigError;
use crate::core::config::DNS_SERVICE;

/// Port of a DNS server that is given without one.
const DNS_PORT: u16 = 53;

#[derive(Clone, Debug, Args)]
pub struct FirewallArgs {
    /// A DNS server that is trusted for names in EgressFirewalls, for example 10.96.0.10 or
    /// 192.0.2.53:5353 or `[2001:db8::53]:53`. Only answers of trusted servers open or deny an address
    /// there: otherwise the owner of two pods, one of them a DNS server, would open any address to
    /// every pod. Without this flag: the addresses of --dns-service and of the pods behind it, and
    /// --k8s-dns-alias for it; several with commas
    #[arg(
        long,
        value_name = "ADDRESS[:PORT]",
        value_delimiter = ',',
        env = "HOLDFAST_DNS_SERVER"
    )]
    pub dns_server: Vec<DnsServer>,
    /// The cluster's DNS Service. The DNS servers behind its port 53 are trusted for names in
    /// EgressFirewalls, unless --dns-server is given. OpenShift: openshift-dns/dns-default
    #[arg(
        long,
        value_name = "NAMESPACE/NAME",
        default_value = DNS_SERVICE,
        env = "HOLDFAST_DNS_SERVICE"
    )]
    pub dns_service: String,
}

/// Address and port of a DNS server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DnsServer(pub SocketAddr);

impl FromStr for DnsServer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = text.parse::<SocketAddr>().ok().or_else(|| {
            let address: IpAddr = text.parse().ok()?;
            Some(SocketAddr::new(address, DNS_PORT))
        });
        let example = "write for example 10.96.0.10, 192.0.2.53:5353 or [2001:db8::53]:53";
        let address = address.ok_or_else(|| format!("`{text}` is not an address; {example}"))?;
        let ip = address.ip().to_canonical();
        // Queries to loopback never leave a pod, and the other ones have many receivers.
        if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || address.port() == 0 {
            return Err(format!(
                "`{text}` is not a server that pods can ask; {example}"
            ));
        }
        Ok(Self(SocketAddr::new(ip, address.port())))
    }
}

impl FirewallArgs {
    /// The servers given, and the DNS Service, `namespace/name`.
    pub(super) fn settings(self) -> Result<(Vec<SocketAddr>, String), ConfigError> {
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
        let servers = self
            .dns_server
            .into_iter()
            .map(|DnsServer(address)| address);
        Ok((servers.collect(), self.dns_service))
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
            assert_eq!(text.parse(), Ok(DnsServer(address.parse().unwrap())));
        }
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
