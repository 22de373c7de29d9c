//! Flags about the cluster that this node is part of.

use std::net::IpAddr;

use agent_cluster::ApiSettings;
use agent_core::kubernetes::{external_ips::ExternalIps, labels::LabelRule};
use clap::{ArgAction, Args};
use ipnet::IpNet;
use netpol::name::is_label_key;

use super::firewall_args;

/// Bytes of a cluster's name, as in Cilium.
const NAME_MAX: usize = 32;

#[derive(Clone, Debug, Args)]
pub struct ClusterArgs {
    /// Read pods, namespaces, Services, nodes and policies from the Kubernetes API: with the service
    /// account of this pod, or with --kubeconfig. --policy-dir may be read as well; of two documents
    /// of one kind and name that of the cluster counts
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub kubernetes: bool,
    #[command(flatten)]
    pub api: ApiSettings,
    /// DaemonSet of this agent, in the namespace of its service account. When the agent is stopped and
    /// this DaemonSet was deleted, it takes everything off the node, as `holdfast-agent cleanup` does
    #[arg(long, value_name = "NAME")]
    pub daemonset: Option<String>,
    /// Name of this node in Node, CiliumNode and Pod documents [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Key of the taint that keeps pods off a node until its agent is ready, set by a node pool or the
    /// kubelet. With --kubernetes, the agent removes it from its Node once its sources are synced and
    /// the CNI configuration is written; other taints stay. Empty: the agent removes no taint
    #[arg(
        long,
        value_name = "KEY",
        default_value = "holdfast.io/agent-not-ready",
        value_parser = taint_key
    )]
    pub agent_not_ready_taint_key: String,
    /// Name of this node's cluster: pods of Pod documents have it as their label
    /// k8s:io.cilium.k8s.policy.cluster
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = cluster_name)]
    pub cluster_name: String,
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
    #[arg(long, value_enum, default_value_t = ExternalIps::Judge)]
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

/// Not a key of Kubernetes itself: those say that a node is broken, full or cordoned off.
fn taint_key(text: &str) -> Result<String, String> {
    let is_reserved = |prefix: &str| {
        let of = |domain: &str| prefix == domain || prefix.ends_with(&format!(".{domain}"));
        of("node.kubernetes.io")
            || of("node-role.kubernetes.io")
            || of("cloudprovider.kubernetes.io")
    };
    let is_key = match text.split_once('/') {
        Some((prefix, _)) => is_label_key(text) && !is_reserved(prefix),
        None => text.is_empty(),
    };
    match is_key {
        true => Ok(text.to_owned()),
        false => Err(
            "write the key of a taint that is set for this agent, with a prefix that is not one of \
             Kubernetes' own, for example holdfast.io/agent-not-ready, or nothing"
                .to_owned(),
        ),
    }
}

fn cluster_name(text: &str) -> Result<String, String> {
    let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let good = (1..=NAME_MAX).contains(&text.len())
        && text.bytes().all(known)
        && !text.starts_with('-')
        && !text.ends_with('-');
    match good {
        true => Ok(text.to_owned()),
        false => Err("write at most 32 lower-case letters, digits and dashes".to_owned()),
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
        for good in [
            "",
            "holdfast.io/agent-not-ready",
            "startup-taint.cluster-autoscaler.kubernetes.io/x",
        ] {
            assert_eq!(taint_key(good), Ok(good.to_owned()));
        }
        for bad in [
            "not-ready",
            "node.kubernetes.io/unschedulable",
            "node-role.kubernetes.io/x",
            "a/b/c",
        ] {
            assert!(taint_key(bad).is_err(), "{bad}");
        }
        assert_eq!(block("10.96.0.1/12"), Ok("10.96.0.0/12".parse().unwrap()));
        for bad in ["10.96.0.0", "0.0.0.0/0", "::/0", "x"] {
            assert!(block(bad).unwrap_err().contains("10.96.0.0/12"), "{bad}");
        }
    }
}
