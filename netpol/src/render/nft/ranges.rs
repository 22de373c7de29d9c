//! Blocks of addresses and port numbers as ranges that neither overlap nor touch.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use crate::{
    group::Family,
    policy::Block,
    render::ruleset::{Element, Type, Value},
};

/// One or more ranges of values of one type.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Ranges {
    /// From the first value to the last.
    One(Value, Value),
    /// Members of a set.
    Several(RangeSet),
}

/// Several ranges.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct RangeSet {
    pub(super) of_type: Type,
    pub(super) elements: BTreeSet<Element>,
}

impl Ranges {
    /// Any of these ranges, merged where they overlap or touch; `None` if there are no ranges.
    pub(super) fn of(ranges: impl IntoIterator<Item = (Value, Value)>) -> Option<Self> {
        let elements = Element::merged(ranges);
        let Element::Range(first, last) = *elements.first()? else {
            return None;
        };
        let of_type = first.of_type();
        Some(match elements.len() {
            1 => Self::One(first, last),
            _ => Self::Several(RangeSet { of_type, elements }),
        })
    }

    /// The addresses of one family that blocks cover; `None` if they cover no address.
    pub(super) fn of_blocks(blocks: &[Block], family: Family) -> Option<Self> {
        let blocks = blocks.iter();
        let blocks = blocks.filter(|block| Family::of(block.prefix().addr()) == family);
        Self::of(blocks.flat_map(without_except))
    }

    /// Whether these ranges contain all values of the type.
    pub(super) fn is_everything(&self) -> bool {
        matches!(self, Self::One(first, last)
            if first.previous().is_none() && last.next().is_none())
    }
}

/// An address as a value.
pub(super) const fn address(address: IpAddr) -> Value {
    match address {
        IpAddr::V4(address) => Value::Ipv4(address),
        IpAddr::V6(address) => Value::Ipv6(address),
    }
}

fn of_prefix(prefix: &IpNet) -> (Value, Value) {
    (address(prefix.network()), address(prefix.broadcast()))
}

fn without_except(block: &Block) -> Vec<(Value, Value)> {
    let (first, last) = of_prefix(&block.prefix());
    let (mut ranges, mut next) = (Vec::new(), Some(first));
    for part in Element::merged(block.except().iter().map(of_prefix)) {
        let (Element::Range(from, to), Some(start)) = (part, next) else {
            continue;
        };
        if let Some(end) = from.previous().filter(|end| start <= *end) {
            ranges.push((start, end));
        }
        next = to.next();
    }
    if let Some(start) = next.filter(|start| *start <= last) {
        ranges.push((start, last));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(prefix: &str, except: &[&str]) -> Block {
        let except: Vec<IpNet> = except.iter().map(|part| part.parse().unwrap()).collect();
        Block::new("", prefix.parse().unwrap(), &except).unwrap()
    }

    fn shown(blocks: &[Block], family: Family) -> Vec<String> {
        let range = |first: &Value, last: &Value| match (first, last) {
            (Value::Ipv4(first), Value::Ipv4(last)) => format!("{first}-{last}"),
            (Value::Ipv6(first), Value::Ipv6(last)) => format!("{first}-{last}"),
            other => panic!("{other:?}"),
        };
        match Ranges::of_blocks(blocks, family) {
            None => Vec::new(),
            Some(Ranges::One(first, last)) => vec![range(&first, &last)],
            Some(Ranges::Several(set)) => {
                let elements = set.elements.iter().map(|element| match element {
                    Element::Range(first, last) => range(first, last),
                    other => panic!("{other:?}"),
                });
                elements.collect()
            }
        }
    }

    #[test]
    fn blocks_without_their_parts() {
        let private = ["192.168.0.0/16", "10.0.0.0/8", "172.16.0.0/12"];
        let found = shown(&[block("0.0.0.0/0", &private)], Family::V4);
        let wanted = [
            "0.0.0.0-9.255.255.255",
            "11.0.0.0-172.15.255.255",
            "172.32.0.0-192.167.255.255",
            "192.169.0.0-255.255.255.255",
        ];
        assert_eq!(found, wanted);
        // Both ends, and parts that cover each other.
        let ends = block(
            "10.0.0.0/30",
            &["10.0.0.0/32", "10.0.0.2/31", "10.0.0.3/32"],
        );
        assert_eq!(shown(&[ends], Family::V4), ["10.0.0.1-10.0.0.1"]);
        let nothing = block("10.0.0.0/31", &["10.0.0.0/32", "10.0.0.1/32"]);
        assert_eq!(shown(&[nothing], Family::V4), [""; 0]);
        let last = block("::/0", &["ffff::/16"]);
        let wanted = ["::-fffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff"];
        assert_eq!(shown(&[last], Family::V6), wanted);
    }

    #[test]
    fn blocks_that_touch_are_one_range() {
        let blocks = [
            block("10.0.1.0/24", &[]),
            block("10.0.0.0/24", &[]),
            block("2001:db8::/64", &[]),
        ];
        assert_eq!(shown(&blocks, Family::V4), ["10.0.0.0-10.0.1.255"]);
        assert_eq!(shown(&blocks, Family::V6).len(), 1);
        let halves = [block("0.0.0.0/1", &[]), block("128.0.0.0/1", &[])];
        assert!(
            Ranges::of_blocks(&halves, Family::V4)
                .unwrap()
                .is_everything()
        );
        assert!(
            !Ranges::of_blocks(&halves[..1], Family::V4)
                .unwrap()
                .is_everything()
        );
    }
}
