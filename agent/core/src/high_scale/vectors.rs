//! The vectors of the high-scale ipcache (`vectors.json`), and the table of the tests that run them. Each of these
//! tests counts its vectors. This one runs those that need neither a node, nor flags, nor packets.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;
use shared_maps::{
    IdentityId,
    tunnel::{self, TunnelConfig},
    user::Record as _,
    world::WorldKey,
};

use super::blocks::Blocks;
use crate::policy::{document::Body, parse::parse_documents};

static VECTORS: &str = include_str!("vectors.json");

/// The test of this file.
const HERE: &str = "agent/core/src/high_scale/vectors.rs";
/// Nodes with the documents of a cluster.
const NODES: &str = "agent/core/src/core/tests/high_scale/vectors.rs";
/// Flags of the agent.
const FLAGS: &str = "agent/src/config/high_scale_args/vectors.rs";
/// Packets through the programs.
const PACKETS: &str = "e2e/tests/kernel/tunnel_vectors.rs";

/// How many vectors each group has, and which file runs them.
const RUN: [(&str, usize, &str); 11] = [
    ("ciliumworldcidrs_spec", 5, HERE),
    ("config_check", 5, FLAGS),
    ("decap", 7, PACKETS),
    ("encap_decision", 10, PACKETS),
    ("identity_to_vxlan_header", 8, HERE),
    ("ipcache_growth", 2, NODES),
    ("ipcache_keep", 10, NODES),
    ("local_source_identity", 1, PACKETS),
    ("migration_matrix", 6, PACKETS),
    ("mtu", 3, HERE),
    ("world_map_key", 3, HERE),
];

/// All vectors of a group. Fails if there are not as many as [`RUN`] says.
pub(crate) fn of_group(group: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(VECTORS).unwrap();
    let cases = all["cases"].as_array().unwrap().iter();
    let cases = cases.filter(|case| case["group"] == group).cloned();
    let cases: Vec<Value> = cases.collect();
    let (_, count, _) = RUN.iter().find(|(name, ..)| *name == group).unwrap();
    assert_eq!(cases.len(), *count, "{group}");
    cases
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

/// What the product does with `given`.
fn outcome(group: &str, given: &Value, expect: &Value) -> Value {
    match group {
        "world_map_key" => {
            let block: ipnet::Ipv4Net = given["cidr"].as_str().unwrap().parse().unwrap();
            let key = WorldKey::new(block.network().octets(), block.prefix_len()).unwrap();
            let value = hex(&[shared_maps::world::PRESENT]);
            serde_json::json!({"key_hex": hex(key.as_bytes()), "value_hex": value})
        }
        "identity_to_vxlan_header" => match tunnel::vni(IdentityId(number(&given["identity"]))) {
            Some(vni) => serde_json::json!({
                "vxlan_header_hex": hex(&tunnel::header(vni)), "udp_dport": tunnel::DEFAULT_PORT,
            }),
            // The words are the vector's own.
            None => serde_json::json!({"error": expect["error"].as_str().unwrap()}),
        },
        "mtu" => {
            let mtu = number(&given["device_mtu"]);
            let config = TunnelConfig {
                mtu,
                ..TunnelConfig::default()
            };
            serde_json::json!({"route_mtu": config.inner_mtu(), "device_mtu": mtu})
        }
        "ciliumworldcidrs_spec" => world(&given["cidrs"]),
        _ => panic!("{group} does not run here"),
    }
}

/// Blocks that a node takes from one object, in order, or `error`.
fn world(cidrs: &Value) -> Value {
    let text = format!(
        "apiVersion: cilium.io/v2alpha1\nkind: CiliumWorldCIDRs\nmetadata: {{name: a}}\nspec: {{cidrs: {cidrs}}}\n"
    );
    let Ok(document) = parse_documents(&text, "test.yaml").remove(0) else {
        return Value::from("error");
    };
    let Body::World(world) = document.body else {
        panic!("{text}");
    };
    assert_eq!(
        Blocks::of(world.blocks.iter()).unwrap().keys().len(),
        world.blocks.len()
    );
    world.blocks.iter().map(ToString::to_string).collect()
}

#[test]
fn high_scale_vectors_hold() {
    let mut run = 0;
    for (group, _, _) in RUN.iter().filter(|(.., place)| *place == HERE) {
        for case in of_group(group) {
            let found = outcome(group, &case["given"], &case["expect"]);
            assert_eq!(found, case["expect"], "{}", case["id"]);
            run += 1;
        }
    }
    assert_eq!(run, 19);
}

#[test]
fn high_scale_vectors_all_run_somewhere() {
    let all: Value = serde_json::from_str(VECTORS).unwrap();
    let mut groups: BTreeMap<&str, usize> = BTreeMap::new();
    for case in all["cases"].as_array().unwrap() {
        *groups.entry(case["group"].as_str().unwrap()).or_default() += 1;
    }
    let listed = RUN.map(|(group, count, _)| (group, count));
    assert_eq!(groups, BTreeMap::from(listed));
    assert_eq!(groups.values().sum::<usize>(), 60);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (group, _, place) in RUN {
        let text = std::fs::read_to_string(root.join(place)).unwrap();
        assert!(text.contains(&format!("\"{group}\"")), "{place}: {group}");
    }
}
