//! A block of addresses without its excepted parts, as prefixes.

use ipnet::IpNet;

use crate::policy::Block;

/// The prefixes that together have the addresses of a block, without the addresses of its `except`.
pub fn pieces(block: &Block) -> Vec<IpNet> {
    let whole = vec![block.prefix()];
    block.except().iter().fold(whole, |pieces, except| {
        let left = pieces.iter().flat_map(|piece| minus(*piece, *except));
        left.collect()
    })
}

/// A prefix without the addresses of another prefix. The widest piece comes first.
fn minus(whole: IpNet, except: IpNet) -> Vec<IpNet> {
    if except.contains(&whole) {
        return Vec::new();
    }
    if !whole.contains(&except) {
        return vec![whole];
    }
    // Each step narrows the prefix to the half that contains the part, and keeps the other half.
    let mut left = Vec::new();
    let mut within = whole;
    while within != except {
        let halves = within.subnets(within.prefix_len() + 1);
        for half in halves.into_iter().flatten() {
            if half.contains(&except) {
                within = half;
            } else {
                left.push(half);
            }
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_another_family_is_no_part() {
        let [four, six]: [IpNet; 2] = ["10.0.0.0/8", "2001:db8::/32"].map(|t| t.parse().unwrap());
        assert_eq!(minus(four, six), [four]);
    }
}
