//! Identities of what is no pod, in three scopes of numbers: other nodes, Services, and everything
//! outside the cluster.

use shared_maps::{
    IdentityId,
    identity::{SCOPE_MASK, SCOPE_REMOTE_NODE},
};

use super::allocator::{Acquired, Exhausted, NodeLocal};
use crate::labels::{LabelSet, SERVICE};

/// Whether a number is of the scope of other nodes.
pub(crate) const fn is_remote_node(id: IdentityId) -> bool {
    id.0 & SCOPE_MASK == SCOPE_REMOTE_NODE
}

/// Reserved labels that have an identity of their own. If a set has several of these labels, the
/// first one here decides.
pub(crate) const RESERVED_IDENTITIES: [(&str, IdentityId); 9] = [
    ("host", IdentityId::HOST),
    ("remote-node", IdentityId::REMOTE_NODE),
    ("health", IdentityId::HEALTH),
    ("init", IdentityId::INIT),
    ("unmanaged", IdentityId::UNMANAGED),
    ("ingress", IdentityId::INGRESS),
    ("world-ipv4", IdentityId::WORLD_IPV4),
    ("world-ipv6", IdentityId::WORLD_IPV6),
    ("world", IdentityId::WORLD),
];

/// The reserved identity of exactly these labels.
pub(crate) fn reserved(labels: &LabelSet) -> Option<IdentityId> {
    let is_api_server = labels.has_reserved("kube-apiserver");
    match labels.as_slice() {
        [_, _] if is_api_server && labels.has_reserved("remote-node") => {
            Some(IdentityId::KUBE_APISERVER)
        }
        [label] => {
            let mut known = RESERVED_IDENTITIES.into_iter();
            known
                .find(|(key, _)| label.is_reserved(key))
                .map(|(_, id)| id)
        }
        _ => None,
    }
}

/// Allocates what [`reserved`] has no number for (Cilium `pkg/identity`, ScopeForLabels): 0x02
/// for labels of other nodes, 0x03 for Services, 0x01 for all others.
#[derive(Debug)]
pub(crate) struct LocalScopes {
    outside: NodeLocal,
    nodes: NodeLocal,
    services: NodeLocal,
}

impl LocalScopes {
    /// Identities in `restored` keep their numbers for their label sets.
    pub(crate) fn new(restored: Vec<(IdentityId, LabelSet)>) -> Self {
        let (nodes, others): (Vec<_>, Vec<_>) = restored
            .into_iter()
            .partition(|(id, _)| is_remote_node(*id));
        let (services, outside) = others.into_iter().partition(|(id, _)| id.is_service());
        let (min, max) = (SCOPE_REMOTE_NODE + 1, SCOPE_REMOTE_NODE | !SCOPE_MASK);
        let (first, last) = (IdentityId::SERVICE_MIN, IdentityId::SERVICE_MAX);
        Self {
            outside: NodeLocal::local(outside),
            nodes: NodeLocal::new(IdentityId(min), IdentityId(max), nodes),
            services: NodeLocal::new(first, last, services),
        }
    }

    fn all(&self) -> [&NodeLocal; 3] {
        [&self.outside, &self.nodes, &self.services]
    }

    fn all_mut(&mut self) -> [&mut NodeLocal; 3] {
        [&mut self.outside, &mut self.nodes, &mut self.services]
    }

    fn of_labels(&mut self, labels: &LabelSet) -> &mut NodeLocal {
        if labels.has_reserved("remote-node") {
            &mut self.nodes
        } else if labels.iter().any(|label| label.source() == SERVICE) {
            &mut self.services
        } else {
            &mut self.outside
        }
    }

    fn of_id(&mut self, id: IdentityId) -> &mut NodeLocal {
        if is_remote_node(id) {
            &mut self.nodes
        } else if id.is_service() {
            &mut self.services
        } else {
            &mut self.outside
        }
    }

    /// As [`NodeLocal::acquire_as`], in the scope of the labels.
    pub(crate) fn acquire_as(
        &mut self,
        labels: &LabelSet,
        request: Option<IdentityId>,
    ) -> Result<Acquired, Exhausted> {
        self.of_labels(labels).acquire_as(labels, request)
    }

    /// Whether these labels have a number, or had one before the restart.
    pub(crate) fn has_number(&self, labels: &LabelSet) -> bool {
        self.all().into_iter().any(|scope| scope.has_number(labels))
    }

