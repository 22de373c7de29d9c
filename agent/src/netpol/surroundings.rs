//! Settings of the node with which no rule of nftables judges packets between pods.

use agent_cluster::own_interfaces;
use agent_datapath::sysctl;

use super::ways::Bridging;
use crate::netns_lock;

/// With 0, the kernel shows packets between two ports of a bridge to no rule of the hook `forward`.
const BRIDGE_SYSCTLS: [&str; 2] = [
    "net.bridge.bridge-nf-call-iptables",
    "net.bridge.bridge-nf-call-ip6tables",
];

const OPEN: &str = "pods on one bridge are open to each other";
/// With 0, the kernel shows frames that come or leave with a VLAN tag to no rule.
const VLAN_SYSCTL: &str = "net.bridge.bridge-nf-filter-vlan-tagged";
const OPEN_TO_VLANS: &str =
    "a bridge of pods filters VLANs, and packets that pass its ports with a tag are not judged";

/// What on the node keeps policy from being in force. Empty if nothing does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Surroundings {
    pub(super) problems: Vec<String>,
    /// Another process that also enforces policy here.
    pub(super) beside: Option<String>,
}

impl Surroundings {
    /// Reads the settings. `bridging`: pods are on bridges. `may_set`: the bridges' settings may be corrected.
    pub(super) fn look(bridging: Option<Bridging>, may_set: bool) -> Self {
        let mut problems = Vec::new();
        match own_interfaces::list() {
            Ok(interfaces) if interfaces.of_services.has_ipvs => problems.push(
                "kube-proxy runs in IPVS mode (interface kube-ipvs0): no policy judges packets to Services; \
                 use its mode nftables or iptables"
                    .to_owned(),
            ),
            Ok(_) => {}
            Err(error) => problems.push(format!(
                "cannot list the node's interfaces: {error}; whether kube-proxy runs in IPVS mode is unknown"
            )),
        }
        if let Some(bridging) = bridging {
            let vlans = bridging
                .filters_vlans
                .then_some((VLAN_SYSCTL, OPEN_TO_VLANS));
            let wanted = BRIDGE_SYSCTLS.map(|name| (name, OPEN)).into_iter();
            let wanted = wanted.chain(vlans);
            problems.extend(wanted.filter_map(|(name, open)| bridge(name, open, may_set)));
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

/// The problem with a setting, if it is not 1 and is not corrected. `open`: what is open because of it.
fn bridge(name: &'static str, open: &str, may_set: bool) -> Option<String> {
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
        "{why}: {open}; load the module br_netfilter and set it to 1, or start with --set-bridge-sysctls"
    ))
}
