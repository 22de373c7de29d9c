//! The well-known maps below one BPF root.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use super::{Access, Map, MapError, MapKind};
use crate::{
    EndpointId, ipcache,
    ipcache::{IpcacheKey, IpcacheValue, IpcacheValueV1},
    lxc,
    lxc::{LxcKey, LxcValue},
    pin, policy,
    policy::{PolicyKey, PolicyValue},
};

/// Key of an address in `cilium_lxc`.
pub fn lxc_key(ip: IpAddr) -> LxcKey {
    match ip {
        IpAddr::V4(ip) => LxcKey::v4(ip.octets()),
        IpAddr::V6(ip) => LxcKey::v6(ip.octets()),
    }
}

/// Address of a key of `cilium_lxc`; none if its family is unknown.
pub fn lxc_address(key: &LxcKey) -> Option<IpAddr> {
    address_of(key.family, key.ip)
}

/// Prefix of a key of the ipcache, as its address and length; none if its family is unknown or it is
/// of another cluster.
pub fn ipcache_prefix(key: &IpcacheKey) -> Option<(IpAddr, u8)> {
    let len = key.prefix_len.checked_sub(ipcache::STATIC_PREFIX_BITS)?;
    let len = u8::try_from(len).ok().filter(|_| key.cluster_id == 0)?;
    Some((address_of(key.family, key.ip)?, len))
}

/// An address of this family; none if the family is unknown.
pub fn address_of(family: u8, ip: [u8; 16]) -> Option<IpAddr> {
    match family {
        crate::FAMILY_IPV4 => ip.first_chunk::<4>().map(|v4| IpAddr::from(*v4)),
        crate::FAMILY_IPV6 => Some(IpAddr::from(ip)),
        _ => None,
    }
}

/// Key of a prefix in the ipcache. `ip` must be masked to `len`.
pub fn ipcache_key(ip: IpAddr, len: u8) -> IpcacheKey {
    match ip {
        IpAddr::V4(ip) => IpcacheKey::v4(ip.octets(), len),
        IpAddr::V6(ip) => IpcacheKey::v6(ip.octets(), len),
    }
}

/// Paths of the well-known maps below one BPF root (`/sys/fs/bpf` by default).
#[derive(Clone, Debug)]
pub struct Globals {
    root: PathBuf,
}

impl Globals {
    /// Tables of the BPF file system, or of a directory in it, at `root`.
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// The BPF root that was given to [`Self::new`].
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Directory of the map pins.
    pub fn dir(&self) -> PathBuf {
        self.root.join(pin::GLOBALS)
    }

    /// Path of the map called `name`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// Path of an endpoint's policy map.
    pub fn policy_path(&self, endpoint: EndpointId) -> PathBuf {
        self.path(&format!("{}{:05}", policy::NAME_PREFIX, endpoint.0))
    }

    /// Opens the map `cilium_lxc` and checks its layout.
    pub fn lxc(&self, access: Access) -> Result<Map<LxcKey, LxcValue>, MapError> {
        Map::open(&self.path(lxc::NAME), MapKind::Hash, access)
    }

    /// Opens the map `cilium_ipcache_v2` and checks its layout.
    pub fn ipcache(&self, access: Access) -> Result<Map<IpcacheKey, IpcacheValue>, MapError> {
        Map::open(&self.path(ipcache::NAME), MapKind::LpmTrie, access)
    }

    /// Opens the older map `cilium_ipcache` and checks its layout.
    pub fn ipcache_v1(&self, access: Access) -> Result<Map<IpcacheKey, IpcacheValueV1>, MapError> {
        Map::open(&self.path(ipcache::NAME_V1), MapKind::LpmTrie, access)
    }

    /// Opens an endpoint's policy map.
    pub fn policy(
        &self,
        endpoint: EndpointId,
        access: Access,
    ) -> Result<Map<PolicyKey, PolicyValue>, MapError> {
        Map::open(&self.policy_path(endpoint), MapKind::LpmTrie, access)
    }
}
