//! Effective labels of a prefix: its own, and what flows down to it.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use shared_maps::IdentityId;

use super::{metadata::Metadata, trie::PrefixMap};
use crate::labels::{
    CIDR, CIDR_GROUP, CLOSED_NAME, DNS_NAME, FQDN, Label, LabelSet, NODE, NODE_CIDR, RESERVED,
};

/// Reserved labels of what is inside the cluster without being a pod.
const INSIDE: [&str; 5] = ["host", "remote-node", "health", "ingress", UNMANAGED];
/// The label of addresses in the blocks of the cluster's pods and Services of which nothing else is known.
const UNMANAGED: &str = "unmanaged";

/// All addresses of IPv4, and all of IPv6.
pub(crate) fn whole_families() -> [IpNet; 2] {
    [Ipv4Net::default().into(), Ipv6Net::default().into()]
}

/// The world labels of a node with these families.
#[derive(Clone, Debug)]
pub struct World {
    v4: Label,
    v6: Label,
    /// Whether pods of other nodes are not read. Then blocks of rules inside a block of pods select
    /// addresses there.
    is_pruned: bool,
}

impl World {
    /// `dual_stack` says whether both families are on.
    pub fn new(dual_stack: bool) -> Self {
        let (v4, v6) = if dual_stack {
            ("world-ipv4", "world-ipv6")
        } else {
            ("world", "world")
        };
        Self {
            v4: Label::new(RESERVED, v4, ""),
            v6: Label::new(RESERVED, v6, ""),
            is_pruned: false,
        }
    }

    /// The same, for a node that does not read pods of other nodes.
    pub fn pruned(self, is_pruned: bool) -> Self {
        Self { is_pruned, ..self }
    }

    /// World label for addresses of this prefix's family.
    pub fn label(&self, prefix: IpNet) -> &Label {
        match prefix {
            IpNet::V4(_) => &self.v4,
            IpNet::V6(_) => &self.v6,
        }
    }
}

/// Label of a CIDR block. The world (/0) has none.
pub(crate) fn cidr_label(prefix: IpNet) -> Option<Label> {
    (prefix.prefix_len() > 0).then(|| Label::new(CIDR, &cidr_key(prefix.trunc()), ""))
}

/// `10.0.0.0/8`; in IPv6 `:` becomes `-`, with a `0` where it would begin or end the address.
fn cidr_key(prefix: IpNet) -> String {
    match prefix {
        IpNet::V4(net) => net.to_string(),
        IpNet::V6(net) => {
            let mut text = net.addr().to_string().replace(':', "-");
            if text.starts_with('-') {
                text.insert(0, '0');
            }
            if text.ends_with('-') {
                text.push('0');
            }
            format!("{text}/{}", net.prefix_len())
        }
    }
}

/// Label of nodes in a CIDR block.
pub(crate) fn node_cidr_label(prefix: IpNet) -> Label {
    Label::new(NODE_CIDR, &cidr_key(prefix.trunc()), "")
}

/// Reads the block back from a CIDR label.
pub(crate) fn cidr_of(label: &Label) -> Option<IpNet> {
    (label.source() == CIDR).then(|| block_of(label)).flatten()
}

/// Reads the block back from a [`node_cidr_label`].
pub(crate) fn node_cidr_of(label: &Label) -> Option<IpNet> {
    (label.source() == NODE_CIDR)
        .then(|| block_of(label))
        .flatten()
}

fn block_of(label: &Label) -> Option<IpNet> {
    label
        .key()
        .parse()
        .ok()
        .or_else(|| label.key().replace('-', ":").parse().ok())
}

