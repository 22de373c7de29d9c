//! Objects as documents.

use serde_json::{Value, json};

use super::*;

fn read(document: &Value) -> Read {
    Resolver::read(document, "openshift-ovn-kubernetes").unwrap()
}

fn object(spec: &str, names: &Value) -> Value {
    json!({
        "apiVersion": API_VERSION, "kind": KIND,
        "metadata": {"name": "dns-1", "namespace": "n", "resourceVersion": "7", "uid": "u"},
        "spec": {"name": spec},
        "status": {"resolvedNames": names},
    })
}

#[test]
fn an_object_reads_back_as_it_was_written_in_json_and_yaml() {
    let address =
        json!({"ip": "192.0.2.1", "ttlSeconds": 30, "lastLookupTime": "2026-11-23T08:00:00Z"});
    let condition = json!({
        "type": "Degraded", "status": "False", "reason": "NOERROR", "message": "No Error",
        "lastTransitionTime": "2026-11-23T07:00:00Z",
    });
    let entry = |name: &str| {
        json!({
            "conditions": [condition], "dnsName": name, "resolvedAddresses": [address],
            "resolutionFailures": 2,
        })
    };
    let document = object(
        "*.example.com.",
        &json!([entry("a.example.com."), entry("*.example.com.")]),
    );
    let Read { object, flaws } = read(&document);
    assert!(flaws.is_empty(), "{flaws:?}");
    assert_eq!(object.key.to_string(), "n/dns-1");
    assert_eq!(object.version, Version("7".to_owned()));
    let names: Vec<_> = object
        .status
        .names
        .iter()
        .map(|entry| entry.name.as_str())
        .collect();
    assert_eq!(
        names,
        ["*.example.com.", "a.example.com."],
        "the wildcard is the first"
    );
    let yaml = serde_yaml_ng::to_string(&object.document()).unwrap();
    for written in [
        object.document(),
        limits::yaml::documents(&yaml)[0].value().unwrap(),
    ] {
        assert_eq!(read(&written).object, object);
    }
}

#[test]
fn an_object_of_an_older_definition_is_lowered_and_others_are_refused_by_field() {
    assert_eq!(
        read(&object("WWW.Example.com.", &json!([])))
            .object
            .name
            .as_str(),
        "www.example.com."
    );
    for (document, says) in [
        (
            object("com.", &json!([])),
            "spec.name \"com.\" has one label",
        ),
        (json!({"kind": "ConfigMap"}), "apiVersion"),
        (
            json!({"apiVersion": "network.openshift.io/v1", "kind": KIND, "metadata": {"name": "a"}, "spec": {"name": "a.b."}}),
            "only DNSNameResolver of network.openshift.io/v1alpha1",
        ),
        (json!([1]), "an object has"),
    ] {
        let error = Resolver::read(&document, "n").unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn entries_that_cannot_be_used_are_left_out_and_named() {
    let names = json!([
        {"dnsName": "www.example.com.", "resolvedAddresses": [
            {"ip": "192.0.2.1", "ttlSeconds": -1, "lastLookupTime": null},
            {"ip": "nonsense", "ttlSeconds": 1, "lastLookupTime": null},
            {"ip": "192.0.2.1", "ttlSeconds": 1, "lastLookupTime": null},
            {"ip": "192.0.2.2", "ttlSeconds": 4_294_967_296_u64, "lastLookupTime": "soon"},
        ], "resolutionFailures": -7},
        {"dnsName": "www.example.com.", "resolvedAddresses": []},
        {"dnsName": "www.example.org.", "resolvedAddresses": []},
        {"dnsName": "a_b.example.com."},
        7,
    ]);
    let Read { object, flaws } = read(&object("www.example.com.", &names));
    assert_eq!(object.status.names.len(), 1);
    let entry = &object.status.names[0];
    assert_eq!(entry.failures, 0);
    let addresses: Vec<_> = entry
        .addresses
        .iter()
        .map(|a| (a.ip.to_string(), a.ttl, a.last.0))
        .collect();
    assert_eq!(
        addresses,
        [
            ("192.0.2.1".to_owned(), 0, 0),
            ("192.0.2.2".to_owned(), 0, 0)
        ]
    );
    let all = flaws.join("\n");
    for says in [
        "status.resolvedNames[0].resolvedAddresses[1].ip: \"nonsense\" is not an address",
        "resolvedAddresses[2].ip: 192.0.2.1 is there twice",
        "status.resolvedNames[1].dnsName: www.example.com. is there twice",
        "status.resolvedNames[2].dnsName: www.example.org. is not one of www.example.com.",
    ] {
        assert!(all.contains(says), "{all}");
    }
}

#[test]
fn the_addresses_of_an_object_edited_by_hand_are_bounded() {
    let addresses = |net: u32, count: u32| -> Vec<_> {
        (0..count)
            .map(|n| json!({"ip": std::net::Ipv4Addr::from(net + n).to_string(), "ttlSeconds": 1, "lastLookupTime": null}))
            .collect()
    };
    let many: Vec<_> = (0..300_u32)
        .map(|n| json!({"dnsName": format!("n{n}.example.com."), "resolvedAddresses": addresses(n << 16, if n < 4 { 20_000 } else { 1 })}))
        .collect();
    let Read { object, flaws } = read(&object("*.example.com.", &json!(many)));
    assert_eq!(object.status.names.len(), MAX_NAMES);
    assert_eq!(object.status.names[0].addresses.len(), MAX_ADDRESSES);
    assert_eq!(object.status.count(), MAX_ADDRESSES_OF_OBJECT);
    assert!(
        flaws[0].contains("at most 1000 addresses of a name"),
        "{flaws:?}"
    );
}
