//! The pinned ipcache, in either layout.

use ipnet::IpNet;
use shared_maps::{
    IdentityId, ipcache,
    ipcache::{IpcacheKey, IpcacheValue, IpcacheValueV1},
    user::{Access, Globals, Map, MapError, ipcache_prefix},
};

use super::tables::AgentTables;

/// The ipcache map of this release, or of earlier releases.
#[derive(Debug)]
pub(super) enum Ipcache {
    V2(Map<IpcacheKey, IpcacheValue>),
    V1(Map<IpcacheKey, IpcacheValueV1>),
}

impl Ipcache {
    /// Opens whichever of the two maps is pinned.
    pub(super) fn open(globals: &Globals) -> Result<Self, MapError> {
        match globals.ipcache(Access::ReadOnly) {
            Err(MapError::NotPinned(path)) => match globals.ipcache_v1(Access::ReadOnly) {
                Ok(map) => Ok(Self::V1(map)),
                Err(MapError::NotPinned(_)) => Err(MapError::NotPinned(path)),
                Err(error) => Err(error),
            },
            other => other.map(Self::V2),
        }
    }

    pub(super) fn id(&self) -> u32 {
        match self {
            Self::V2(map) => map.id(),
            Self::V1(map) => map.id(),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::V2(_) => ipcache::NAME,
            Self::V1(_) => ipcache::NAME_V1,
        }
    }

    pub(super) fn identity(&self, key: &IpcacheKey) -> Option<IdentityId> {
        let found = match self {
            Self::V2(map) => map.get(key).map(|found| found.map(|v| v.sec_identity)),
            Self::V1(map) => map.get(key).map(|found| found.map(|v| v.sec_identity)),
        };
        found
            .inspect_err(
                |error| tracing::debug!(%error, "cannot look up an address in the ipcache"),
            )
            .ok()
            .flatten()
            .map(IdentityId)
    }

    /// Every prefix of the local cluster.
    pub(super) fn read_whole(&self) -> Result<AgentTables, MapError> {
        let mut whole = AgentTables::default();
        let mut add = |key: &IpcacheKey, identity: u32| {
            if let Some(prefix) = prefix_of(key) {
                whole.add_prefix(prefix, IdentityId(identity));
            }
        };
        match self {
            Self::V2(map) => {
                for (key, value) in map.entries()?.found {
                    add(&key, value.sec_identity);
                }
            }
            Self::V1(map) => {
                for (key, value) in map.entries()?.found {
                    add(&key, value.sec_identity);
                }
            }
        }
        Ok(whole)
    }
}

fn prefix_of(key: &IpcacheKey) -> Option<IpNet> {
    let (address, length) = ipcache_prefix(key)?;
    IpNet::new(address, length).ok()
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
