//! The vectors of the high-scale ipcache that need no packet. The test counts those of each group, so that none is
//! left out unseen. Packets (`encap_decision`, `decap`) are in the kernel tier (`e2e/tests/kernel/tunnel.rs`), under the
//! same ids.

use std::collections::BTreeMap;

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

/// Vectors of each group that this test runs.
const RUN: [(&str, usize); 4] = [
    ("ciliumworldcidrs_spec", 5),
    ("identity_to_vxlan_header", 8),
    ("mtu", 3),
    ("world_map_key", 3),
];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

/// What a group of vectors says about `given`; none for other groups.
fn outcome(group: &str, given: &Value, expect: &Value) -> Option<Value> {
    Some(match group {
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
        _ => return None,
    })
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
    let all: Value = serde_json::from_str(VECTORS).unwrap();
    let cases = all["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 60);
    let mut run = BTreeMap::new();
    for case in cases {
        let group = case["group"].as_str().unwrap();
        if let Some(found) = outcome(group, &case["given"], &case["expect"]) {
            assert_eq!(found, case["expect"], "{}", case["id"]);
            *run.entry(group).or_insert(0) += 1;
        }
    }
    assert_eq!(run.into_iter().collect::<Vec<_>>(), RUN);
}
