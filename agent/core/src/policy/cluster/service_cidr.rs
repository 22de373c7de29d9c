//! `ServiceCIDR`: blocks of addresses of Services.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use netpol::field::{Checked, Field};
use serde_json::Value;

use crate::{
    labels::{Label, LabelSet, RESERVED},
    policy::validate::prefix,
};

/// Blocks of Services. An address in them that no Service has does not count as the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCidr {
    pub blocks: BTreeSet<IpNet>,
}

impl ServiceCidr {
    /// The label `reserved:unmanaged` for each block.
    pub(in crate::policy) fn labels(&self) -> BTreeMap<IpNet, LabelSet> {
        let label = LabelSet::new(vec![Label::new(RESERVED, "unmanaged", "")]);
        let blocks = self.blocks.iter();
        blocks.map(|block| (*block, label.clone())).collect()
    }
}

/// Reads a ServiceCIDR; a block of every address is refused.
pub(in crate::policy) fn read(value: &Value) -> Checked<ServiceCidr> {
    let spec = Field::top(value).get("spec").mapping()?;
    let mut blocks = BTreeSet::new();
    for item in spec.get("cidrs").items()? {
        let block = prefix(&item)?;
        if block.prefix_len() == 0 {
            let remedy = "write the block of kube-apiserver's --service-cluster-ip-range";
            return item.refuse("is every address", remedy);
        }
        blocks.insert(block);
    }
    Ok(ServiceCidr { blocks })
}
