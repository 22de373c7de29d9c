//! Messages and files of a Cilium 1.20-dev agent on a node with real pods, as they were recorded.

use std::{fs, net::IpAddr, path::Path};

use dns_policy::{
    rule::{NameRules, Transport},
    table::Question,
    verdict::Verdict,
};
use shared_maps::EndpointId;

use super::{super::convert::fqdndata::State, *};
use crate::{
    resolve::{QueryClient, Resolver as _},
    restore::file,
};

/// The pod to which the policy applies.
const WEB: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 244, 1, 166));
/// The endpoint of the recording.
const ENDPOINT: EndpointId = EndpointId(4055);
/// The server outside the cluster, which a rule selects by `toCIDR`.
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(172, 30, 0, 53));

fn data(name: &str) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cilium");
    fs::read(dir.join(name)).unwrap()
}

fn state(name: &str) -> State {
    convert::state(super::State::from(data(name)).decode().unwrap())
}

fn transports(state: &State) -> Vec<Transport> {
    let [of] = &state.rules[..] else {
        panic!("{} endpoints", state.rules.len())
    };
    assert_eq!(of.endpoint, ENDPOINT);
    of.rules.ports.iter().map(|port| port.transport).collect()
}

#[test]
fn protocol_any_loses_only_its_sctp_rows() {
    for (name, sctp) in [
        ("kube-dns-any.bin", 9),
        ("tocidr-any.bin", 1),
        ("wildcard.bin", 25),
    ] {
        let state = state(name);
        assert_eq!(
            transports(&state),
            [Transport::Udp, Transport::Tcp],
            "{name}"
        );
        assert_eq!((state.skipped, &state.odd[..]), (sctp, &[][..]), "{name}");
    }
}

#[test]
fn the_file_of_an_endpoint_under_protocol_any_is_read() {
    let file = file::parse(&data("ep_config-4055.json")[..], "boot").unwrap();
    assert_eq!((file.id, file.addresses), (ENDPOINT, vec![WEB]));
    assert_eq!((file.skipped.other_transport, file.skipped.count()), (1, 1));
    let ports = file.rules.unwrap().ports;
    assert_eq!(ports.len(), 2);
    for port in ports {
        let NameRules::Names(names) = &port.rules[0].names else {
            panic!("{:?}", port.rules)
        };
        assert_eq!(names.len(), 6);
    }
    let other = file::parse(&data("ep_config-3817.json")[..], "boot").unwrap();
    assert_eq!(other.rules, None);
}

/// The four states after a restart: prefixes of pods; all prefixes and endpoints; the same again;
/// rules, after 4.5 seconds.
#[test]
fn the_states_of_a_restart_refuse_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let maps = PinnedMaps::open(dir.path(), false);
    let policy = PolicyHandle::new();
    let mut kept = KeptRules::default();
    let take = |name: &str, kept: &mut KeptRules| {
        let state = state(name);
        let errors = put_in_force(&state.rules, state.tables, kept, &policy, &maps, |_| {});
        assert_eq!(errors, []);
        let QueryClient::Endpoint { id, .. } = maps.client(WEB) else {
            panic!("after {name}: {:?}", maps.client(WEB))
        };
        let asked = |name, server| Question {
            endpoint: id,
            port: 53,
            transport: Transport::Udp,
            server: maps.server(server),
            address: server,
            name,
        };
        let verdict = |question| policy.load().check(&question);
        let allowed = asked("allowed.peer.test.", SERVER);
        assert_eq!(verdict(allowed), Verdict::Allow, "after {name}");
        let other = asked("other.peer.test.", SERVER);
        assert_ne!(verdict(other), Verdict::Allow, "after {name}");
        // An address of the world.
        let elsewhere = asked("allowed.peer.test.", IpAddr::from([198, 51, 100, 1]));
        assert_ne!(verdict(elsewhere), Verdict::Allow, "after {name}");
    };
    take("restart-3.bin", &mut kept);
    for _ in 0..3 {
        kept.end_session();
        maps.set_agent_ready(false);
        maps.begin_agent_session();
        // The agent is killed after the second state, and then starts again.
        take("restart-0.bin", &mut kept);
        take("restart-1.bin", &mut kept);
    }
    take("restart-2.bin", &mut kept);
    assert_eq!(kept.unconfirmed(), 1);
    take("restart-3.bin", &mut kept);
    assert_eq!(kept.unconfirmed(), 0);
    assert_eq!(maps.status().former_entries, 0);
}