/// Labels that decide the identity of `prefix` (Cilium `pkg/ipcache/metadata.go`, resolveLabels;
/// CFP-28427, proposals 1 and 2):
///
/// 1. all owners' labels; of two values of one label the more trusted source's;
/// 2. from covering prefixes, longest first, labels whose source and key are not there yet, but
///    of CIDR labels only the longest;
/// 3. inside the cluster no label of the world, of blocks or of names: a DNS answer with the node's
///    address opens nothing. Only nodes have the label of the longest block that an EgressFirewall
///    names, under a source of its own, and labels of their objects. Where pods of other nodes are
///    not read, an address of which nothing else is known also has the blocks inside the longest
///    block of pods around it;
/// 4. outside the cluster, the world label of the family, and the prefix's own CIDR label if there
///    is nothing else.
pub(crate) fn labels(map: &PrefixMap<Metadata>, prefix: IpNet, world: &World) -> LabelSet {
    let mut found: Vec<Label> = Vec::with_capacity(4);
    let (mut cidr, mut node_cidr) = (false, false);
    // Labels of prefixes that are at least as long as the longest block of pods.
    let mut inner = 0;
    for (at, metadata) in map.covering(prefix).into_iter().rev() {
        if at == prefix && metadata.identity() == Some(IdentityId::HOST) {
            found.push(Label::new(RESERVED, "host", ""));
        }
        for label in metadata.labels().flat_map(LabelSet::iter) {
            let is_cidr = label.source() == CIDR;
            let is_node_cidr = label.source() == NODE_CIDR;
            if is_cidr && cidr || is_node_cidr && node_cidr {
                continue;
            }
            let same =
                |other: &Label| other.source() == label.source() && other.key() == label.key();
            if !found.iter().any(same) {
                found.push(label.clone());
                cidr |= is_cidr;
                node_cidr |= is_node_cidr;
            }
        }
        if inner == 0 && found.iter().any(|label| label.is_reserved(UNMANAGED)) {
            inner = found.len();
        }
    }
    let is_block = |label: &&Label| [CIDR, CIDR_GROUP].contains(&label.source());
    let in_pods = found.iter().take(inner).filter(is_block);
    let in_pods: Vec<Label> = in_pods.filter(|_| world.is_pruned).cloned().collect();
    if !found.iter().any(is_of_node) {
        found.retain(|label| !matches!(label.source(), NODE | NODE_CIDR));
    }
    let is_inside = |label: &Label| INSIDE.iter().any(|key| label.is_reserved(key));
    if found.iter().any(is_inside) {
        found.retain(|label| {
            let outside = [CIDR, CIDR_GROUP, FQDN, DNS_NAME, CLOSED_NAME];
            !label.is_world() && !outside.contains(&label.source())
        });
        let is_known = |label: &Label| is_inside(label) && !label.is_reserved(UNMANAGED);
        match found.iter().any(is_known) {
            true => found.retain(|label| !label.is_reserved(UNMANAGED)),
            false => found.extend(in_pods),
        }
    } else {
        if found.is_empty() {
            found.extend(cidr_label(prefix));
        }
        if !found.contains(world.label(prefix)) {
            found.push(world.label(prefix).clone());
        }
    }
    LabelSet::new(found)
}

