//! What endpoints attempted beyond their quotas in the datapath.

use serde::{Deserialize, Serialize};
use shared_maps::{
    EndpointId,
    event::Counter,
    quota::{self, Limit, QuotaKey},
    user::{Access, Globals, Map, MapError, MapKind},
};

/// A quota that an endpoint reached.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct QuotaView {
    pub endpoint: u16,
    pub key: String,
    /// The [`Limit`] that was reached, as text ([`Limit::as_str`]).
    pub quota: String,
    /// Packets or entries beyond the quota, since the endpoint was added.
    pub beyond: u64,
}

/// Quotas that `endpoints` (number, key) reached.
pub fn reached(
    maps: &Globals,
    endpoints: Vec<(EndpointId, String)>,
) -> Result<Vec<QuotaView>, MapError> {
    let path = maps.path(quota::NAME);
    let map: Map<QuotaKey, Counter> = Map::open(&path, MapKind::LruPerCpuHash, Access::ReadOnly)?;
    let mut views = Vec::new();
    for (endpoint, key) in endpoints {
        for limit in Limit::ALL {
            let values = map.get_per_cpu(&QuotaKey {
                endpoint: endpoint.0,
                limit: limit as u8,
                pad: 0,
            })?;
            let beyond = values.iter().flatten().map(|value| value.packets).sum();
            if beyond > 0 {
                views.push(QuotaView {
                    endpoint: endpoint.0,
                    key: key.clone(),
                    quota: limit.as_str().to_owned(),
                    beyond,
                });
            }
        }
    }
    Ok(views)
}
