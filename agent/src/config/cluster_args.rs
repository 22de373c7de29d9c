//! Flags about the cluster that this node is part of.

use clap::Args;

use crate::kubernetes::labels::LabelRule;

/// Octets of a cluster's name, as in Cilium.
const NAME_MAX: usize = 32;

#[derive(Clone, Debug, Args)]
pub struct ClusterArgs {
    /// Name of this node in Node, CiliumNode and Pod documents [default: the host name]
    #[arg(long, value_name = "NAME", env = "HOLDFAST_NODE_NAME")]
    pub node_name: Option<String>,
    /// Name of this node's cluster: pods of Pod documents have it as their label
    /// k8s:io.cilium.k8s.policy.cluster
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = cluster_name, env = "HOLDFAST_CLUSTER_NAME")]
    pub cluster_name: String,
    /// Which labels of a Pod document make the pod's identity, in addition to Cilium's rules, in
    /// the grammar of Cilium's --labels: [!][source:]regex, several with a space between them; the
    /// regex matches from the start of a key, and ! excludes. If a rule includes, labels that no
    /// rule includes are left out. Pods that differ only in excluded labels share an identity
    #[arg(
        long,
        value_name = "RULE",
        value_delimiter = ' ',
        env = "HOLDFAST_LABELS"
    )]
    pub labels: Vec<LabelRule>,
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
