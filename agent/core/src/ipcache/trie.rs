//! A bitwise, path-compressed trie of prefixes: what changes at a prefix touches
//! its descendants and nothing else.

use std::{
    cell::Cell,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

const NONE: u32 = u32::MAX;

/// Prefix → value, for both families.
#[derive(Debug)]
pub struct PrefixMap<T> {
    v4: Tree<T>,
    v6: Tree<T>,
}

impl<T> Default for PrefixMap<T> {
    fn default() -> Self {
        Self {
            v4: Tree::new(),
            v6: Tree::new(),
        }
    }
}

impl<T> PrefixMap<T> {
    pub fn len(&self) -> usize {
        self.v4.values() + self.v6.values()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Value of exactly this prefix.
    pub fn get(&self, prefix: IpNet) -> Option<&T> {
        let (bits, len) = spell(prefix);
        self.tree(prefix).get(bits, len)
    }

    /// Value of exactly this prefix.
    pub fn get_mut(&mut self, prefix: IpNet) -> Option<&mut T> {
        let (bits, len) = spell(prefix);
        self.tree_mut(prefix).get_mut(bits, len)
    }

    /// Value of this prefix; it is made if there is none.
    pub fn entry(&mut self, prefix: IpNet) -> &mut T
    where
        T: Default,
    {
        let (bits, len) = spell(prefix);
        self.tree_mut(prefix).entry(bits, len)
    }

    /// Removes the prefix and returns its value.
    pub fn remove(&mut self, prefix: IpNet) -> Option<T> {
        let (bits, len) = spell(prefix);
        self.tree_mut(prefix).remove(bits, len)
    }

    /// Prefixes that cover `prefix`, itself included, shortest first.
    pub fn covering(&self, prefix: IpNet) -> Vec<(IpNet, &T)> {
        let (bits, len) = spell(prefix);
        let mut found = Vec::new();
        self.tree(prefix).walk(bits, len, |bits, len, value| {
            found.push((read(prefix, bits, len), value));
        });
        found
    }

    /// Value of the longest prefix that holds `address`.
    pub fn longest(
        &self,
        address: IpAddr,
        mut keep: impl FnMut(&T) -> bool,
    ) -> Option<(IpNet, &T)> {
        let prefix = IpNet::from(address);
        let (bits, len) = spell(prefix);
        let mut found = None;
        self.tree(prefix).walk(bits, len, |bits, len, value| {
            if keep(value) {
                found = Some((bits, len, value));
            }
        });
        found.map(|(bits, len, value)| (read(prefix, bits, len), value))
    }

    /// Prefixes inside `prefix`, itself included.
    pub fn descendants(&self, prefix: IpNet) -> Vec<IpNet> {
        let (bits, len) = spell(prefix);
        let mut found = Vec::new();
        self.tree(prefix).below(bits, len, |bits, len, _| {
            found.push(read(prefix, bits, len))
        });
        found
    }

    /// At most `limit` prefixes after this one, IPv4 first, each family in order of its bits.
    pub fn after(&self, prefix: Option<IpNet>, limit: usize) -> Vec<(IpNet, &T)> {
        let mut found = Vec::new();
        for family in [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())] {
            let at = match (prefix, family) {
                (Some(IpNet::V6(_)), IpNet::V4(_)) => continue,
                (Some(prefix @ IpNet::V4(_)), IpNet::V4(_))
                | (Some(prefix @ IpNet::V6(_)), IpNet::V6(_)) => Some(spell(prefix)),
                _ => None,
            };
            self.tree(family).after(at, |bits, len, value| {
                let room = found.len() < limit;
                if room {
                    found.push((read(family, bits, len), value));
                }
                room
            });
        }
        found
    }

    /// Calls `visit` for every prefix.
    pub fn for_each(&self, mut visit: impl FnMut(IpNet, &T)) {
        let v4 = IpNet::V4(Ipv4Net::default());
        self.v4
            .below(0, 0, |bits, len, value| visit(read(v4, bits, len), value));
        let v6 = IpNet::V6(Ipv6Net::default());
        self.v6
            .below(0, 0, |bits, len, value| visit(read(v6, bits, len), value));
    }

    fn tree(&self, prefix: IpNet) -> &Tree<T> {
        match prefix {
            IpNet::V4(_) => &self.v4,
            IpNet::V6(_) => &self.v6,
        }
    }

    fn tree_mut(&mut self, prefix: IpNet) -> &mut Tree<T> {
        match prefix {
            IpNet::V4(_) => &mut self.v4,
            IpNet::V6(_) => &mut self.v6,
        }
    }
}

/// A prefix as the trie has it: address bits from the top of a `u128`, host bits zero.
fn spell(prefix: IpNet) -> (u128, u8) {
    match prefix.trunc() {
        IpNet::V4(net) => (u128::from(net.addr().to_bits()) << 96, net.prefix_len()),
        IpNet::V6(net) => (net.addr().to_bits(), net.prefix_len()),
    }
}

/// Inverse of [`spell`] in the family of `like`.
fn read(like: IpNet, bits: u128, len: u8) -> IpNet {
    match like {
        IpNet::V4(_) => {
            let top = u32::try_from(bits >> 96).expect("128 - 96 bits are left");
            Ipv4Net::new(Ipv4Addr::from_bits(top), len.min(32)).map_or(like, IpNet::V4)
        }
        IpNet::V6(_) => {
            Ipv6Net::new(Ipv6Addr::from_bits(bits), len.min(128)).map_or(like, IpNet::V6)
        }
    }
}

/// A node is small: on the way to a value a dozen of them are read.
#[derive(Debug)]
struct Node {
    bits: u128,
    children: [u32; 2],
    /// Index of its value; [`NONE`] = it has none.
    value: u32,
    len: u8,
}

/// A prefix that has a value, and the place of the value.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    bits: u128,
    len: u8,
    slot: Option<u32>,
}