    /// As [`NodeLocal::withheld_labels`], in any of the scopes.
    pub(crate) fn withheld_labels(&self, id: IdentityId) -> Option<&LabelSet> {
        let scopes = self.all().into_iter();
        scopes.filter_map(|scope| scope.withheld_labels(id)).next()
    }

    /// As [`NodeLocal::withheld`], of all scopes together.
    pub(crate) fn withheld(&self) -> impl Iterator<Item = (IdentityId, &LabelSet)> {
        self.all().into_iter().flat_map(NodeLocal::withheld)
    }

    pub(crate) fn release(&mut self, id: IdentityId) -> bool {
        self.of_id(id).release(id)
    }

    pub(crate) fn sweep(&mut self, in_force: &dyn Fn(IdentityId) -> bool) -> Vec<IdentityId> {
        let scopes = self.all_mut().into_iter();
        scopes.flat_map(|scope| scope.sweep(in_force)).collect()
    }

    pub(crate) fn revive(&mut self, id: IdentityId, labels: LabelSet) -> bool {
        self.of_id(id).revive(id, labels)
    }

    pub(crate) fn labels(&self, id: IdentityId) -> Option<&LabelSet> {
        let scopes = self.all().into_iter();
        scopes.filter_map(|scope| scope.labels(id)).next()
    }

    pub(crate) fn kept(&self) -> Vec<(IdentityId, LabelSet)> {
        self.all().into_iter().flat_map(NodeLocal::kept).collect()
    }

    pub(crate) fn allocated(&self) -> Vec<(IdentityId, LabelSet, usize)> {
        let scopes = self.all().into_iter();
        scopes.flat_map(NodeLocal::allocated).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.all().into_iter().map(NodeLocal::len).sum()
    }

    pub(crate) fn release_withheld(&mut self) {
        for scope in self.all_mut() {
            scope.release_withheld();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(texts: &[&str]) -> LabelSet {
        LabelSet::parse(texts).unwrap()
    }

    #[test]
    fn reserved_numbers_are_for_exactly_their_labels() {
        let number = |texts: &[&str]| reserved(&set(texts)).map(|id| id.0);
        assert_eq!(number(&["reserved:world-ipv4"]), Some(9));
        assert_eq!(number(&["reserved:remote-node"]), Some(6));
        let api_server = ["reserved:remote-node", "reserved:kube-apiserver"];
        assert_eq!(number(&api_server), Some(7));
        assert_eq!(number(&["reserved:kube-apiserver"]), None);
        assert_eq!(number(&["reserved:world", "fqdn:a"]), None);
        assert_eq!(number(&["fqdn:world"]), None);
        assert_eq!(number(&[]), None);
    }

    #[test]
    fn other_nodes_are_numbered_apart_and_keep_their_numbers() {
        let node = set(&["k8s:zone=a", "reserved:remote-node"]);
        let outside = set(&[
            "cidr:192.0.2.1/32",
            "reserved:kube-apiserver",
            "reserved:world",
        ]);
        let mut scopes = LocalScopes::new(Vec::new());
        assert_eq!(
            scopes.acquire_as(&node, None).unwrap().id,
            IdentityId(0x0200_0001)
        );
        assert_eq!(
            scopes.acquire_as(&outside, None).unwrap().id,
            IdentityId(0x0100_0001)
        );
        let mut again = LocalScopes::new(scopes.kept());
        let other = set(&["k8s:zone=b", "reserved:remote-node"]);
        assert_eq!(
            again.acquire_as(&other, None).unwrap().id,
            IdentityId(0x0200_0002)
        );
        let known = again.acquire_as(&node, None).unwrap();
        assert_eq!((known.id, known.fresh), (IdentityId(0x0200_0001), false));
        again.release(known.id);
        assert_eq!(again.sweep(&|_| false), [known.id]);
        assert_eq!(again.labels(IdentityId(0x0200_0002)), Some(&other));
        let service = set(&["service:shop/web"]);
        let first = again.acquire_as(&service, None).unwrap();
        assert_eq!((first.id, first.fresh), (IdentityId(0x0300_0001), true));
        let mut third = LocalScopes::new(again.kept());
        let same = third.acquire_as(&service, None).unwrap();
        assert_eq!((same.id, same.fresh), (first.id, false));
    }
}
