//! Flags about the objects of the cluster that this node is part of.

use std::net::IpAddr;

use agent_core::kubernetes::{external_ips::ExternalIps, labels::LabelRule};
use clap::Args;
use ipnet::IpNet;

use super::{firewall_args, source_args::SourceArgs};

#[derive(Clone, Debug, Args)]
pub struct ClusterArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// Which labels of a Pod document make the pod's identity, in addition to Cilium's rules, in
    /// the grammar of Cilium's --labels: `[!][source:]regex`, several with a space between them; the
    /// regex matches from the start of a key, and ! excludes. If a rule includes, labels that no
    /// rule includes are left out. Pods that differ only in excluded labels share an identity
    #[arg(long, value_name = "RULE", value_delimiter = ' ')]
    pub labels: Vec<LabelRule>,
    /// A further address of a Service, for example 169.254.20.10=kube-system/kube-dns: where
    /// NodeLocal DNSCache listens, so that policy about the pods behind the Service holds there too;
    /// several with commas
    #[arg(long, value_name = "ADDRESS=NAMESPACE/NAME", value_delimiter = ',', value_parser = service_alias)]
    pub k8s_dns_alias: Vec<(IpAddr, String)>,
    /// What spec.externalIPs of Services mean. The author of a Service may write any address there; an
    /// address of a node, a pod, an API server, another Service or a DNS server that a policy names
    /// is never judged as the Service. Where they are not needed, enable Kubernetes' admission plugin
    /// DenyServiceExternalIPs
    #[arg(long, value_enum, value_name = "HOW", default_value_t = ExternalIps::Judge)]
    pub k8s_external_ips: ExternalIps,
    /// A block of addresses of Services, as kube-apiserver's --service-cluster-ip-range. An address
    /// in it that no Service document has is reserved:unmanaged, not the world, and no block or name
    /// of a policy selects it; several with commas
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = block)]
    pub k8s_service_cidr: Vec<IpNet>,
    /// A block of addresses of pods, of all nodes. An address in it that is no endpoint's and that no
    /// document describes is reserved:unmanaged, not the world, and no block or name of a policy
    /// selects it. A backend of a Service that names a pod which no document describes is left out
    /// for 30 seconds in these blocks, and judged by its address outside of them. Blocks of Node and
    /// CiliumNode documents count too; several with commas
    #[arg(
        long,
        visible_alias = "cluster-cidr",
        value_name = "CIDR",
        value_delimiter = ',',
        value_parser = block
    )]
    pub pod_cidr: Vec<IpNet>,
}

/// A further address of a Service, with the Service as `namespace/name`.
fn service_alias(text: &str) -> Result<(IpAddr, String), String> {
    let example = "write for example 169.254.20.10=kube-system/kube-dns";
    let (address, service) = text.split_once('=').ok_or(example)?;
    let address: IpAddr = address
        .parse()
        .map_err(|_| format!("`{address}` is not an address; {example}"))?;
    if address.is_loopback() || address.is_unspecified() || address.is_multicast() {
        return Err(format!(
            "`{address}` is not an address of one machine; {example}"
        ));
    }
    let service = firewall_args::service(service, example)?;
    Ok((address, service))
}

fn block(text: &str) -> Result<IpNet, String> {
    let block: IpNet = text
        .parse()
        .map_err(|_| "write a block of addresses, for example 10.96.0.0/12".to_owned())?;
    match block.prefix_len() {
        0 => Err(
            "a block of the cluster cannot be every address; write for example 10.96.0.0/12"
                .to_owned(),
        ),
        _ => Ok(block.trunc()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_and_blocks_are_read_or_refused_with_an_example() {
        let (_, service) = service_alias("169.254.20.10=kube-system/kube-dns").unwrap();
        assert_eq!(service, "kube-system/kube-dns");
        for bad in [
            "",
            "169.254.20.10",
            "x=a/b",
            "127.0.0.1=a/b",
            "10.0.0.1=a",
            "10.0.0.1=/b",
            "10.0.0.1=a/b/c",
        ] {
            let error = service_alias(bad).unwrap_err();
            assert!(
                error.contains("169.254.20.10=kube-system/kube-dns"),
                "{bad}: {error}"
            );
        }
        assert_eq!(block("10.96.0.1/12"), Ok("10.96.0.0/12".parse().unwrap()));
        for bad in ["10.96.0.0", "0.0.0.0/0", "::/0", "x"] {
            assert!(block(bad).unwrap_err().contains("10.96.0.0/12"), "{bad}");
        }
    }
}
