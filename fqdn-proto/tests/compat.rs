//! Messages of released versions stay readable, and unknown fields are ignored.
//!
//! `golden/<version>.txt` has the bytes of messages. These files never change; later versions only
//! add files.

use std::{collections::BTreeSet, fmt::Debug, path::Path};

use fqdn_proto::{fqdndata as cilium, native, relay};
use prost::Message;

const GOLDEN: &str = include_str!("golden/0.1.0.txt");
/// Messages with fields that version 0.1.0 does not have.
const LATER: &str = include_str!("golden/0.2.0.txt");
const POD: [u8; 4] = [10, 0, 1, 5];
const WEB: [u8; 4] = [192, 0, 2, 10];
const WEB6: [u8; 16] = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x0a];

/// Messages by full name, in the order of the file.
fn golden(file: &str, name: &str) -> Vec<Vec<u8>> {
    file.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(' '))
        .filter(|(message, _)| *message == name)
        .map(|(_, hex)| {
            hex.trim_matches('-')
                .as_bytes()
                .chunks(2)
                .map(|pair| {
                    u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("hex")
                })
                .collect()
        })
        .collect()
}

/// Checks that the bytes of `name` decode to `expected` and back, and that fields of a later
/// version change nothing.
#[track_caller]
fn same<M: Message + Default + PartialEq + Debug>(name: &str, expected: &[M]) {
    same_in(GOLDEN, name, expected);
}

#[track_caller]
fn same_in<M: Message + Default + PartialEq + Debug>(file: &str, name: &str, expected: &[M]) {
    let messages = golden(file, name);
    assert_eq!(
        messages.len(),
        expected.len(),
        "{name}: messages in the file"
    );
    for (bytes, expected) in messages.iter().zip(expected) {
        assert_eq!(
            &M::decode(bytes.as_slice()).expect(name),
            expected,
            "{name}: read"
        );
        assert_eq!(&expected.encode_to_vec(), bytes, "{name}: written");
        let mut later = bytes.clone();
        later.extend([0xb8, 0x3e, 0x01]); // field 999, varint
        later.extend([0xc2, 0x3e, 0x02, 0x68, 0x69]); // field 1000, two bytes
        assert_eq!(
            &M::decode(later.as_slice()).expect(name),
            expected,
            "{name}: later version"
        );
    }
}

fn epoch() -> native::AgentEpoch {
    native::AgentEpoch {
        boot_id: "0a1b2c3d".into(),
        start: 3,
    }
}

fn instance() -> native::EndpointInstance {
    native::EndpointInstance {
        id: 4660,
        client_ip: POD.into(),
        ifindex: 9,
    }
}

fn mapping() -> native::FqdnMapping {
    native::FqdnMapping {
        sequence: 7,
        endpoint: Some(instance()),
        name: "www.example.org.".into(),
        addresses: vec![WEB.into(), WEB6.into()],
        ttl: 300,
        seen_at: 123_456_789_012,
        rcode: 0,
        server_ip: vec![192, 0, 2, 53],
        server_port: 53,
        protocol: 17,
        replayed: true,
        leased: true,
    }
}

fn result() -> native::MappingResult {
    native::MappingResult {
        sequence: 7,
        realised: true,
        durable: true,
        lease_end: 483_456_789_012,
        revision: 42,
        refusal: native::MappingRefusal::Unspecified.into(),
    }
}

fn revoked() -> native::LeaseRevoked {
    native::LeaseRevoked {
        id: 5,
        name: "www.example.org.".into(),
        addresses: vec![WEB.into()],
    }
}

fn pattern() -> native::FqdnSelector {
    native::FqdnSelector {
        match_name: String::new(),
        match_pattern: "*.example.org".into(),
    }
}

fn selector_rule() -> native::DnsSelectorRule {
    native::DnsSelectorRule {
        selector: "k8s:k8s-app=kube-dns".into(),
        server_identities: vec![1000, 1001],
        any_server: false,
        names: vec![
            native::FqdnSelector {
                match_name: "www.example.org".into(),
                match_pattern: String::new(),
            },
            pattern(),
        ],
    }
}

