//! The vectors about settings, which this agent has as flags (`agent/core/src/high_scale/vectors.json`).

use serde_json::Value;

use super::super::{from_args::node_settings, parsed::args};

static VECTORS: &str = include_str!("../../../core/src/high_scale/vectors.json");

/// Flags that say what a vector gives.
fn flags(given: &Value) -> Vec<&'static str> {
    let is = |name: &str| given[name].as_bool().unwrap();
    let mut flags = vec!["--high-scale-ipcache=full"];
    if !is("ipv6") {
        flags.push("--enable-ipv6=false");
    }
    // Numbers that mean the same on all nodes: here those of CiliumIdentities.
    if is("wellKnownIdentities") {
        flags.push("--policy-dir=/etc");
    }
    // A pod's packets always leave the node under the pod's own address.
    if given["routingMode"] != "native" {
        flags.push("--routing-mode=tunnel");
    }
    flags
}

/// Why the agent does not start.
fn refusal(given: &Value) -> Option<String> {
    let args = match args(&flags(given)) {
        Ok(args) => args,
        Err(error) => return Some(error),
    };
    let mut node = node_settings(&args);
    node.default_device = match given["nativeDeviceFound"].as_bool() {
        Some(false) => || Ok(None),
        _ => || Ok(Some("eth0".to_owned())),
    };
    let settings = match args.high_scale.settings(&node) {
        Ok(settings) => settings.unwrap(),
        Err(error) => return Some(error.to_string()),
    };
    let takes_outer_source = given["kernelOuterSource"].as_bool().unwrap();
    let checked = settings.check_kernel(|| Ok(takes_outer_source));
    checked.err().map(|error| error.to_string())
}

/// The words with which this agent refuses each vector that is to be refused.
const WORDS: [(&str, &str); 4] = [
    // There is no other way of routing that could be set by mistake.
    ("conf-2", "unexpected argument '--routing-mode'"),
    // There are no well-known identities; what the mode needs of them are equal numbers on all nodes.
    (
        "conf-5",
        "--high-scale-ipcache: full needs numbers that mean the same on all nodes",
    ),
    (
        "conf-6",
        "this kernel does not let a program set the source address of wrapped packets; use Linux 6.0",
    ),
    (
        "conf-8",
        "--high-scale-device: is absent, and there is no default route of IPv4; name a device",
    ),
];

#[test]
fn high_scale_vectors_of_settings_hold() {
    let all: Value = serde_json::from_str(VECTORS).unwrap();
    let cases = all["cases"].as_array().unwrap().iter();
    let mut run = 0;
    for vector in cases.filter(|case| case["group"] == "config_check") {
        let id = vector["id"].as_str().unwrap();
        let given = &vector["given"];
        // This agent has neither IPsec nor an egress gateway.
        for absent in ["ipsec", "egressGateway"] {
            assert_eq!(given[absent], false, "{id}");
        }
        let refusal = refusal(given);
        let words = WORDS.iter().find(|(name, _)| *name == id);
        match (words, vector["expect"]["ok"].as_bool()) {
            (None, Some(true)) => assert_eq!(refusal, None, "{id}"),
            (Some((_, words)), None) => {
                let refusal = refusal.unwrap();
                assert!(refusal.contains(words), "{id}: {refusal}");
            }
            _ => panic!("{id}: {vector}"),
        }
        run += 1;
    }
    assert_eq!(run, 5);
}
