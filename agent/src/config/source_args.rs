//! Flags of every command that enforces policy: where the objects of the cluster come from.

use agent_cluster::ApiSettings;
use clap::{ArgAction, Args, builder::NonEmptyStringValueParser};
use netpol::name::is_label_key;

use super::{ConfigError, FollowArgs, host_name::host_name};

/// Bytes of a cluster's name, as in Cilium.
const NAME_MAX: usize = 32;

#[derive(Clone, Debug, Args)]
pub struct SourceArgs {
    /// Read pods, namespaces, Services, nodes and policies from the Kubernetes API: with the service
    /// account of this pod, or with --kubeconfig. --policy-dir may be read as well; of two documents
    /// of one kind and name, the document of the cluster counts
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub kubernetes: bool,
    #[command(flatten)]
    pub api: ApiSettings,
    /// DaemonSet of this pod, in the namespace of its service account. When the agent is stopped and
    /// this DaemonSet was deleted, it takes everything off the node, as `holdfast-agent cleanup` does
    #[arg(long, value_name = "NAME")]
    pub daemonset: Option<String>,
    /// Name of this node, as in Node, CiliumNode and Pod documents [default: the host name]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub node_name: Option<String>,
    /// Key of the taint that keeps pods off a node until policy is in force there, set by a node pool or the
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
}

impl SourceArgs {
    /// Name of this node; the host name if `--node-name` is absent.
    pub(crate) fn node_name(&self) -> String {
        self.node_name.clone().unwrap_or_else(host_name)
    }

    /// Key of the taint that is removed from the Node once the agent is ready; `None` = no taint.
    pub(crate) fn startup_taint(&self) -> Option<&str> {
        let key = self.agent_not_ready_taint_key.as_str();
        Some(key).filter(|key| !key.is_empty())
    }

    /// The API server that the cluster is read from; none without `--kubernetes`.
    pub(super) fn kubernetes(
        &self,
        follow: &FollowArgs,
    ) -> Result<Option<ApiSettings>, ConfigError> {
        if self.kubernetes && cfg!(not(feature = "kubernetes")) {
            return Err(ConfigError::new(
                "kubernetes",
                "this program was built without the feature kubernetes; build it with `cargo build \
                     -p holdfast-agent --features kubernetes`",
            ));
        }
        if self.kubernetes {
            return Ok(Some(self.api.clone()));
        }
        let given = [
            ("kubeconfig", self.api.kubeconfig.is_some()),
            ("k8s-api-server", self.api.server.is_some()),
            ("daemonset", self.daemonset.is_some()),
            ("k8s-relay", !follow.k8s_relay.is_empty()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(None),
            Some((flag, _)) => Err(ConfigError::new(
                flag,
                "has no effect without --kubernetes; add that, or leave this out",
            )),
        }
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
            "write the key of a taint that is set for this agent, for example \
             holdfast.io/agent-not-ready; its prefix must not be one of Kubernetes' own. With an empty \
             key the agent removes no taint"
                .to_owned(),
        ),
    }
}

pub(super) fn cluster_name(text: &str) -> Result<String, String> {
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
    fn a_taint_has_a_prefix_that_is_not_one_of_kubernetes() {
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
    }
}
