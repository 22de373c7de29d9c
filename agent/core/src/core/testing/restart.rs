//! What a run of the agent leaves behind, and a next run that starts from it.

use super::node::Node;
use crate::{
    core::{CoreConfig, Restored},
    datapath::memory::MemoryDatapath,
    endpoint::config_file,
    fqdn::cleaned,
    identity::checkpoint,
};

/// What a start finds.
pub fn left_behind(datapath: &MemoryDatapath, interfaces: &[u32]) -> Restored {
    let local = datapath.checkpoint.as_deref().map(checkpoint::parse_local);
    let cleaned = datapath.cleaned.as_deref().map(cleaned::parse);
    Restored {
        now: Default::default(),
        local_identities: local.transpose().unwrap().unwrap_or_default(),
        endpoint_identities: datapath.endpoint_identities(),
        cleaned: cleaned.transpose().unwrap().unwrap_or_default(),
        endpoints: datapath
            .files
            .values()
            .map(|text| config_file::parse(text).unwrap())
            .collect(),
        ipcache: datapath
            .ipcache
            .iter()
            .map(|(key, value)| (*key, *value))
            .collect(),
        lxc: datapath
            .lxc
            .iter()
            .map(|(key, value)| (*key, *value))
            .collect(),
        policy_maps: datapath
            .policy
            .iter()
            .map(|(id, map)| (*id, map.iter().map(|(key, value)| (*key, *value)).collect()))
            .collect(),
        pre_cache: Vec::new(),
        policy_map_sizes: Default::default(),
        programs: Default::default(),
        under_programs: Default::default(),
        interfaces: interfaces.iter().copied().collect(),
    }
}

pub fn again(node: &Node, config: CoreConfig, interfaces: &[u32]) -> Node {
    let restored = left_behind(&node.datapath, interfaces);
    let restored = Restored {
        now: node.now.plus_secs(2),
        ..restored
    };
    let datapath = MemoryDatapath {
        log: Vec::new(),
        ..node.datapath.clone()
    };
    Node::with(CoreConfig { start: 2, ..config }, restored, datapath)
}
