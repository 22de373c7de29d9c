//! Operations that bring the datapath from its present to its intended state, in order.

use std::path::PathBuf;

use ipnet::IpNet;
use shared_maps::{
    EndpointId,
    ipcache::{IpcacheKey, IpcacheValue},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
    user::lxc_address,
};

use super::{
    late_text::LateText,
    map_query::{MapEntries, MapQuery},
};
use crate::{
    datapath::attachment::Attachment, identity::endpoint_checkpoint::EndpointWrite,
    ipcache::table::prefix_of,
};

/// One step. Steps run in order; a failed one is reported and the rest go on.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Local (CIDR and FQDN) identities, as `local_allocator_state.json` has them: a number
    /// must be on disk before a map uses it.
    Checkpoint(String),
    /// Endpoint identities, under the same rule as [`Self::Checkpoint`].
    CheckpointEndpoints(EndpointWrite),
    /// Write an endpoint's `ep_config.json`.
    WriteEndpoint(EndpointId, String),
    /// Write an endpoint's `ep_config.json` for names alone. It may be done after the plan:
    /// [`crate::core::Event::NamesKept`] with this number says when it is done. A later step about
    /// the same file is carried out after it.
    KeepNames(EndpointId, u64, LateText),
    /// Write the names that are to be forgotten, as `cleaned_names.json` has them.
    KeepCleaned(String),
    /// Remove an endpoint's directory.
    RemoveEndpoint(EndpointId),
    /// Make (or open) an endpoint's policy map.
    CreatePolicyMap(EndpointId),
    /// Remove an endpoint's policy map.
    RemovePolicyMap(EndpointId),
    /// Set an entry of a policy map.
    SetPolicy(EndpointId, PolicyKey, PolicyValue),
    /// Remove an entry of a policy map.
    UnsetPolicy(EndpointId, PolicyKey),
    /// Set an entry of `cilium_lxc`.
    SetLxc(LxcKey, LxcValue),
    /// Remove an entry of `cilium_lxc`.
    UnsetLxc(LxcKey),
    /// Set an entry of the ipcache.
    SetIpcache(IpcacheKey, IpcacheValue),
    /// Remove an entry of the ipcache.
    UnsetIpcache(IpcacheKey),
    /// Load the endpoint's programs and attach them, replacing older ones without a gap.
    Attach(Attachment),
    /// Detach the endpoint's programs.
    Detach(EndpointId),
}

impl Step {
    /// What it does, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Checkpoint(_) => "write the identities' checkpoint",
            Self::CheckpointEndpoints(_) => "write the endpoints' identities",
            Self::WriteEndpoint(..) => "write the endpoint's file",
            Self::KeepNames(..) => "write the endpoint's names",
            Self::KeepCleaned(_) => "write the cleaned names",
            Self::RemoveEndpoint(_) => "remove the endpoint's directory",
            Self::CreatePolicyMap(_) => "make the policy map",
            Self::RemovePolicyMap(_) => "remove the policy map",
            Self::SetPolicy(..) => "set a policy map's entry",
            Self::UnsetPolicy(..) => "remove a policy map's entry",
            Self::SetLxc(..) => "set the endpoint's address",
            Self::UnsetLxc(_) => "remove an endpoint's address",
            Self::SetIpcache(..) => "set an address in the ipcache",
            Self::UnsetIpcache(_) => "remove an address from the ipcache",
            Self::Attach(_) => "attach the programs",
            Self::Detach(_) => "detach the programs",
        }
    }

    /// The endpoint that it is about, if it is about one.
    pub fn endpoint(&self) -> Option<EndpointId> {
        match self {
            Self::WriteEndpoint(id, _)
            | Self::KeepNames(id, ..)
            | Self::RemoveEndpoint(id)
            | Self::CreatePolicyMap(id)
            | Self::RemovePolicyMap(id)
            | Self::SetPolicy(id, ..)
            | Self::UnsetPolicy(id, _)
            | Self::Detach(id) => Some(*id),
            Self::SetLxc(_, value) => Some(EndpointId(value.lxc_id)),
            Self::Attach(attachment) => Some(attachment.endpoint),
            Self::Checkpoint(_)
            | Self::CheckpointEndpoints(_)
            | Self::KeepCleaned(_)
            | Self::UnsetLxc(_)
            | Self::SetIpcache(..)
            | Self::UnsetIpcache(_) => None,
        }
    }

    /// The address that it is about, if it is about one.
    pub fn prefix(&self) -> Option<IpNet> {
        match self {
            Self::SetIpcache(key, _) | Self::UnsetIpcache(key) => prefix_of(key),
            Self::SetLxc(key, _) | Self::UnsetLxc(key) => lxc_address(key).map(IpNet::from),
            _ => None,
        }
    }
}

/// Why a step of a plan failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Map(#[from] shared_maps::user::MapError),
    /// The programs could not be loaded or attached.
    #[error("programs of endpoint {endpoint}: {reason}")]
    Program {
        endpoint: EndpointId,
        reason: String,
    },
    /// A file could not be written or removed.
    #[error("{path}: {source}", path = .path.display())]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    /// Not carried out because a step that it depends on failed.
    #[error("not carried out: an earlier step it depends on failed")]
    Skipped,
}

/// Result of a [`Step::KeepNames`], which may come after its plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamesWritten {
    pub endpoint: EndpointId,
    /// Number of the write, from [`Step::KeepNames`].
    pub number: u64,
    /// Why the file could not be written; `None` if it is on disk.
    pub failure: Option<String>,
}

/// A callback that wakes a task.
pub type Wake = Box<dyn Fn() + Send>;

/// Carries out steps: the kernel and the state directory, or memory in tests.
pub trait Datapath: Send {
    /// Carries out one step.
    fn apply(&mut self, step: &Step) -> Result<(), StepError>;

    /// Does what is done once for all steps of a plan, after they were carried out.
    fn end_plan(&mut self) {}

    /// Has `freed` called after each plan that took an address from an endpoint.
    fn tell_freed_addresses(&mut self, _freed: Wake) {}

    /// Reads the entries that `query` names. A datapath without maps has none.
    fn read_entries(&mut self, _query: &MapQuery) -> Result<MapEntries, StepError> {
        Ok(MapEntries::Nothing)
    }
}
