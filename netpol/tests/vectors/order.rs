//! The order of rules, and blocks with excepted parts.

use ipnet::IpNet;
use netpol::{blocks::pieces, policy::Block};
use serde_json::Value;

use super::read::{cases, list, number, rule, text};

#[test]
fn rules_are_ordered() {
    for case in cases(include_str!("order.json"), 63) {
        let [left, right] = ["left", "right"].map(|side| rule(&case["given"][side]));
        assert_eq!(case["expect"], -1);
        assert!(left < right, "{}", case["id"]);
    }
}

#[test]
fn blocks_without_parts() {
    let net = |value: &Value| text(value).parse::<IpNet>().unwrap();
    for case in cases(include_str!("blocks.json"), 14) {
        let (given, expect) = (&case["given"], &case["expect"]);
        let except: Vec<IpNet> = match &given["except"] {
            Value::Array(parts) => parts.iter().map(net).collect(),
            part => vec![net(part)],
        };
        let whole = net(&given["cidr"]);
        let found = match Block::new("", whole, &except) {
            Ok(block) => pieces(&block),
            // A policy with such a block is refused.
            Err(_) if except.iter().any(|part| part.contains(&whole)) => Vec::new(),
            Err(_) => vec![whole],
        };
        let wanted: Vec<IpNet> = match &expect["result"] {
            Value::Null => list(&expect["result_sorted"]).map(net).collect(),
            result => list(result).map(net).collect(),
        };
        let mut found = found;
        let mut wanted = wanted;
        if !expect["addresses"].is_null() {
            let sizes = found
                .iter()
                .map(|piece| 1 << (piece.max_prefix_len() - piece.prefix_len()));
            assert_eq!(sizes.sum::<usize>(), number(&expect["addresses"]));
            found.sort_unstable();
            wanted.sort_unstable();
        }
        assert_eq!(found, wanted, "{}", case["id"]);
    }
}
