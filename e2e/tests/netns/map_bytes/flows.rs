//! Maps that the programs write as packets pass: connections, counters, redirects, fragments. Also
//! the entries of the policy map that judge these packets.
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, UDP_PORT, at, other4, web4, web6};
use holdfast_e2e::pod::FIRST_SYN;
use holdfast_e2e::policy::{CLIENT, dns, egress, names};
use holdfast_e2e::web::Web;
use holdfast_e2e::{Lab, Pod, Query, eventually, with_lab};
use shared_maps::user::monotonic_ns;

use super::dump::{Bytes, dump, dump_sums, joined, link, long, number, shape};

const SOON: Duration = Duration::from_secs(5);
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Ethernet, IPv4 and UDP headers, and "hello".
const DATAGRAM4: u64 = 14 + 20 + 8 + 5;
/// The same datagram with an IPv6 header.
const DATAGRAM6: u64 = 14 + 40 + 8 + 5;

/// Rules in addition to names: a prefix with one denied address, and an ingress rule.
const RULES: &str = r#"- toCIDR: ["198.51.100.0/24"]
  toPorts: [{ports: [{port: "7777", protocol: UDP}, {port: "8080", endPort: 8087, protocol: TCP}]}]
egressDeny:
- toCIDR: ["198.51.100.12/32"]
  toPorts: [{ports: [{port: "7777", protocol: UDP}]}]
ingress:
- fromEndpoints: [{matchLabels: {app: client}}]
  toPorts: [{ports: [{port: "80", protocol: TCP}]}]
ingressDeny:
- fromEndpoints: [{matchLabels: {app: client}}]
  toPorts: [{ports: [{port: "81", protocol: TCP}]}]
"#;

#[test]
fn deny_ingress_and_host_entries_show_the_documented_bytes() {
    with_lab(|lab| {
        let ((a, b, id), _programs) = two_pods(lab)?;
        let policy = dump(lab, &format!("cilium_policy_v2_{id:05}"))?;
        let ipcache = dump(lab, "cilium_ipcache_v2")?;
        let denied = number(ipcache.get(&prefix4(other4(12), 32)).context(".12/32")?, 0);
        let around = number(ipcache.get(&prefix4(other4(0), 24)).context(".0/24")?, 0);
        ensure!(
            a != b && denied != around,
            "identities {a} {b} {denied} {around}"
        );

        let allow = 0xffff_ff01_u32.to_ne_bytes();
        let deny = [0xff; 4];
        // Number of significant bits, identity, direction, protocol, port; flags, precedence.
        let expected = [
            ("egress deny", 64, denied, 1, UDP, 7777, 24 << 3 | 1, deny),
            ("egress allow", 64, around, 1, UDP, 7777, 24 << 3, allow),
            ("8080 to 8087", 61, around, 1, TCP, 8080, 21 << 3, allow),
            ("ingress allow", 64, b, 0, TCP, 80, 24 << 3, allow),
            ("ingress deny", 64, b, 0, TCP, 81, 24 << 3 | 1, deny),
            ("host", 40, 1, 0, 0, 0, 0, allow),
        ];
        for (what, bits, identity, direction, protocol, port, flags, precedence) in expected {
            let key = joined(&[
                &u32::to_ne_bytes(bits),
                &identity.to_ne_bytes(),
                &[direction, protocol],
                &u16::to_be_bytes(port),
            ]);
            let value = joined(&[&[0, 0, flags, 0], &precedence, &[0; 4]]);
            ensure!(
                policy.get(&key) == Some(&value),
                "{what}: {key:02x?} -> {value:02x?} is not in {policy:02x?}"
            );
        }
        // Outgoing connections of the host have no such entry.
        let host_out = joined(&[&40_u32.to_ne_bytes(), &1_u32.to_ne_bytes(), &[1, 0, 0, 0]]);
        ensure!(!policy.contains_key(&host_out), "{policy:02x?}");
        Ok(())
    });
}

