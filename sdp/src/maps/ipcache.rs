//! The pinned ipcache.

use std::net::IpAddr;

use ipnet::IpNet;
use shared_maps::{
    FAMILY_IPV4, FAMILY_IPV6, IdentityId,
    ipcache::{IpcacheKey, IpcacheValue, STATIC_PREFIX_BITS},
    user::{Access, Globals, Map, MapError},
};

pub(super) use shared_maps::ipcache::NAME;

use super::tables::AgentTables;

/// The map `cilium_ipcache_v2`.
#[derive(Debug)]
pub(super) struct Ipcache(Map<IpcacheKey, IpcacheValue>);

impl Ipcache {
    pub(super) fn open(globals: &Globals) -> Result<Self, MapError> {
        globals.ipcache(Access::ReadOnly).map(Self)
    }

    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(super) fn identity(&self, key: &IpcacheKey) -> Option<IdentityId> {
        let found = self.0.get(key).inspect_err(
            |error| tracing::debug!(%error, "cannot look up an address in the ipcache"),
        );
        let value = found.ok().flatten();
        value.map(|value| IdentityId(value.sec_identity))
    }

    /// Every prefix of the local cluster.
    pub(super) fn read_whole(&self) -> Result<AgentTables, MapError> {
        let mut whole = AgentTables::default();
        for (key, value) in self.0.entries()?.found {
            if let Some(prefix) = prefix_of(&key) {
                whole.add_prefix(prefix, IdentityId(value.sec_identity));
            }
        }
        Ok(whole)
    }
}

fn prefix_of(key: &IpcacheKey) -> Option<IpNet> {
    let length = key.prefix_len.checked_sub(STATIC_PREFIX_BITS)?;
    let address = match key.family {
        FAMILY_IPV4 => IpAddr::from(*key.ip.first_chunk::<4>()?),
        FAMILY_IPV6 => IpAddr::from(key.ip),
        _ => return None,
    };
    let prefix = IpNet::new(address, u8::try_from(length).ok()?).ok()?;
    (key.cluster_id == 0).then_some(prefix)
}

#[cfg(test)]
mod tests {
    use shared_maps::user::ipcache_key;

    use super::*;

    #[test]
    fn a_key_is_read_back_into_its_prefix() {
        for text in [
            "10.1.0.0/16",
            "10.1.2.3/32",
            "0.0.0.0/0",
            "fd00::/64",
            "::1/128",
        ] {
            let prefix: IpNet = text.parse().unwrap();
            let key = ipcache_key(prefix.addr(), prefix.prefix_len());
            assert_eq!(prefix_of(&key), Some(prefix));
        }
    }
}
