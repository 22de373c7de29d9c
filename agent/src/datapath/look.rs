//! What the datapath really has, looked at a little at a time.

use shared_maps::{
    EndpointId,
    ipcache::{IpcacheKey, IpcacheValue},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
};

/// Entries of one look: system calls for less than a millisecond.
pub const BATCH: usize = 256;

/// Where to look. `…After` walks a map in its own order, [`BATCH`] entries at a time; `…At`
/// looks keys up, as the datapath does: the longest match.
#[derive(Clone, Debug, PartialEq)]
pub enum Look {
    /// Entries of the ipcache after this one.
    IpcacheAfter(Option<IpcacheKey>),
    /// These of the ipcache.
    IpcacheAt(Vec<IpcacheKey>),
    /// Entries of an endpoint's policy map after this one.
    PolicyAfter(EndpointId, Option<PolicyKey>),
    /// These of an endpoint's policy map.
    PolicyAt(EndpointId, Vec<PolicyKey>),
    /// Entries of `cilium_lxc` after this one.
    LxcAfter(Option<LxcKey>),
    /// These of `cilium_lxc`.
    LxcAt(Vec<LxcKey>),
    /// Nowhere: only the model is compared with itself.
    Nothing,
}

impl Look {
    /// Where it looks, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::IpcacheAfter(_) | Self::IpcacheAt(_) => "ipcache",
            Self::PolicyAfter(..) | Self::PolicyAt(..) => "policy map",
            Self::LxcAfter(_) | Self::LxcAt(_) => "lxc",
            Self::Nothing => "names",
        }
    }
}

/// What was seen: each key with its value, or with none if nothing matches it.
#[derive(Clone, Debug, PartialEq)]
pub enum Sight {
    /// Of the ipcache.
    Ipcache(Vec<(IpcacheKey, Option<IpcacheValue>)>),
    /// Of an endpoint's policy map.
    Policy(EndpointId, Vec<(PolicyKey, Option<PolicyValue>)>),
    /// Of `cilium_lxc`.
    Lxc(Vec<(LxcKey, Option<LxcValue>)>),
    /// Nothing was looked at.
    Nothing,
}