#[test]
fn connections_show_the_documented_bytes() {
    with_lab(|lab| {
        let ((a, b, _), _programs) = two_pods(lab)?;
        shape(lab, "cilium_ct4_global", "lru_hash", 14, 56, 131_072, 0)?;
        shape(lab, "cilium_ct_any4_global", "lru_hash", 14, 56, 131_072, 0)?;
        shape(lab, "cilium_ct6_global", "lru_hash", 38, 56, 131_072, 0)?;
        shape(lab, "cilium_ct_any6_global", "lru_hash", 38, 56, 131_072, 0)?;

        // One datagram and its echo.
        for (map, to, length) in [
            ("cilium_ct_any4_global", web4(10), DATAGRAM4),
            ("cilium_ct_any6_global", web6(10), DATAGRAM6),
        ] {
            let from = echoed(&lab.a, at(to, UDP_PORT))?;
            let key = connection(from, at(to, UDP_PORT), UDP, 0);
            eventually(map, SOON, || {
                let value = value_of(lab, map, &key)?;
                ensure!(long(&value, 16) == 2, "packets in {value:02x?}");
                ensure!(long(&value, 24) == 2 * length, "bytes in {value:02x?}");
                lives(&value, 60)?;
                rest(&value, 0x8000, [0, 0], a)
            })?;
        }

        // One handshake in each family: SYN and ACK seen from both sides, nothing closed.
        let mut open = Vec::new();
        for (map, to) in [
            ("cilium_ct4_global", web4(10)),
            ("cilium_ct6_global", web6(10)),
        ] {
            let stream = lab.a.connect(at(to, 80), FIRST_SYN)?;
            let key = connection(stream.local_addr()?, at(to, 80), TCP, 0);
            open.push(stream);
            eventually(map, SOON, || {
                let value = value_of(lab, map, &key)?;
                ensure!(long(&value, 16) >= 3, "packets in {value:02x?}");
                ensure!(long(&value, 24) >= 3 * 54, "bytes in {value:02x?}");
                lives(&value, 8000)?;
                rest(&value, 0x8010, [0x12, 0x12], a)
            })?;
        }

        // From pod to pod: egress of one, ingress of the other.
        let _server = Web::start(&lab.a.netns, &[], &[80], &[])?;
        let server = at(lab.a.v4.into(), 80);
        let stream = lab.b.connect(server, FIRST_SYN)?;
        for flags in [0, 1] {
            let key = connection(stream.local_addr()?, server, TCP, flags);
            eventually("pod to pod", SOON, || {
                let value = value_of(lab, "cilium_ct4_global", &key)?;
                rest(&value, 0x8010, [0x12, 0x12], b)
            })?;
        }

        // Connections to the proxy have no entry.
        for (map, server, protocol) in [
            ("cilium_ct_any4_global", DNS4, UDP),
            ("cilium_ct4_global", DNS4, TCP),
            ("cilium_ct_any6_global", DNS6, UDP),
            ("cilium_ct6_global", DNS6, TCP),
        ] {
            let mut query = Query::a("www.good.test", server);
            if protocol == TCP {
                query = query.tcp();
            }
            lab.a.ask(&query)?.expect(web4(10))?;
            let (own, server) = match server {
                IpAddr::V4(ip) => (lab.a.v4.octets().to_vec(), ip.octets().to_vec()),
                IpAddr::V6(ip) => (lab.a.v6.octets().to_vec(), ip.octets().to_vec()),
            };
            let head = joined(&[&own, &server, &53_u16.to_be_bytes()]);
            let found = dump(lab, map)?;
            ensure!(
                !found.keys().any(|key| key.starts_with(&head)),
                "a query in {map}: {found:02x?}"
            );
        }
        Ok(())
    });
}

#[test]
fn counters_show_the_documented_bytes() {
    with_lab(|lab| {
        let ((a, _, id), _programs) = two_pods(lab)?;
        shape(
            lab,
            "cilium_policystats",
            "lru_percpu_hash",
            12,
            16,
            65_536,
            2,
        )?;
        shape(lab, "hf_metrics_v1", "percpu_array", 4, 16, 64, 0)?;
        shape(lab, "hf_events_v1", "ringbuf", 0, 0, 1 << 20, 0)?;
        shape(lab, "hf_quota_v1", "lru_percpu_hash", 4, 16, 8192, 0)?;
        shape(lab, "hf_held_v1", "array", 4, 4, 262_145, 0)?;
        ensure!(a != 0);
        let ipcache = dump(lab, "cilium_ipcache_v2")?;
        let identity = |prefix: Bytes| -> Result<u32> {
            Ok(number(ipcache.get(&prefix).context("prefix")?, 0))
        };
        let denied = identity(prefix4(other4(12), 32))?;
        let around = identity(prefix4(other4(0), 24))?;
        for _ in 0..3 {
            lab.a
                .datagram(at(other4(12), UDP_PORT), Duration::from_millis(100))
                .expect_err("denied");
        }
        for _ in 0..2 {
            echoed(&lab.a, at(other4(11), UDP_PORT))?;
        }
        let stats = dump_sums(lab, "cilium_policystats")?;
        for (remote, packets) in [(denied, 3), (around, 2)] {
            // Endpoint, 0, bits of protocol and port, identity, direction, protocol, port.
            let key = joined(&[
                &id.to_ne_bytes(),
                &[0, 24],
                &remote.to_ne_bytes(),
                &[1, UDP],
                &UDP_PORT.to_be_bytes(),
            ]);
            ensure!(
                stats.get(&key) == Some(&(packets, packets * DATAGRAM4)),
                "{key:02x?} is not {packets} in {stats:02x?}"
            );
        }
        // One packet per reply. No policy entry judges the way back.
        let reasons = dump_sums(lab, "hf_metrics_v1")?;
        ensure!(reasons.len() == 64, "{} reasons", reasons.len());
        let reason = |number: u32| reasons.get(&number.to_ne_bytes()[..]).copied();
        ensure!(
            reason(17) == Some((3, 3 * DATAGRAM4)),
            "17, denied by an entry: {reasons:02x?}"
        );
        let (replies, length) = reason(1).context("1, replies")?;
        ensure!(
            replies >= 2 && length >= 2 * DATAGRAM4,
            "1, replies: {reasons:02x?}"
        );
        let queries = reason(2).context("2, to the proxy")?;
        ensure!(queries.0 >= 2, "2, to the proxy: {reasons:02x?}");
        ensure!(reason(63) == Some((0, 0)), "{reasons:02x?}");
        Ok(())
    });
}

