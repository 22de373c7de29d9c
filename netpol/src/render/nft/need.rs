//! What a policy adds to the table, counted before any of its rows are made: a policy of one
//! megabyte can have more rows than fit into memory.

use std::collections::BTreeSet;

use super::{ranges::Ranges, rows};
use crate::{
    contiv::{ContivPolicy, Flow, Match, MatchPeers},
    group::{Family, Group},
    pod::NamedPorts,
};

/// What a policy adds to a chain to which it belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// Whether the policy lets everything pass. Then the chain is not made.
    pub(crate) is_open: bool,
    /// Upper bound of the number of its rules. Equal rules of several policies become one.
    pub(crate) rows: usize,
    /// Upper bound of the number of elements in its sets of ranges.
    pub(crate) ranges: usize,
}

impl Need {
    /// What a policy needs for one direction and family, in the chain of pods with these named ports.
    pub(crate) fn of(
        policy: &ContivPolicy,
        flow: Flow,
        family: Family,
        ports: &NamedPorts,
    ) -> Self {
        let mut need = Self::default();
        for one in of_flow(policy, flow) {
            let (numbered, named) = rows::split(ports, one);
            let (peers, blocks, everyone) = peers(one, family);
            need.is_open |= everyone && numbered.any;
            let rows = numbered.protocols() + named.len();
            need.rows = need.rows.saturating_add(peers.saturating_mul(rows));
            let ranges = peers.saturating_mul(numbered.ranges());
            need.ranges = need.ranges.saturating_add(ranges + blocks);
        }
        need
    }
}

/// The groups that a policy adds to a chain, if the chain is made.
pub(crate) fn groups(
    policy: &ContivPolicy,
    flow: Flow,
    family: Family,
    ports: &NamedPorts,
) -> BTreeSet<Group> {
    let mut groups = BTreeSet::new();
    for one in of_flow(policy, flow) {
        let (numbered, named) = rows::split(ports, one);
        for peer in rows::peers(one, family) {
            let of_names = named
                .iter()
                .map(|port| rows::named_row(&peer, port, family));
            groups.extend(of_names.filter_map(|row| row.peer.group));
            if !numbered.is_empty() {
                groups.extend(peer.group);
            }
        }
    }
    groups
}

fn of_flow(policy: &ContivPolicy, flow: Flow) -> impl Iterator<Item = &Match> {
    policy.matches.iter().filter(move |one| one.flow == flow)
}

/// The number of peers of a match, the number of ranges of its blocks, and whether the peer is
/// everyone.
fn peers(of: &Match, family: Family) -> (usize, usize, bool) {
    let MatchPeers::Of { groups, blocks } = &of.peers else {
        return (1, 0, true);
    };
    match Ranges::of_blocks(blocks, family) {
        Some(within) if within.is_everything() => (1, 0, true),
        Some(Ranges::Several(set)) => (groups.len() + 1, set.elements.len(), false),
        Some(Ranges::One(..)) => (groups.len() + 1, 0, false),
        None => (groups.len(), 0, false),
    }
}