fn port_rules() -> native::PortDnsRules {
    native::PortDnsRules {
        port: 53,
        protocol: 17,
        rules: vec![selector_rule()],
    }
}

fn endpoint_rules() -> native::EndpointDnsRules {
    native::EndpointDnsRules {
        endpoint_id: 4660,
        ports: vec![port_rules()],
    }
}

fn chunk() -> native::EndpointRulesChunk {
    native::EndpointRulesChunk {
        endpoints: vec![endpoint_rules()],
        removed: vec![300],
        more: true,
    }
}

#[test]
fn native_hello() {
    let request = native::HelloRequest {
        version: "0.1.0".into(),
        instance: "sdp-4242".into(),
        capabilities: vec!["leases".into(), "replay".into()],
        proxy_port: 10094,
        state_dir: None,
    };
    same(
        "holdfast.fqdn.v1.HelloRequest",
        std::slice::from_ref(&request),
    );
    let response = native::HelloResponse {
        version: "0.1.0".into(),
        capabilities: vec!["leases".into()],
        epoch: Some(epoch()),
        revision: 42,
        proxy_port: 10094,
        min_ttl: 60,
        state_dir: None,
    };
    same(
        "holdfast.fqdn.v1.HelloResponse",
        std::slice::from_ref(&response),
    );
    let dir = native::StateDir {
        path: "/var/run/holdfast".into(),
        device: 26,
        inode: 4242,
    };
    let request = native::HelloRequest {
        state_dir: Some(dir.clone()),
        ..request
    };
    let response = native::HelloResponse {
        state_dir: Some(dir.clone()),
        ..response
    };
    same_in(LATER, "holdfast.fqdn.v1.HelloRequest", &[request]);
    same_in(LATER, "holdfast.fqdn.v1.HelloResponse", &[response]);
    same_in(LATER, "holdfast.fqdn.v1.StateDir", &[dir]);
    same("holdfast.fqdn.v1.AgentEpoch", &[epoch()]);
}

#[test]
fn native_mappings() {
    use native::{mapping_down::Kind as Down, mapping_up::Kind as Up};
    let batch = native::MappingBatch {
        mappings: vec![mapping()],
    };
    let ack = native::LeaseRevokedAck { id: 5 };
    let up = |kind| native::MappingUp { kind: Some(kind) };
    let down = |kind| native::MappingDown { kind: Some(kind) };
    let refused = native::MappingResult {
        sequence: 7,
        refusal: native::MappingRefusal::NotAllowed.into(),
        ..Default::default()
    };
    let results = |results| native::MappingResults { results };
    same("holdfast.fqdn.v1.EndpointInstance", &[instance()]);
    same("holdfast.fqdn.v1.FQDNMapping", &[mapping()]);
    same(
        "holdfast.fqdn.v1.MappingBatch",
        std::slice::from_ref(&batch),
    );
    same(
        "holdfast.fqdn.v1.MappingUp",
        &[up(Up::Batch(batch)), up(Up::RevokedAck(ack))],
    );
    same(
        "holdfast.fqdn.v1.MappingDown",
        &[
            down(Down::Results(results(vec![result()]))),
            down(Down::Revoked(revoked())),
            down(Down::Epoch(epoch())),
        ],
    );
    same(
        "holdfast.fqdn.v1.MappingResults",
        &[results(vec![result(), refused])],
    );
    same("holdfast.fqdn.v1.MappingResult", &[result()]);
    same("holdfast.fqdn.v1.LeaseRevoked", &[revoked()]);
    same("holdfast.fqdn.v1.LeaseRevokedAck", &[ack]);
}