#[test]
fn redirects_and_fragments_show_the_documented_bytes() {
    with_lab(|lab| {
        let _running = two_pods(lab)?;
        shape(lab, "hf_redirect_v2", "lru_hash", 36, 8, 65_536, 0)?;
        shape(lab, "hf_frag_v1", "lru_hash", 44, 16, 8192, 0)?;
        let ifindex = link(&lab.node, &lab.a.host_side)?.index.to_ne_bytes();
        let begun = monotonic_ns();
        for server in [DNS4, DNS6] {
            let query = Query::a("www.good.test", server).sized(4000);
            lab.a.ask(&query)?.expect(web4(10))?;
            lab.a.ask(&query.tcp())?.expect(web4(10))?;
        }
        large(&lab.a, at(other4(12), UDP_PORT))?;
        large(&lab.a, at(other4(11), UDP_PORT))?;

        // Pod, server, port, protocol, family; proxy port, 0, interface.
        let redirects = dump(lab, "hf_redirect_v2")?;
        for (pod, server, family) in [(lab.a.v4.into(), DNS4, 1), (lab.a.v6.into(), DNS6, 2)] {
            for protocol in [TCP, UDP] {
                let end = [&53_u16.to_be_bytes()[..], &[protocol, family]].concat();
                let key = joined(&[&wide(pod), &wide(server), &end]);
                let value = [&[0x27, 0x6e, 0, 0][..], &ifindex].concat();
                ensure!(
                    redirects.get(&key) == Some(&value),
                    "{key:02x?} is not in {redirects:02x?}"
                );
            }
        }
        ensure!(redirects.len() == 4, "more than asked: {redirects:02x?}");

        // Source, destination, IP id, interface, protocol, family, direction, 0;
        // time, mark, whether it passed. IPv6 fragments may disagree on the protocol.
        let to_proxy = [0x00, 0x02, 0x27, 0x6e];
        let fragments = dump(lab, "hf_frag_v1")?;
        for (to, family, protocol, mark, passed) in [
            (DNS4, 1, UDP, to_proxy, 1_u32),
            (DNS6, 2, 0, to_proxy, 1),
            (other4(12), 1, UDP, [0; 4], 0),
            (other4(11), 1, UDP, [0; 4], 1),
        ] {
            let own = if family == 1 {
                lab.a.v4.into()
            } else {
                lab.a.v6.into()
            };
            let head = joined(&[&wide(own), &wide(to)]);
            let tail = joined(&[&ifindex, &[protocol, family, 1, 0]]);
            let (key, value) = fragments
                .iter()
                .find(|(key, _)| key.starts_with(&head) && key.ends_with(&tail))
                .with_context(|| format!("{head:02x?} … {tail:02x?}: {fragments:02x?}"))?;
            ensure!(
                key.get(32..36) != Some(&[0; 4])
                    && (family == 2 || key.get(34..36) == Some(&[0; 2])),
                "IP id in {key:02x?}"
            );
            let seen = long(value, 0);
            ensure!(
                (begun..=monotonic_ns()).contains(&seen),
                "seen at {seen}: {value:02x?}"
            );
            ensure!(
                value.get(8..) == Some(&joined(&[&mark, &passed.to_ne_bytes()])[..]),
                "mark and verdict to {to}: {value:02x?}"
            );
        }
        Ok(())
    });
}

/// Identities of both pods, the endpoint number of the first pod, and the running programs.
type TwoPods = ((u32, u32, u16), holdfast_e2e::Programs);

