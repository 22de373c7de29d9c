//! The changes of tables that a change of pods causes. A change of pods is first prepared
//! ([`Txn`]), and then comes into force.

use std::collections::{BTreeMap, BTreeSet};

use super::{InTwoTables, Rules, View};
use crate::{configurator::PodRules, contiv::Flow, pod::PodId};

/// The tables of a node that are in force.
#[derive(Clone, Debug)]
pub struct Tables {
    flow: Flow,
    pods: BTreeMap<PodId, PodRules>,
    view: View,
}

/// A table with other rules, or with other pods, than before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A local table.
    Local {
        /// The rules of the table.
        rules: Rules,
        /// Pods that use the table after the change. If there are none, the table is removed.
        pods: BTreeSet<PodId>,
        /// Pods that used the table before the change. If there are none, the table is new.
        before: BTreeSet<PodId>,
    },
    /// The global table, with its new rules.
    Global(Rules),
}

impl Tables {
    /// Tables of a node without pods. Local tables will be for traffic of this direction.
    pub fn new(flow: Flow) -> Self {
        Self {
            flow,
            pods: BTreeMap::new(),
            view: View::default(),
        }
    }

    /// The tables in force.
    pub const fn view(&self) -> &View {
        &self.view
    }

    /// The pods from whose rules the tables are made.
    pub fn pods(&self) -> impl Iterator<Item = &PodId> {
        self.pods.keys()
    }

    /// Takes over tables that were read back. The next change must contain every pod.
    pub fn resync(&mut self, view: View) -> Result<(), InTwoTables> {
        view.check()?;
        self.view = view;
        self.pods.clear();
        Ok(())
    }

    /// Begins a change. Nothing of it is in force before [`Txn::commit`].
    pub fn begin(&mut self) -> Txn<'_> {
        Txn {
            pods: self.pods.clone(),
            tables: self,
        }
    }
}

/// A change of pods that is not in force yet.
#[derive(Debug)]
pub struct Txn<'a> {
    tables: &'a mut Tables,
    pods: BTreeMap<PodId, PodRules>,
}

impl Txn<'_> {
    /// Adds or replaces a pod with its rules, or removes it (`None`).
    pub fn update(&mut self, pod: PodId, rules: Option<PodRules>) {
        match rules {
            Some(rules) => self.pods.insert(pod, rules),
            None => self.pods.remove(&pod),
        };
    }

    /// The tables after the change.
    pub fn view(&self) -> View {
        View::of(&self.pods, self.tables.flow)
    }

    /// The differences between `view` and the tables in force.
    pub fn changes(&self, view: &View) -> Vec<Change> {
        let before = &self.tables.view;
        let all: BTreeSet<&Rules> = before.local.keys().chain(view.local.keys()).collect();
        let pods = |view: &View, rules: &Rules| view.local.get(rules).cloned().unwrap_or_default();
        let local = all.into_iter().map(|rules| Change::Local {
            rules: rules.clone(),
            pods: pods(view, rules),
            before: pods(before, rules),
        });
        let differs = |change: &Change| match change {
            Change::Local { pods, before, .. } => pods != before,
            Change::Global(_) => true,
        };
        let global = (before.global != view.global).then(|| Change::Global(view.global.clone()));
        local.filter(differs).chain(global).collect()
    }

    /// Brings the change into force, with `view` as its tables.
    pub fn commit(self, view: View) {
        self.tables.view = view;
        self.tables.pods = self.pods;
    }
}
