//! Queries for what the datapath really has, one batch at a time.

use shared_maps::{
    EndpointId,
    ipcache::{IpcacheKey, IpcacheValue},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
};

use crate::datapath::attachment::Attachment;

/// Maximum number of entries in one query: its system calls take less than a millisecond.
pub const BATCH: usize = 256;

/// Maximum number of endpoints in one query for programs: each takes a dozen system calls.
pub(crate) const PROGRAMS_BATCH: usize = 32;

/// A fault of an endpoint's programs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramFault {
    /// The interface with this index is gone.
    #[error("interface {0} is gone")]
    NoInterface(u32),
    /// The pin of a program's link is gone.
    #[error("the pin of the link of {program} is gone")]
    Unpinned { program: &'static str },
    /// The link is not attached to the interface any more.
    #[error("{program} is not attached: another program detached it")]
    Detached { program: &'static str },
    /// Another program was put into the link.
    #[error("the link of {program} holds another program ({found})")]
    Replaced {
        program: &'static str,
        /// The other program, by name and number.
        found: String,
    },
    /// Another program sees the packets first, and may let them pass unjudged.
    #[error("program {first} runs before {program} and may pass packets without a policy verdict")]
    NotFirst {
        program: &'static str,
        /// The other program, by name and number.
        first: String,
    },
    /// Packets that skip the programs would pass.
    #[error("the interface is not in group {0}, so packets that skip the programs pass")]
    OutOfGroup(u32),
    /// The programs do not find the endpoint's settings, and drop its packets.
    #[error("the programs do not find the endpoint's settings")]
    NoSettings,
    /// The policy map's pin is gone, or is another map.
    #[error("the pin of the policy map is gone or is another map")]
    PolicyPin,
    /// The kernel does not answer.
    #[error("cannot inspect {program}: {reason}")]
    Unknown {
        program: &'static str,
        reason: String,
    },
}

/// A query for a part of the datapath. `…After` walks a map in its own order, [`BATCH`] entries at
/// a time. `…At` looks keys up as the datapath does: the longest match.
#[derive(Clone, Debug, PartialEq)]
pub enum MapQuery {
    /// Entries of the ipcache after this one.
    IpcacheAfter(Option<IpcacheKey>),
    /// Entries of the ipcache that match these keys.
    IpcacheAt(Vec<IpcacheKey>),
    /// Entries of an endpoint's policy map after this one.
    PolicyAfter(EndpointId, Option<PolicyKey>),
    /// These entries of an endpoint's policy map.
    PolicyAt(EndpointId, Vec<PolicyKey>),
    /// Entries of `cilium_lxc` after this one.
    LxcAfter(Option<LxcKey>),
    /// Entries of `cilium_lxc` that match these keys.
    LxcAt(Vec<LxcKey>),
    /// The programs of these endpoints, their links, and the pins of their policy maps.
    Programs(Vec<Attachment>),
    /// No part: only the model is compared with itself.
    Nothing,
}

impl MapQuery {
    /// The part that it queries, for log lines.
    pub fn name(&self) -> &'static str {
        match self {
            Self::IpcacheAfter(_) | Self::IpcacheAt(_) => "ipcache",
            Self::PolicyAfter(..) | Self::PolicyAt(..) => "policy map",
            Self::LxcAfter(_) | Self::LxcAt(_) => "lxc",
            Self::Programs(_) => "programs",
            Self::Nothing => "names",
        }
    }
}

/// The answer to a [`MapQuery`]: each key with its value, or with `None` if nothing matches it.
#[derive(Clone, Debug, PartialEq)]
pub enum MapEntries {
    Ipcache(Vec<(IpcacheKey, Option<IpcacheValue>)>),
    /// Entries of an endpoint's policy map.
    Policy(EndpointId, Vec<(PolicyKey, Option<PolicyValue>)>),
    Lxc(Vec<(LxcKey, Option<LxcValue>)>),
    /// Each of these endpoints, with the faults of its programs.
    Programs(Vec<(EndpointId, Vec<ProgramFault>)>),
    /// Nothing was read: the query was [`MapQuery::Nothing`], or the datapath has no maps.
    Nothing,
}
