//! A compromised proxy sends false mappings over the real socket. It opens nothing that policy does
//! not allow, and each false mapping gets its reason.

use agent_core::core::Event;
use dns_policy::boot_time::BootTime;
use fqdn_proto::native::{FqdnMapping, MappingRefusal};

use crate::lab::{Lab, mapping, pod, policy};

type Lie = fn(&mut FqdnMapping);

fn with_addresses(message: &mut FqdnMapping, addresses: &[&str]) {
    message.addresses = addresses
        .iter()
        .map(|text| match text.parse().unwrap() {
            std::net::IpAddr::V4(v4) => v4.octets().to_vec(),
            std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
        })
        .collect();
}

#[tokio::test]
async fn false_mappings_open_nothing() {
    let lab = Lab::start();
    let node = "10.0.0.1".parse().unwrap();
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    lab.core
        .send(Event::NodeAddresses(vec![node]))
        .await
        .unwrap();
    let endpoint = lab.endpoint().await;
    let mut stream = lab.mappings().await;
    let before = lab.datapath.memory.lock().ipcache.clone();

    let refused: [(Lie, MappingRefusal); 10] = [
        (
            |m| m.name = "www.evil.test.".into(),
            MappingRefusal::NotAllowed,
        ),
        (
            |m| m.name = "example.com.".into(),
            MappingRefusal::NotAllowed,
        ),
        (|m| m.server_port = 5353, MappingRefusal::NotAllowed),
        (|m| m.protocol = 6, MappingRefusal::NotAllowed),
        // A server that policy does not name: another pod, or the node.
        (
            |m| m.server_ip = vec![10, 0, 0, 2],
            MappingRefusal::NotAllowed,
        ),
        (
            |m| m.server_ip = vec![10, 0, 0, 1],
            MappingRefusal::NotAllowed,
        ),
        // Before the endpoint existed: an answer for the previous endpoint with this number.
        (|m| m.seen_at = 1, MappingRefusal::EndpointUnknown),
        (
            |m| m.endpoint.as_mut().unwrap().client_ip = vec![10, 0, 0, 3],
            MappingRefusal::EndpointUnknown,
        ),
        (|m| m.rcode = 3, MappingRefusal::Invalid),
        (|m| m.name = "a".repeat(2000), MappingRefusal::Invalid),
    ];
    let mut sequence = 0;
    for (lie, reason) in refused {
        sequence += 1;
        let mut message = mapping(endpoint, sequence, "www.example.com.", [192, 0, 2, 9]);
        lie(&mut message);
        stream.send(vec![message]).await;
        let result = stream.result(sequence).await;
        assert!(!result.realised && result.lease_end == 0, "lie {sequence}");
        assert_eq!(result.refusal(), reason, "lie {sequence}");
    }
    // Local addresses never get a name's label.
    for address in [
        "10.0.0.1",
        "10.0.0.2",
        "127.0.0.1",
        "::1",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
        "fe80::1",
        "::ffff:192.0.2.9",
    ] {
        sequence += 1;
        let mut message = mapping(endpoint, sequence, "www.example.com.", [0; 4]);
        with_addresses(&mut message, &[address]);
        stream.send(vec![message]).await;
        stream.result(sequence).await;
    }
    assert_eq!(lab.datapath.memory.lock().ipcache, before);

    // Neither a TTL nor a time in the future opens an address for more than a week.
    let now = BootTime::now();
    for lie in [
        (|m| m.ttl = u32::MAX) as Lie,
        |m| m.seen_at = u64::MAX,
        |m| (m.ttl, m.seen_at) = (u32::MAX, u64::MAX),
    ] {
        sequence += 1;
        let mut message = mapping(endpoint, sequence, "www.example.com.", [192, 0, 2, 9]);
        lie(&mut message);
        stream.send(vec![message]).await;
        let result = stream.result(sequence).await;
        assert!(result.realised);
        let week = now.plus_secs(604_800 + 60 + 60);
        assert!(
            result.lease_end <= week.nanos(),
            "lie {sequence}: {result:?}"
        );
    }
}
