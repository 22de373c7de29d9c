//! Blocks of addresses and port numbers as ranges, of which no two overlap or touch.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use crate::{
    group::Family,
    policy::Block,
    render::ruleset::{Element, Type, Value},
};

/// Members of a set of ranges; one range of every value is not among them.
pub(super) type Ranges = BTreeSet<Element>;

/// The addresses of one family that blocks cover.
pub(super) fn of_blocks(blocks: &[Block], family: Family) -> Ranges {
    let blocks = blocks.iter();
    let blocks = blocks.filter(|block| Family::of(block.prefix().addr()) == family);
    Element::merged(blocks.flat_map(without_except))
}

/// Whether these are all addresses.
pub(super) fn is_everything(ranges: &Ranges) -> bool {
    ranges.iter().any(|range| {
        matches!(range, Element::Range(first, last)
            if first.previous().is_none() && last.next().is_none())
    })
}

/// The type of the set that has these members.
pub(super) fn type_of(ranges: &Ranges) -> Option<Type> {
    match ranges.first()? {
        Element::Range(first, _) | Element::One(first) | Element::Pair(first, _) => {
            Some(first.of_type())
        }
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
        let ranges = of_blocks(blocks, family);
        let shown = ranges.iter().map(|range| match range {
            Element::Range(Value::Ipv4(first), Value::Ipv4(last)) => format!("{first}-{last}"),
            Element::Range(Value::Ipv6(first), Value::Ipv6(last)) => format!("{first}-{last}"),
            other => panic!("{other:?}"),
        });
        shown.collect()
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
        let ends = block("10.0.0.0/30", &["10.0.0.0/32", "10.0.0.2/31", "10.0.0.3/32"]);
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
        let whole = [block("0.0.0.0/1", &[]), block("128.0.0.0/1", &[])];
        assert!(is_everything(&of_blocks(&whole, Family::V4)));
        assert!(!is_everything(&of_blocks(&blocks, Family::V4)));
    }
}