#[test]
fn native_rules() {
    use native::dns_rules_update::Kind;
    let update = |kind| native::DnsRulesUpdate {
        epoch: Some(epoch()),
        revision: 42,
        kind: Some(kind),
    };
    same(
        "holdfast.fqdn.v1.DNSRulesUpdate",
        &[
            update(Kind::Endpoints(chunk())),
            update(Kind::SnapshotDone(native::SnapshotDone {})),
        ],
    );
    same("holdfast.fqdn.v1.EndpointRulesChunk", &[chunk()]);
    same("holdfast.fqdn.v1.SnapshotDone", &[native::SnapshotDone {}]);
    same("holdfast.fqdn.v1.EndpointDNSRules", &[endpoint_rules()]);
    same("holdfast.fqdn.v1.PortDNSRules", &[port_rules()]);
    same("holdfast.fqdn.v1.DNSSelectorRule", &[selector_rule()]);
    same("holdfast.fqdn.v1.FQDNSelector", &[pattern()]);
    let nack = native::RulesAck {
        epoch: Some(epoch()),
        revision: 42,
        nack: "unknown pattern".into(),
    };
    same("holdfast.fqdn.v1.RulesAck", &[nack]);
}

fn metrics_data() -> cilium::MetricsData {
    cilium::MetricsData {
        processing_stats: Some(processing_stats()),
        dns_response_data: Some(response_data()),
        source_port: 40000,
        server_addr: "192.0.2.53:53".into(),
        server_identity: 1000,
        protocol: "udp".into(),
        allowed: true,
        error_message: "timed out".into(),
        error_type: cilium::ProxyErrorType::Timeout.into(),
    }
}

fn processing_stats() -> cilium::ProcessingStats {
    cilium::ProcessingStats {
        total: 1_500_000,
        processing: 200_000,
        upstream: 1_000_000,
        semaphore_acquire: 1000,
        policy_check: 2000,
    }
}

fn response_data() -> cilium::DnsResponseData {
    cilium::DnsResponseData {
        is_response: true,
        cnames: vec!["cdn.example.net.".into()],
        qtypes: vec![1],
        answer_types: vec![5, 1],
    }
}

#[test]
fn fqdndata_mappings() {
    let mapping = cilium::FqdnMapping {
        fqdn: "www.example.org.".into(),
        record_ip: vec![b"192.0.2.10".to_vec(), b"2001:db8::a".to_vec()],
        ttl: 300,
        source_identity: 1000,
        source_ip: b"10.0.1.5".to_vec(),
        response_code: 3,
        metrics_data: Some(metrics_data()),
    };
    same("standalonednsproxy.FQDNMapping", &[mapping]);
    same("standalonednsproxy.MetricsData", &[metrics_data()]);
    same("standalonednsproxy.ProcessingStats", &[processing_stats()]);
    same("standalonednsproxy.DNSResponseData", &[response_data()]);
    let response = cilium::UpdateMappingResponse {
        response: cilium::ResponseCode::ErrorEndpointNotFound.into(),
    };
    same("standalonednsproxy.UpdateMappingResponse", &[response]);
}

#[test]
fn fqdndata_policy_state() {
    let server = cilium::DnsServer {
        dns_server_identity: 1000,
        dns_server_port: 53,
        dns_server_proto: 17,
    };
    let policy = cilium::DnsPolicy {
        source_endpoint_id: 4660,
        dns_pattern: vec!["*.example.org".into(), "www.example.org".into()],
        dns_servers: vec![server],
    };
    let info = cilium::EndpointInfo {
        id: 4660,
        ip: vec![POD.into(), WEB6.into()],
    };
    let endpoints = cilium::IdentityToEndpointMapping {
        identity: 1000,
        endpoint_info: vec![info.clone()],
    };
    let prefixes = cilium::IdentityToPrefixMapping {
        identity: 16_777_217,
        prefix: vec![[&WEB[..], &[32]].concat(), [&WEB6[..], &[128]].concat()],
    };
    let state = cilium::PolicyState {
        egress_l7_dns_policy: vec![policy.clone()],
        request_id: "f3b1".into(),
        identity_to_endpoint_mapping: vec![endpoints.clone()],
        identity_to_prefix_mapping: vec![prefixes.clone()],
    };
    let ack = cilium::PolicyStateResponse {
        response: cilium::ResponseCode::NoError.into(),
        request_id: "f3b1".into(),
    };
    same("standalonednsproxy.DNSServer", &[server]);
    same("standalonednsproxy.DNSPolicy", &[policy]);
    same("standalonednsproxy.EndpointInfo", &[info]);
    same("standalonednsproxy.IdentityToEndpointMapping", &[endpoints]);
    same("standalonednsproxy.IdentityToPrefixMapping", &[prefixes]);
    same("standalonednsproxy.PolicyState", &[state]);
    same("standalonednsproxy.PolicyStateResponse", &[ack]);
}

