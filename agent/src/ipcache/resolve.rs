//! Effective labels of a prefix: its own, and what flows down to it.

use ipnet::IpNet;

use super::{metadata::Metadata, trie::PrefixMap};
use crate::labels::{CIDR, FQDN, Label, LabelSet, RESERVED};

/// The world labels of a node with these families.
#[derive(Clone, Debug)]
pub struct World {
    v4: Label,
    v6: Label,
}

impl World {
    /// `dual_stack`: both families are on.
    pub fn new(dual_stack: bool) -> Self {
        let (v4, v6) = if dual_stack {
            ("world-ipv4", "world-ipv6")
        } else {
            ("world", "world")
        };
        Self {
            v4: Label::new(RESERVED, v4, ""),
            v6: Label::new(RESERVED, v6, ""),
        }
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
pub fn cidr_label(prefix: IpNet) -> Option<Label> {
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

/// Reads the block back from a CIDR label.
pub fn cidr_of(label: &Label) -> Option<IpNet> {
    if label.source() != CIDR {
        return None;
    }
    label
        .key()
        .parse()
        .ok()
        .or_else(|| label.key().replace('-', ":").parse().ok())
}

/// Labels that decide the identity of `prefix` (`Cilium pkg/ipcache/metadata.go`,
/// resolveLabels; CFP-28427 proposals 1 and 2): the union of all owners' labels; from covering
/// prefixes, longest first, those whose source and key are not there yet; of CIDR labels only
/// the longest; the world label of the family.
pub fn labels(map: &PrefixMap<Metadata>, prefix: IpNet, world: &World) -> LabelSet {
    let mut found: Vec<Label> = Vec::with_capacity(4);
    let mut cidr = false;
    for (at, metadata) in map.covering(prefix).into_iter().rev() {
        let own = at == prefix;
        let inherited_from = found.len();
        for label in metadata.labels().flat_map(LabelSet::iter) {
            let is_cidr = label.source() == CIDR;
            if is_cidr && cidr {
                continue;
            }
            let known = if own { found.len() } else { inherited_from };
            let present = found.iter().take(known).any(|other| {
                other.source() == label.source()
                    && other.key() == label.key()
                    && (!own || other.value() == label.value())
            });
            if !present && !found.contains(label) {
                found.push(label.clone());
                cidr |= is_cidr;
            }
        }
    }
    if found
        .iter()
        .any(|l| l.source() == RESERVED && l.key() == "host")
    {
        found.retain(|l| {
            let world = l.source() == RESERVED && l.key().starts_with("world");
            !world && !matches!(l.source(), CIDR | FQDN)
        });
    } else if found.iter().all(is_outside) {
        if found.is_empty() {
            found.extend(cidr_label(prefix));
        }
        if !found.contains(world.label(prefix)) {
            found.push(world.label(prefix).clone());
        }
    }
    LabelSet::new(found)
}

/// Whether a label says nothing that would place its prefix inside the cluster.
fn is_outside(label: &Label) -> bool {
    label.source() != RESERVED
        || label.key().starts_with("world")
        || label.key() == "kube-apiserver"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipcache::metadata::{Claim, Owner};

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
    fn the_node_is_not_of_the_world() {
        let mut map = PrefixMap::default();
        put(&mut map, "0.0.0.0/0", Owner::World, &["reserved:world"]);
        put(&mut map, "10.0.0.0/8", Owner::Policy, &["cidr:10.0.0.0/8"]);
        put(&mut map, "10.0.0.1/32", Owner::Node, &["reserved:host"]);
        let labels = labels(&map, net("10.0.0.1/32"), &World::new(false));
        assert_eq!(labels.texts(), ["reserved:host"]);
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
