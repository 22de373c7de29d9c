//! Flags about names of EgressFirewalls, and about the DNS servers that are trusted for names.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use agent_core::core::config::DNS_SERVICE;
use clap::Args;

/// Port of a DNS server that is given without one.
const DNS_PORT: u16 = 53;

#[derive(Clone, Debug, Args)]
pub struct FirewallArgs {
    /// A DNS server that is trusted for names in EgressFirewalls, and with --tofqdns-servers=trusted for
    /// toFQDNs, for example 10.96.0.10 or 192.0.2.53:5353 or `[2001:db8::53]:53`. Only answers of trusted
    /// servers open or deny an address there: otherwise the owner of two pods, one of them a DNS server,
    /// would open any address to every pod. Without this flag, the servers of --dns-service are trusted: its
    /// addresses in the cluster, its --k8s-dns-alias addresses, its NodeLocal addresses, and the pods behind it.
    /// With the value `cluster`, they are trusted beside the addresses that the flag names. Separate several
    /// values by commas
    #[arg(long, value_name = "ADDRESS[:PORT]|cluster", value_delimiter = ',')]
    pub dns_server: Vec<DnsServer>,
    /// The cluster's DNS Service. The DNS servers behind its port 53 are trusted for names, unless
    /// --dns-server is given without `cluster`. OpenShift: openshift-dns/dns-default
    #[arg(long, value_name = "NAMESPACE/NAME", default_value = DNS_SERVICE, value_parser = dns_service)]
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
        // Queries to loopback never leave a pod. A multicast address is not that of one server, and no server has an
        // unspecified address or port 0.
        if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || address.port() == 0 {
            return Err(format!(
                "`{text}` is not a server that pods can ask; {example}"
            ));
        }
        Ok(Self::At(SocketAddr::new(ip, address.port())))
    }
}

impl FirewallArgs {
    /// Servers that `--dns-server` names by address.
    pub(super) fn servers(&self) -> Vec<SocketAddr> {
        let servers = self.dns_server.iter().filter_map(|server| match server {
            DnsServer::Cluster => None,
            DnsServer::At(address) => Some(*address),
        });
        servers.collect()
    }

    /// Whether `--dns-server` has the value `cluster`: the servers of the DNS Service are then trusted too. (Without
    /// `--dns-server` they are trusted in any case.)
    pub(super) fn with_service(&self) -> bool {
        self.dns_server.contains(&DnsServer::Cluster)
    }
}

/// `namespace/name` of a Service; an error ends with the example.
pub(super) fn service(text: &str, example: &str) -> Result<String, String> {
    let is_sound = text.split_once('/').is_some_and(|(namespace, name)| {
        !namespace.is_empty() && !name.is_empty() && !name.contains('/')
    });
    match is_sound {
        true => Ok(text.to_owned()),
        false => Err(format!("`{text}` is not namespace/name; {example}")),
    }
}

fn dns_service(text: &str) -> Result<String, String> {
    service(text, &format!("write for example {DNS_SERVICE}"))
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
            (args.servers().len(), args.with_service())
        };
        assert_eq!(of(&[]), (0, false));
        assert_eq!(of(&["192.0.2.53"]), (1, false));
        assert_eq!(of(&["cluster", "192.0.2.53"]), (1, true));
        assert_eq!(of(&["cluster"]), (0, true));
    }

    #[test]
    fn a_dns_service_is_a_namespace_and_a_name() {
        assert!(dns_service("openshift-dns/dns-default").is_ok());
        for bad in ["", "kube-dns", "/kube-dns", "a/", "a/b/c"] {
            let error = dns_service(bad).unwrap_err();
            assert!(
                error.ends_with("write for example kube-system/kube-dns"),
                "{error}"
            );
        }
    }
}
