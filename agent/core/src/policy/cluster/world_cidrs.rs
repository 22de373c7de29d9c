//! `CiliumWorldCIDRs`: blocks of addresses outside of the cluster.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::{IpNet, Ipv4Net};
use netpol::field::{Checked, Field};
use serde_json::Value;
use shared_maps::world::MAX_ENTRIES;

use crate::policy::validate::{only, prefix};

/// Fields that have a meaning.
pub(in crate::policy) const KEPT: &[&str] = &["spec.cidrs"];

/// Blocks to which packets are not wrapped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorldCidrs {
    pub blocks: Arc<BTreeSet<Ipv4Net>>,
}

/// Reads the blocks. One that cannot be used refuses all of them: packets to its addresses would be wrapped.
pub(in crate::policy) fn read(value: &Value) -> Checked<WorldCidrs> {
    let spec = Field::top(value).get("spec");
    if spec.value.is_none() {
        let remedy = "add spec with cidrs, the blocks outside of the cluster";
        return spec.refuse("is missing", remedy);
    }
    only(&spec, &["cidrs"], &[])?;
    let cidrs = spec.get("cidrs");
    if cidrs.value.is_none() {
        let remedy = "add the blocks outside of the cluster, or [] if there are none";
        return cidrs.refuse("is missing", remedy);
    }
    let mut blocks = BTreeSet::new();
    for item in cidrs.items()? {
        let text = item.text()?;
        if text.parse::<IpAddr>().is_ok() {
            let remedy = "write a block, such as 192.0.2.7/32 for one address";
            return item.refuse(format!("`{text}` has no prefix length"), remedy);
        }
        match prefix(&item)? {
            IpNet::V4(block) => blocks.insert(block),
            IpNet::V6(block) => {
                let reason = format!("`{block}` is a block of IPv6");
                let remedy = "remove it: the tunnel between nodes carries IPv4 only";
                return item.refuse(reason, remedy);
            }
        };
    }
    if u32::try_from(blocks.len()).is_ok_and(|count| count <= MAX_ENTRIES) {
        return Ok(WorldCidrs {
            blocks: Arc::new(blocks),
        });
    }
    let reason = format!("has {} blocks, more than {MAX_ENTRIES}", blocks.len());
    cidrs.refuse(reason, "write wider blocks that contain several of these")
}