impl Last {
    fn slot_of(&self, bits: u128, len: u8) -> Option<u32> {
        self.slot.filter(|_| (self.bits, self.len) == (bits, len))
    }
}

#[derive(Debug)]
struct Tree<T> {
    /// Node of the last requested prefix: callers often request the same one again.
    last: Cell<Last>,
    nodes: Vec<Node>,
    free: Vec<u32>,
    slots: Vec<Option<T>>,
    free_slots: Vec<u32>,
}

impl<T> Tree<T> {
    fn new() -> Self {
        let root = Node {
            bits: 0,
            children: [NONE; 2],
            len: 0,
            value: NONE,
        };
        Self {
            last: Cell::default(),
            nodes: vec![root],
            free: Vec::new(),
            slots: Vec::new(),
            free_slots: Vec::new(),
        }
    }

    fn values(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    fn value(&self, node: &Node) -> Option<&T> {
        self.slots.get(node.value as usize)?.as_ref()
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    /// Place of the value of exactly this prefix.
    fn find(&self, bits: u128, len: u8) -> Option<u32> {
        let last = self.last.get().slot_of(bits, len);
        if last.is_some() {
            return last;
        }
        let slot = self.node(self.walk_to(bits, len)?).value;
        self.note(bits, len, slot);
        (slot != NONE).then_some(slot)
    }

    fn note(&self, bits: u128, len: u8, slot: u32) {
        if slot != NONE {
            let slot = Some(slot);
            self.last.set(Last { bits, len, slot });
        }
    }

    fn walk_to(&self, bits: u128, len: u8) -> Option<u32> {
        let mut at = 0;
        loop {
            let node = self.node(at);
            if node.len > len || !covers(node.bits, node.len, bits) {
                return None;
            }
            if node.len == len {
                return Some(at);
            }
            at = node.children[bit(bits, node.len)];
            if at == NONE {
                return None;
            }
        }
    }

    fn get(&self, bits: u128, len: u8) -> Option<&T> {
        let slot = self.find(bits, len)?;
        self.slots.get(slot as usize)?.as_ref()
    }

    fn get_mut(&mut self, bits: u128, len: u8) -> Option<&mut T> {
        let slot = self.find(bits, len)?;
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    fn add(&mut self, bits: u128, len: u8, children: [u32; 2]) -> u32 {
        let node = Node {
            bits,
            children,
            len,
            value: NONE,
        };
        if let Some(at) = self.free.pop() {
            *self.node_mut(at) = node;
            at
        } else {
            self.nodes.push(node);
            u32::try_from(self.nodes.len() - 1).expect("fewer than 2^32 prefixes fit in memory")
        }
    }

    fn place(&mut self, bits: u128, len: u8) -> u32 {
        let mut at = 0;
        loop {
            let here = self.node(at).len;
            if here == len {
                return at;
            }
            let side = bit(bits, here);
            let child = self.node(at).children[side];
            if child == NONE {
                let leaf = self.add(bits, len, [NONE; 2]);
                self.node_mut(at).children[side] = leaf;
                return leaf;
            }
            let (child_bits, child_len) = (self.node(child).bits, self.node(child).len);
            let common = shared(bits, child_bits).min(len).min(child_len);
            if common == child_len {
                at = child;
                continue;
            }
            let mut children = [NONE; 2];
            children[bit(child_bits, common)] = child;
            let middle = self.add(mask(bits, common), common, children);
            self.node_mut(at).children[side] = middle;
            at = middle;
        }
    }

    fn entry(&mut self, bits: u128, len: u8) -> &mut T
    where
        T: Default,
    {
        if let Some(slot) = self.last.get().slot_of(bits, len) {
            return self.slots[slot as usize].get_or_insert_default();
        }
        let at = self.place(bits, len);
        let mut slot = self.node(at).value;
        if slot == NONE {
            slot = self.free_slots.pop().unwrap_or_else(|| {
                self.slots.push(None);
                u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 prefixes fit in memory")
            });
            self.node_mut(at).value = slot;
        }
        self.note(bits, len, slot);
        self.slots[slot as usize].get_or_insert_default()
    }

    fn remove(&mut self, bits: u128, len: u8) -> Option<T> {
        let (mut grandparent, mut parent, mut at) = (NONE, NONE, 0);
        while self.node(at).len < len {
            let next = self.node(at).children[bit(bits, self.node(at).len)];
            if next == NONE || !covers(self.node(next).bits, self.node(next).len, bits) {
                return None;
            }
            (grandparent, parent, at) = (parent, at, next);
        }
        if self.node(at).len != len {
            return None;
        }
        let slot = std::mem::replace(&mut self.node_mut(at).value, NONE);
        let value = self.slots.get_mut(slot as usize)?.take()?;
        self.free_slots.push(slot);
        self.last.take();
        if self.splice(parent, at) && parent != NONE {
            self.splice(grandparent, parent);
        }
        Some(value)
    }

    /// Takes a node out if it has no value and fewer than two children.
    fn splice(&mut self, parent: u32, at: u32) -> bool {
        let node = self.node(at);
        if parent == NONE || node.value != NONE {
            return false;
        }
        let only = match node.children {
            [NONE, NONE] => NONE,
            [one, NONE] | [NONE, one] => one,
            _ => return false,
        };
        let side = bit(node.bits, self.node(parent).len);
        self.node_mut(parent).children[side] = only;
        self.free.push(at);
        true
    }

    fn walk<'a>(&'a self, bits: u128, len: u8, mut visit: impl FnMut(u128, u8, &'a T)) {
        let mut at = 0;
        loop {
            let node = self.node(at);
            if node.len > len || !covers(node.bits, node.len, bits) {
                return;
            }
            if let Some(value) = self.value(node) {
                visit(node.bits, node.len, value);
            }
            if node.len == len {
                return;
            }
            at = node.children[bit(bits, node.len)];
            if at == NONE {
                return;
            }
        }
    }

    fn below<'a>(&'a self, bits: u128, len: u8, mut visit: impl FnMut(u128, u8, &'a T)) {
        let mut at = 0;
        while self.node(at).len < len {
            let node = self.node(at);
            at = node.children[bit(bits, node.len)];
            if at == NONE {
                return;
            }
        }
        if !covers(bits, len, self.node(at).bits) {
            return;
        }
        let mut stack = vec![at];
        while let Some(at) = stack.pop() {
            let node = self.node(at);
            if let Some(value) = self.value(node) {
                visit(node.bits, node.len, value);
            }
            stack.extend(node.children.iter().rev().filter(|child| **child != NONE));
        }
    }

    /// Visits the prefixes after a given one, which need not be there, until `visit` says that it is
    /// enough.
    fn after<'a>(
        &'a self,
        from: Option<(u128, u8)>,
        mut visit: impl FnMut(u128, u8, &'a T) -> bool,
    ) {
        let mut stack = vec![0];
        while let Some(at) = stack.pop() {
            let node = self.node(at);
            let last = node.bits | !mask(u128::MAX, node.len);
            if from.is_some_and(|(bits, _)| last < bits) {
                continue;
            }
            let later = from.is_none_or(|from| (node.bits, node.len) > from);
            if let Some(value) = self.value(node).filter(|_| later)
                && !visit(node.bits, node.len, value)
            {
                return;
            }
            stack.extend(node.children.iter().rev().filter(|child| **child != NONE));
        }
    }
}

/// Bit number `at` (0 = first) as an index.
fn bit(bits: u128, at: u8) -> usize {
    usize::from(bits >> (127 - u32::from(at.min(127))) & 1 == 1)
}

/// The first `len` bits, the rest zero.
fn mask(bits: u128, len: u8) -> u128 {
    if len == 0 {
        0
    } else {
        bits & (u128::MAX << (128 - u32::from(len)))
    }
}

/// Whether the first `len` bits agree.
fn covers(prefix: u128, len: u8, bits: u128) -> bool {
    mask(prefix ^ bits, len) == 0
}

/// Number of leading bits that agree.
fn shared(one: u128, other: u128) -> u8 {
    u8::try_from((one ^ other).leading_zeros()).expect("at most 128")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn finds_covering_and_contained() {
        let mut map = PrefixMap::default();
        for (n, text) in [
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.1.0.0/16",
            "10.1.2.3/32",
            "11.0.0.0/8",
        ]
        .iter()
        .enumerate()
        {
            *map.entry(net(text)) = n;
        }
        let covering: Vec<_> = map
            .covering(net("10.1.2.3/32"))
            .iter()
            .map(|(p, _)| *p)
            .collect();
        assert_eq!(
            covering,
            [
                net("0.0.0.0/0"),
                net("10.0.0.0/8"),
                net("10.1.0.0/16"),
                net("10.1.2.3/32")
            ]
        );
        assert_eq!(map.descendants(net("10.1.0.0/16")).len(), 2);
        assert_eq!(map.descendants(net("12.0.0.0/8")).len(), 0);
        let found = map.longest("10.9.9.9".parse().unwrap(), |_| true).unwrap();
        assert_eq!(found.0, net("10.0.0.0/8"));
        assert_eq!(map.remove(net("10.1.0.0/16")), Some(2));
        assert_eq!(map.get(net("10.1.0.0/16")), None);
        assert_eq!(map.get(net("10.1.2.3/32")), Some(&3));
    }

    fn prefixes() -> impl Strategy<Value = IpNet> {
        // Few distinct bits, so that prefixes meet often.
        (any::<bool>(), 0u32..16, 0u8..=32).prop_map(|(v6, top, len)| {
            if v6 {
                let address = Ipv6Addr::from_bits(u128::from(top) << 96 | u128::from(top));
                IpNet::new(address.into(), len * 4).unwrap().trunc()
            } else {
                let address = Ipv4Addr::from_bits(top << 28 | top << 8 | top);
                IpNet::new(address.into(), len).unwrap().trunc()
            }
        })
    }

    proptest! {
        #[test]
        fn agrees_with_a_plain_map(ops in prop::collection::vec((prefixes(), any::<bool>()), 1..80), ask in prefixes()) {
            let mut trie = PrefixMap::default();
            let mut plain = BTreeMap::new();
            for (n, (prefix, add)) in ops.into_iter().enumerate() {
                if add {
                    *trie.entry(prefix) = n;
                    plain.insert(prefix, n);
                } else {
                    prop_assert_eq!(trie.remove(prefix), plain.remove(&prefix));
                }
            }
            prop_assert_eq!(trie.len(), plain.len());
            let mut below = trie.descendants(ask);
            below.sort();
            let expected: Vec<_> = plain.keys().copied().filter(|p| ask.contains(p)).collect();
            prop_assert_eq!(below, expected);
            let covering: Vec<_> = trie.covering(ask).into_iter().map(|(p, _)| p).collect();
            let mut expected: Vec<_> = plain.keys().copied().filter(|p| p.contains(&ask)).collect();
            expected.sort_by_key(IpNet::prefix_len);
            prop_assert_eq!(covering, expected);
            for (prefix, value) in &plain {
                prop_assert_eq!(trie.get(*prefix), Some(value));
            }
            let order = |prefix: &IpNet| (prefix.addr().is_ipv6(), spell(*prefix));
            let mut later: Vec<_> = plain.keys().copied().filter(|p| order(p) > order(&ask)).collect();
            later.sort_by_key(order);
            later.truncate(7);
            let after: Vec<_> = trie.after(Some(ask), 7).into_iter().map(|(p, _)| p).collect();
            prop_assert_eq!(after, later);
            prop_assert_eq!(trie.after(None, 100).len(), plain.len());
        }
    }
}