#[test]
fn messages_of_relays() {
    use relay::step::Step as Of;
    let position = relay::Position {
        epoch: "e1".into(),
        sequence: 300,
    };
    let request = relay::FollowRequest {
        version: "0.1.0".into(),
        node: "n1".into(),
        after: Some(position.clone()),
    };
    let hello = relay::Hello {
        version: "0.1.0".into(),
        epoch: "e1".into(),
        kinds: vec!["Pod".into()],
        continues: true,
    };
    let listing = relay::Listing { kind: "Pod".into() };
    let template = relay::Template {
        number: 7,
        json: b"{}".to_vec(),
    };
    let put = relay::Put {
        key: "Pod/a/b".into(),
        template: 7,
        json: b"{}".to_vec(),
    };
    let gone = relay::Gone {
        key: "Pod/a/b".into(),
    };
    let listed = relay::Listed { kind: "Pod".into() };
    let stale = relay::Stale {
        kind: "Pod".into(),
        seconds: 9,
        reason: "away".into(),
    };
    let view = relay::View {
        stale: vec![stale.clone()],
    };
    let forget = relay::Forget { number: 7 };
    let steps = [
        Of::Hello(hello.clone()),
        Of::Listing(listing.clone()),
        Of::Template(template.clone()),
        Of::Put(put.clone()),
        Of::Gone(gone.clone()),
        Of::Listed(listed.clone()),
        Of::View(view.clone()),
        Of::Forget(forget),
    ];
    let steps = steps.map(|step| relay::Step { step: Some(step) });
    let frame = relay::Frame {
        steps: vec![steps[4].clone()],
        sequence: 300,
    };
    same("holdfast.relay.v1.Position", &[position]);
    same("holdfast.relay.v1.FollowRequest", &[request]);
    same("holdfast.relay.v1.Frame", &[frame]);
    same("holdfast.relay.v1.Step", &steps);
    same("holdfast.relay.v1.Hello", &[hello]);
    same("holdfast.relay.v1.Listing", &[listing]);
    same("holdfast.relay.v1.Listed", &[listed]);
    same("holdfast.relay.v1.Template", &[template]);
    same("holdfast.relay.v1.Forget", &[forget]);
    same("holdfast.relay.v1.Put", &[put]);
    same("holdfast.relay.v1.Gone", &[gone]);
    same("holdfast.relay.v1.View", &[view]);
    same("holdfast.relay.v1.Stale", &[stale]);
}

#[test]
fn services_keep_their_names() {
    use cilium::fqdn_data_server::SERVICE_NAME as FQDN_DATA;
    use native::fqdn_policy_server::SERVICE_NAME as FQDN_POLICY;
    use relay::cluster_relay_server::SERVICE_NAME as CLUSTER_RELAY;
    assert_eq!(CLUSTER_RELAY, "holdfast.relay.v1.ClusterRelay");
    assert_eq!(FQDN_DATA, "standalonednsproxy.FQDNData");
    assert_eq!(FQDN_POLICY, "holdfast.fqdn.v1.FqdnPolicy");
}

#[test]
fn every_message_of_every_proto_has_golden_bytes() {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let files = [
        "holdfast/fqdn/v1/fqdn.proto",
        "holdfast/relay/v1/relay.proto",
        "standalonednsproxy/fqdndata.proto",
    ];
    let descriptors = protox::compile(files, [proto]).expect("the proto files compile");
    let defined: BTreeSet<String> = descriptors
        .file
        .iter()
        .flat_map(|file| {
            file.message_type
                .iter()
                .map(|message| format!("{}.{}", file.package(), message.name()))
        })
        .collect();
    let have: BTreeSet<String> = GOLDEN
        .lines()
        .chain(LATER.lines())
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(' '))
        .map(|(name, _)| name.to_owned())
        .collect();
    assert_eq!(defined, have);
}
