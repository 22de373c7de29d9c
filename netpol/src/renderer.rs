//! The interface to which the rules of a node's pods are given.

use std::collections::BTreeMap;

use crate::{
    configurator::{Configurator, PodRules},
    pod::PodId,
    processor::PodPolicies,
    render::tables::{Change, Tables, View},
};

/// Brings a node's policies into force, or exports them.
pub trait Renderer {
    /// Takes a change completely or not at all. After an error, the next change is relative to the
    /// last change that it took.
    fn commit(&mut self, txn: &Txn<'_>) -> Result<(), RenderError>;
}

/// Why a renderer has not taken a change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{renderer}: {reason}")]
pub struct RenderError {
    /// The renderer's name, for people.
    pub renderer: &'static str,
    /// The reason, with the remedy if there is one.
    pub reason: String,
}

/// A change of a node's pods.
#[derive(Debug)]
pub struct Txn<'a> {
    configurator: Configurator<'a>,
    whole: bool,
    pods: BTreeMap<PodId, Option<&'a PodPolicies>>,
}

impl<'a> Txn<'a> {
    /// An empty change. `whole`: whether pods that it does not name are gone.
    pub const fn new(configurator: Configurator<'a>, whole: bool) -> Self {
        Self {
            configurator,
            whole,
            pods: BTreeMap::new(),
        }
    }

    /// Adds or replaces a pod with these policies, or notes that it is gone (`None`).
    pub fn put(&mut self, pod: PodId, policies: Option<&'a PodPolicies>) {
        self.pods.insert(pod, policies);
    }

    /// Whether pods that the change does not name are gone.
    pub const fn is_whole(&self) -> bool {
        self.whole
    }

    /// The pods with their policies, as matches; `None` for a pod that is gone.
    pub fn pods(&self) -> impl Iterator<Item = (&PodId, Option<&'a PodPolicies>)> {
        self.pods.iter().map(|(id, pod)| (id, *pod))
    }

    /// The pods with their rules; `None` for a pod that is gone.
    pub fn rules(&self) -> impl Iterator<Item = (&PodId, Option<PodRules>)> {
        let rules = |pod: &PodPolicies| self.configurator.rules(pod);
        self.pods().map(move |(id, pod)| (id, pod.map(rules)))
    }
}

/// Gives a change to every renderer, even after an error. Returns the last error, if any.
pub fn commit(renderers: &mut [&mut dyn Renderer], txn: &Txn<'_>) -> Result<(), RenderError> {
    let results = renderers.iter_mut().map(|renderer| renderer.commit(txn));
    let results: Vec<Result<(), RenderError>> = results.collect();
    results.into_iter().rfind(Result::is_err).unwrap_or(Ok(()))
}

/// An access control with one table for each pod, and one for the node.
pub trait Stack {
    /// Puts these tables in place of the last ones, all or none of them. `changes` are the
    /// differences.
    fn apply(&mut self, view: &View, changes: &[Change]) -> Result<(), RenderError>;
}

/// Renders to a [`Stack`] only when the tables change.
#[derive(Debug)]
pub struct TableRenderer<S> {
    /// The tables in force.
    pub tables: Tables,
    /// The stack in which the tables are in force.
    pub stack: S,
}

impl<S: Stack> Renderer for TableRenderer<S> {
    fn commit(&mut self, txn: &Txn<'_>) -> Result<(), RenderError> {
        let gone: Vec<PodId> = match txn.is_whole() {
            true => self.tables.pods().cloned().collect(),
            false => Vec::new(),
        };
        let mut change = self.tables.begin();
        gone.into_iter().for_each(|pod| change.update(pod, None));
        txn.rules()
            .for_each(|(pod, rules)| change.update(pod.clone(), rules));
        let view = change.view();
        let changes = change.changes(&view);
        if !changes.is_empty() {
            self.stack.apply(&view, &changes)?;
        }
        change.commit(view);
        Ok(())
    }
}