/// Both pods under policy, `www.good.test` learned by the first.
fn two_pods(lab: &Lab) -> Result<TwoPods> {
    lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
    let rules = dns("*.good.test") + &names("*.good.test") + RULES;
    let programs = lab.start(&egress("rules", "web", &rules))?;
    lab.add_endpoint(&lab.b, CLIENT)?;
    lab.a
        .ask(&Query::a("www.good.test", DNS4))?
        .expect(web4(10))?;
    lab.a
        .ask(&Query::aaaa("www.good.test", DNS6))?
        .expect(web6(10))?;
    let id = u16::try_from(lab.endpoint_id(&lab.a)?)?;
    let lxc = dump(lab, "cilium_lxc")?;
    let identity = |pod: &Pod| -> Result<u32> {
        let key = joined(&[&wide(pod.v4.into()), &[1, 0, 0, 0]]);
        Ok(number(lxc.get(&key).context("not in cilium_lxc")?, 32))
    };
    Ok(((identity(&lab.a)?, identity(&lab.b)?, id), programs))
}

/// Key in the ipcache of an IPv4 prefix.
fn prefix4(ip: IpAddr, bits: u32) -> Bytes {
    joined(&[&(32 + bits).to_ne_bytes(), &[0, 0, 0, 1], &wide(ip)])
}

/// The 16 bytes of an address: IPv4 in the first four.
fn wide(ip: IpAddr) -> Bytes {
    match ip {
        IpAddr::V4(ip) => joined(&[&ip.octets(), &[0; 12]]),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Connection key: addresses turned around, ports as they were.
fn connection(from: SocketAddr, to: SocketAddr, protocol: u8, flags: u8) -> Bytes {
    let (daddr, saddr) = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => (from.octets().to_vec(), to.octets().to_vec()),
        (from, to) => (wide(from), wide(to)),
    };
    joined(&[
        &daddr,
        &saddr,
        &to.port().to_be_bytes(),
        &from.port().to_be_bytes(),
        &[protocol, flags],
    ])
}

fn value_of(lab: &Lab, map: &str, key: &Bytes) -> Result<Bytes> {
    let found = dump(lab, map)?;
    let value = found.get(key);
    Ok(value
        .with_context(|| format!("{key:02x?} is not in {map}: {found:02x?}"))?
        .clone())
}

/// Checks that the lifetime (seconds of CLOCK_MONOTONIC at offset 32) ends `seconds` after a packet
/// of just now.
fn lives(value: &[u8], seconds: u64) -> Result<()> {
    let now = monotonic_ns() / 1_000_000_000;
    let end = u64::from(number(value, 32));
    ensure!(
        (now + seconds - SOON.as_secs()..=now + seconds).contains(&end),
        "end of life {end}, not {seconds} from {now}: {value:02x?}"
    );
    Ok(())
}

/// Checks the other fields: NAT address 0, flags, NAT 0, TCP flags seen from both sides, identity
/// of the source, 0.
fn rest(value: &[u8], flags: u16, seen: [u8; 2], identity: u32) -> Result<()> {
    let tail = joined(&[
        &flags.to_ne_bytes(),
        &[0; 4],
        &seen,
        &identity.to_ne_bytes(),
    ]);
    ensure!(
        value.len() == 56
            && value.get(..16) == Some(&[0; 16])
            && value.get(36..48) == Some(&tail[..]),
        "expected {tail:02x?} at 36 of {value:02x?}"
    );
    let (judged, owner) = (number(value, 48), number(value, 52));
    let now = u32::try_from(monotonic_ns() / 1_000_000_000)?;
    ensure!(
        judged > 0 && judged <= now && owner > 0 && owner <= u32::from(u16::MAX),
        "judged at {judged} (now {now}), endpoint {owner}"
    );
    Ok(())
}

/// Sends one datagram and waits for its echo. Returns the source address.
fn echoed(pod: &Pod, to: SocketAddr) -> Result<SocketAddr> {
    pod.netns.enter(|| -> Result<_> {
        let socket = socket(pod, to)?;
        socket.set_read_timeout(Some(SOON))?;
        socket.send(b"hello")?;
        let mut echo = [0; 16];
        let length = socket.recv(&mut echo).context("echo")?;
        ensure!(echo.get(..length) == Some(b"hello"), "wrong echo");
        Ok(socket.local_addr()?)
    })?
}

/// Sends one datagram larger than the link.
fn large(pod: &Pod, to: SocketAddr) -> Result<()> {
    pod.netns.enter(|| -> Result<()> {
        socket(pod, to)?.send(&[0; 3000])?;
        Ok(())
    })?
}

fn socket(pod: &Pod, to: SocketAddr) -> Result<UdpSocket> {
    let own: IpAddr = match to {
        SocketAddr::V4(_) => pod.v4.into(),
        SocketAddr::V6(_) => pod.v6.into(),
    };
    let socket = UdpSocket::bind((own, 0))?;
    socket.connect(to)?;
    Ok(socket)
}