fn is_of_node(label: &Label) -> bool {
    label.is_reserved("host") || label.is_reserved("remote-node")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipcache::{
        metadata::Claim,
        owners::{Owner, Source},
    };

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn put(map: &mut PrefixMap<Metadata>, prefix: &str, owner: Owner, labels: &[&str]) {
        let labels = LabelSet::parse(labels).unwrap();
        map.entry(net(prefix)).set(owner, Claim::Labels(labels));
    }

    #[test]
    fn labels_flow_down_and_only_the_longest_cidr_stays() {
        let mut map = PrefixMap::default();
        put(
            &mut map,
            "192.0.2.0/24",
            Owner::Restored,
            &["k8s:foo=bar", "cidr:192.0.2.0/24"],
        );
        put(
            &mut map,
            "192.0.2.2/32",
            Owner::Policy,
            &["cidr:192.0.2.2/32", "reserved:kube-apiserver"],
        );
        let world = World::new(false);
        let labels = labels(&map, net("192.0.2.2/32"), &world);
        assert_eq!(
            labels.texts(),
            [
                "cidr:192.0.2.2/32",
                "k8s:foo=bar",
                "reserved:kube-apiserver",
                "reserved:world"
            ]
        );
    }

    #[test]
    fn a_label_that_flows_down_never_overrides() {
        let mut map = PrefixMap::default();
        put(
            &mut map,
            "10.0.0.0/8",
            Owner::Policy,
            &["k8s:zone=a", "k8s:net=x"],
        );
        put(&mut map, "10.1.0.0/16", Owner::Policy, &["k8s:zone=b"]);
        let labels = labels(&map, net("10.1.0.0/16"), &World::new(true));
        assert_eq!(
            labels.texts(),
            ["k8s:net=x", "k8s:zone=b", "reserved:world-ipv4"]
        );
    }

    #[test]
    fn the_node_does_not_belong_to_the_world() {
        let mut map = PrefixMap::default();
        put(&mut map, "0.0.0.0/0", Owner::World, &["reserved:world"]);
        put(&mut map, "10.0.0.0/8", Owner::Policy, &["cidr:10.0.0.0/8"]);
        put(&mut map, "10.0.0.1/32", Owner::Node, &["reserved:host"]);
        let labels = labels(&map, net("10.0.0.1/32"), &World::new(false));
        assert_eq!(labels.texts(), ["reserved:host"]);
    }

    #[test]
    fn of_two_values_the_more_trusted_sources_counts() {
        let mut map = PrefixMap::default();
        let object = |source| Owner::Object(source, "o".into());
        let says = [
            (object(Source::Kubernetes), "k8s:zone=b"),
            (object(Source::CustomResource), "k8s:zone=c"),
            (Owner::Restored, "k8s:zone=a"),
        ];
        for (owner, label) in &says {
            put(&mut map, "10.0.0.0/8", owner.clone(), &[label]);
        }
        let zone = |map: &PrefixMap<Metadata>| {
            labels(map, net("10.0.0.0/8"), &World::new(false))
                .texts()
                .remove(0)
        };
        assert_eq!(zone(&map), "k8s:zone=c");
        map.entry(net("10.0.0.0/8"))
            .unset(&object(Source::CustomResource));
        assert_eq!(zone(&map), "k8s:zone=b");
        map.entry(net("10.0.0.0/8"))
            .unset(&object(Source::Kubernetes));
        assert_eq!(zone(&map), "k8s:zone=a");
    }

    #[test]
    fn groups_of_blocks_add_up_and_blocks_do_not() {
        let mut map = PrefixMap::default();
        let group = |name: &str| Owner::Object(Source::CustomResource, name.into());
        for (prefix, name) in [("10.0.0.0/8", "wide"), ("10.1.0.0/16", "narrow")] {
            put(
                &mut map,
                prefix,
                group(name),
                &[&format!("cidrgroup:{name}")],
            );
            put(
                &mut map,
                prefix,
                Owner::Policy,
                &[&format!("cidr:{prefix}")],
            );
        }
        put(&mut map, "10.1.1.1/32", Owner::Restored, &["fqdn:a.test"]);
        let labels = labels(&map, net("10.1.1.1/32"), &World::new(true));
        assert_eq!(
            labels.texts(),
            [
                "cidr:10.1.0.0/16",
                "cidrgroup:narrow",
                "cidrgroup:wide",
                "fqdn:a.test",
                "reserved:world-ipv4"
            ]
        );
    }

    #[test]
    fn addresses_inside_are_neither_world_nor_blocks_nor_names() {
        for inside in INSIDE {
            let mut map = PrefixMap::default();
            let label = format!("reserved:{inside}");
            put(&mut map, "0.0.0.0/0", Owner::World, &["reserved:world"]);
            put(&mut map, "10.0.0.0/8", Owner::Policy, &["cidr:10.0.0.0/8"]);
            let group = Owner::Object(Source::CustomResource, "g".into());
            put(&mut map, "10.0.0.0/8", group, &["cidrgroup:g"]);
            put(&mut map, "10.0.0.1/32", Owner::Restored, &["fqdn:a.test"]);
            let nodes = Owner::Object(Source::Kubernetes, "nodes".into());
            put(&mut map, "10.0.0.1/32", nodes, &[&label]);
            let labels = labels(&map, net("10.0.0.1/32"), &World::new(false));
            assert_eq!(labels.texts(), [label]);
        }
    }

    #[test]
    fn a_node_has_the_longest_block_of_a_firewall_and_nothing_else_has() {
        let mut map = PrefixMap::default();
        put(&mut map, "0.0.0.0/0", Owner::World, &["reserved:world"]);
        for block in ["0.0.0.0/0", "10.0.0.0/8", "10.2.0.0/16"] {
            let label = format!("node-cidr:{block}");
            put(&mut map, block, Owner::NodesOfPolicy, &[&label]);
        }
        put(
            &mut map,
            "10.2.0.0/16",
            Owner::Policy,
            &["cidr:10.2.0.0/16"],
        );
        let nodes = Owner::Object(Source::CustomResource, "nodes".into());
        let of_node = ["reserved:remote-node", "node:region=east"];
        put(&mut map, "10.2.0.1/32", nodes.clone(), &of_node);
        put(&mut map, "192.0.2.1/32", nodes, &of_node);
        let texts = |prefix: &str| labels(&map, net(prefix), &World::new(false)).texts();
        for (node, block) in [
            ("10.2.0.1/32", "10.2.0.0/16"),
            ("192.0.2.1/32", "0.0.0.0/0"),
        ] {
            let block = format!("node-cidr:{block}");
            let wanted = ["node:region=east", &block, "reserved:remote-node"];
            assert_eq!(texts(node), wanted);
        }
        assert_eq!(texts("10.2.0.2/32"), ["cidr:10.2.0.0/16", "reserved:world"]);
        assert_eq!(texts("0.0.0.0/0"), ["reserved:world"]);
        assert_eq!(texts("10.0.0.0/8"), ["reserved:world"]);
    }

    #[test]
    fn a_node_within_a_block_of_pods_is_a_node() {
        let mut map = PrefixMap::default();
        let flag = Owner::Object(Source::Local, "--pod-cidr".into());
        put(&mut map, "10.2.0.0/16", flag, &["reserved:unmanaged"]);
        let nodes = Owner::Object(Source::CustomResource, "nodes".into());
        put(&mut map, "10.2.0.1/32", nodes, &["reserved:remote-node"]);
        put(
            &mut map,
            "10.2.0.2/32",
            Owner::Policy,
            &["cidr:10.2.0.2/32"],
        );
        let texts = |prefix: &str| labels(&map, net(prefix), &World::new(false)).texts();
        assert_eq!(texts("10.2.0.1/32"), ["reserved:remote-node"]);
        assert_eq!(texts("10.2.0.2/32"), ["reserved:unmanaged"]);
        assert_eq!(texts("10.2.0.0/16"), ["reserved:unmanaged"]);
    }

    #[test]
    fn high_scale_blocks_inside_blocks_of_pods_select_where_pods_are_not_read() {
        let mut map = PrefixMap::default();
        let flag = Owner::Object(Source::Local, "--pod-cidr".into());
        put(&mut map, "0.0.0.0/0", Owner::World, &["reserved:world"]);
        put(&mut map, "10.0.0.0/8", Owner::Policy, &["cidr:10.0.0.0/8"]);
        put(&mut map, "10.2.0.0/16", flag, &["reserved:unmanaged"]);
        put(
            &mut map,
            "10.2.0.0/16",
            Owner::Policy,
            &["cidr:10.2.0.0/16"],
        );
        let block = ["cidr:10.2.3.0/24", "reserved:unmanaged"];
        put(&mut map, "10.2.3.0/24", Owner::Policy, &block[..1]);
        put(&mut map, "10.2.3.4/32", Owner::Restored, &["fqdn:a.test"]);
        let nodes = Owner::Object(Source::CustomResource, "nodes".into());
        put(&mut map, "10.2.3.5/32", nodes, &["reserved:remote-node"]);
        let texts = |prefix: &str, world: &World| labels(&map, net(prefix), world).texts();
        let pruned = World::new(false).pruned(true);
        assert_eq!(texts("10.2.3.0/24", &pruned), block);
        // Names select nothing there.
        assert_eq!(texts("10.2.3.4/32", &pruned), block);
        assert_eq!(texts("10.2.3.5/32", &pruned), ["reserved:remote-node"]);
        let whole = ["cidr:10.2.0.0/16", "reserved:unmanaged"];
        assert_eq!(texts("10.2.9.9/32", &pruned), whole);
        for prefix in ["10.2.3.0/24", "10.2.9.9/32"] {
            let all = texts(prefix, &World::new(false));
            assert_eq!(all, ["reserved:unmanaged"], "{prefix}");
        }
        // A block around the block of pods belongs to the world.
        let mut wide = PrefixMap::default();
        let flag = Owner::Object(Source::Local, "--pod-cidr".into());
        put(&mut wide, "10.2.0.0/16", flag, &["reserved:unmanaged"]);
        put(&mut wide, "10.0.0.0/8", Owner::Policy, &["cidr:10.0.0.0/8"]);
        let found = labels(&wide, net("10.2.9.9/32"), &pruned);
        assert_eq!(found.texts(), ["reserved:unmanaged"]);
    }

    #[test]
    fn an_api_server_is_outside_unless_it_is_on_a_node() {
        let mut map = PrefixMap::default();
        let api = Owner::Object(Source::KubeApiserver, "api".into());
        let nodes = Owner::Object(Source::Kubernetes, "nodes".into());
        let world = World::new(true);
        for prefix in ["10.0.0.1/32", "2001:db8::1/128"] {
            put(&mut map, prefix, api.clone(), &["reserved:kube-apiserver"]);
        }
        let outside = labels(&map, net("2001:db8::1/128"), &world);
        assert_eq!(
            outside.texts(),
            ["reserved:kube-apiserver", "reserved:world-ipv6"]
        );
        put(&mut map, "10.0.0.1/32", nodes, &["reserved:remote-node"]);
        let node = labels(&map, net("10.0.0.1/32"), &world);
        assert_eq!(
            node.texts(),
            ["reserved:kube-apiserver", "reserved:remote-node"]
        );
        let ours = Claim::Identity(IdentityId::HOST);
        map.entry(net("10.0.0.1/32")).set(Owner::Node, ours);
        let ours = labels(&map, net("10.0.0.1/32"), &world);
        assert!(ours.has_reserved("host") && ours.has_reserved("kube-apiserver"));
    }

    #[test]
    fn each_family_has_its_world() {
        let map = PrefixMap::default();
        let texts = |prefix: &str, dual| labels(&map, net(prefix), &World::new(dual)).texts();
        assert_eq!(texts("0.0.0.0/0", true), ["reserved:world-ipv4"]);
        assert_eq!(texts("::/0", true), ["reserved:world-ipv6"]);
        assert_eq!(texts("::/0", false), ["reserved:world"]);
        // A prefix of which nothing is known is a block.
        assert_eq!(
            texts("10.0.0.0/8", false),
            ["cidr:10.0.0.0/8", "reserved:world"]
        );
    }

    #[test]
    fn cidr_labels_of_ipv6_read_back() {
        for (prefix, key) in [
            ("::1/128", "0--1/128"),
            ("fd00::/8", "fd00--0/8"),
            ("2001:db8::1/128", "2001-db8--1/128"),
        ] {
            let label = cidr_label(net(prefix)).unwrap();
            assert_eq!(label.key(), key);
            assert_eq!(cidr_of(&label), Some(net(prefix)));
        }
        assert_eq!(cidr_label(net("0.0.0.0/0")), None);
    }
}
