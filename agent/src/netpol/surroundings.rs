//! Settings of the node with which no rule of nftables judges packets between pods.

use agent_cluster::own_interfaces;
use agent_datapath::sysctl;

use crate::netns_lock;

/// With 0, the kernel shows packets between two ports of a bridge to no rule of the hook `forward`.
const BRIDGE_SYSCTLS: [&str; 2] = [
    "net.bridge.bridge-nf-call-iptables",
    "net.bridge.bridge-nf-call-ip6tables",
];

/// What of the node keeps policy from being in force. Empty: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Surroundings {
    pub(super) problems: Vec<String>,
    /// A process that enforces policy besides this one.
    pub(super) beside: Option<String>,
}

impl Surroundings {
    /// Looks. `has_bridge`: pods are on a bridge. `may_set`: the bridges' settings may be corrected.
    pub(super) fn look(has_bridge: bool, may_set: bool) -> Self {
        let mut problems = Vec::new();
        match own_interfaces::list() {
            Ok(interfaces) if interfaces.of_services.has_ipvs => problems.push(
                "kube-proxy runs in IPVS mode (interface kube-ipvs0): packets to Services pass no policy; \
                 use its mode nftables or iptables"
                    .to_owned(),
            ),
            Ok(_) => {}
            Err(error) => problems.push(format!(
                "cannot list the node's interfaces: {error}; whether kube-proxy runs in IPVS mode is unknown"
            )),
        }
        if has_bridge {
            problems.extend(
                BRIDGE_SYSCTLS
                    .into_iter()
                    .filter_map(|name| bridge(name, may_set)),
            );
        }
        Self {
            problems,
            beside: netns_lock::run().ok().flatten().map(|pid| beside(&pid)),
        }
    }
}

fn beside(pid: &str) -> String {
    format!(
        "`holdfast-agent run` (pid {pid}) runs in this network namespace too: packets pass its programs and \
         this table, and both have to allow them; stop this process, and `run` deletes the table once each \
         pod is an endpoint"
    )
}

fn bridge(name: &'static str, may_set: bool) -> Option<String> {
    if sysctl::is_one(name) {
        return None;
    }
    let why = match may_set.then(|| sysctl::set(name)) {
        Some(Ok(())) => {
            tracing::info!(name, "set to 1, because pods are on a bridge");
            return None;
        }
        Some(Err(error)) => error.to_string(),
        None => format!("sysctl {name} is not 1"),
    };
    Some(format!(
        "{why}: pods on one bridge are open to each other; load the module br_netfilter and set it to 1, \
         or start with --set-bridge-sysctls"
    ))
}
