//! What objects of the cluster say about the tunnel: CiliumWorldCIDRs, and the modes of nodes.

use std::{collections::BTreeMap, sync::Arc};

use super::blocks::{Blocks, TooMany};
use crate::{
    policy::{
        cluster::world_cidrs::WorldCidrs,
        document::{Body, PolicyDocument},
    },
    tunnel_mode::TunnelMode,
};

pub use crate::policy::cluster::node::HIGH_SCALE as ANNOTATION;

/// The blocks outside of the cluster, as far as they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum World {
    /// The objects are not listed yet.
    #[default]
    Unknown,
    /// There is no object.
    Absent,
    /// The blocks of all objects.
    Blocks(Arc<Blocks>),
    /// The objects have more blocks than the map holds.
    TooMany(TooMany),
}

/// What the objects say at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HighScaleView {
    pub world: World,
    /// Other nodes that have a CiliumNode, and their modes as those name them. None: it names none that is known.
    pub nodes: Arc<BTreeMap<String, Option<TunnelMode>>>,
}

impl HighScaleView {
    /// Nodes that do not unwrap packets: those of the tunnel are lost there.
    pub fn behind(&self) -> impl Iterator<Item = &str> {
        let is_behind = |mode: &Option<TunnelMode>| !mode.is_some_and(TunnelMode::unwraps);
        let behind = self.nodes.iter().filter(move |(_, mode)| is_behind(mode));
        behind.map(|(name, _)| name.as_str())
    }
}

/// The objects, by key.
#[derive(Debug, Default)]
pub(crate) struct HighScaleObjects {
    /// Name of this node.
    own: String,
    world: BTreeMap<String, WorldCidrs>,
    nodes: BTreeMap<String, Option<TunnelMode>>,
    is_listed: bool,
    is_changed: bool,
}

impl HighScaleObjects {
    /// No objects yet. `own` is the name of this node.
    pub(crate) fn new(own: &str) -> Self {
        Self {
            own: own.to_owned(),
            ..Self::default()
        }
    }

    /// Takes a document that is new or changed.
    pub(crate) fn put(&mut self, document: &PolicyDocument) {
        match &document.body {
            Body::World(blocks) => {
                let before = self.world.insert(document.key.clone(), blocks.clone());
                self.is_changed |= before.as_ref() != Some(blocks);
            }
            Body::Node(node) if is_of_agent(&document.key) && node.name != self.own => {
                let mode = node.high_scale;
                let before = self.nodes.insert(node.name.clone(), mode);
                self.is_changed |= before != Some(mode);
            }
            _ => {}
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.is_changed |= self.world.remove(key).is_some();
        if let Some(name) = key.strip_prefix(CILIUM_NODE) {
            self.is_changed |= self.nodes.remove(name).is_some();
        }
    }

    /// The documents were listed once.
    pub(crate) fn set_listed(&mut self) {
        self.is_changed |= !std::mem::replace(&mut self.is_listed, true);
    }

    /// What the objects say, if it changed since the last call.
    pub(crate) fn take(&mut self) -> Option<HighScaleView> {
        if !std::mem::take(&mut self.is_changed) {
            return None;
        }
        Some(HighScaleView {
            world: self.world(),
            nodes: Arc::new(self.nodes.clone()),
        })
    }

    fn world(&self) -> World {
        if !self.is_listed {
            return World::Unknown;
        }
        if self.world.is_empty() {
            return World::Absent;
        }
        match Blocks::of(self.world.values().flat_map(|one| one.blocks.iter())) {
            Ok(blocks) => World::Blocks(Arc::new(blocks)),
            Err(too_many) => World::TooMany(too_many),
        }
    }
}

/// Keys of CiliumNodes begin so.
const CILIUM_NODE: &str = "CiliumNode/";

fn is_of_agent(key: &str) -> bool {
    key.starts_with(CILIUM_NODE)
}

#[cfg(test)]
mod tests;
