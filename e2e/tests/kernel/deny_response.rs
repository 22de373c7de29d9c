//! Replies to packets that egress policy denies: their bytes, and the packets that get no reply.
use std::net::IpAddr;

use agent_datapath::deny_response::{DenyResponses, DnsDenyResponse, PolicyDenyResponse};
use anyhow::{Context as _, Result};
use holdfast_e2e::kernel::{
    ENDPOINT, Kernel, LINK_LOCAL, MAC, PEER, PEER4, PEER6, POD4, POD6, STRANGER4, attachment,
    with_deny_responses, with_kernel,
};
use holdfast_e2e::packet::{
    ACK, FIN, Packet, RST, SYN, Transport, echo, icmp, raw, tcp, udp, unreachable,
};
use shared_maps::EndpointId;
use shared_maps::event::{Counter, Reason};
use shared_maps::policy::{EGRESS, PolicyKey, PolicyValue};
use shared_maps::quota::{self, BURST_NS, DENY_RESPONSE_INTERVAL_NS, Limit, QuotaKey};
use shared_maps::user::MapKind;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
/// MAC to which the frames of these tests are addressed.
const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// (pod, destination) of both families.
const FAMILIES: [(IpAddr, IpAddr); 2] = [(POD4, PEER4), (POD6, PEER6)];

const ICMP_ONLY: DenyResponses = DenyResponses {
    policy: PolicyDenyResponse::Icmp,
    dns: DnsDenyResponse::None,
};
const DNS_ONLY: DenyResponses = DenyResponses {
    policy: PolicyDenyResponse::None,
    dns: DnsDenyResponse::Refused,
};
const BOTH: DenyResponses = DenyResponses {
    policy: PolicyDenyResponse::Icmp,
    dns: DnsDenyResponse::Refused,
};

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn frame(src: IpAddr, dst: IpAddr, transport: Transport) -> Vec<u8> {
    Packet::new(src, dst, transport).frame()
}

/// The reply to a packet that policy denies.
fn replied(k: &mut Kernel, what: &str, frame: &[u8]) -> Result<Reply> {
    let (reason, reply) = k.send_denied(frame)?;
    assert_eq!(reason, Reason::PolicyDenied, "{what}");
    Reply::read(&reply.with_context(|| format!("{what}: no reply"))?)
}

fn silent(k: &mut Kernel, what: &str, frame: &[u8], reason: Reason) -> Result<()> {
    assert_eq!(k.send_denied(frame)?, (reason, None), "{what}");
    Ok(())
}

fn sum16(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("folded")
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn pseudo(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> Vec<u8> {
    let len = u16::try_from(len).expect("short").to_be_bytes();
    [bytes(src), bytes(dst), vec![0, protocol, len[0], len[1]]].concat()
}

/// A datagram with this payload and correct checksums.
fn datagram(src: IpAddr, dst: IpAddr, dport: u16, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(8 + payload.len()).expect("short");
    let mut bytes = Vec::new();
    for word in [4000, dport, len, 0] {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend(payload);
    let sum = sum16(&[pseudo(src, dst, UDP, bytes.len()), bytes.clone()].concat());
    bytes[6..8].copy_from_slice(&(!sum).to_be_bytes());
    let mut frame = frame(src, dst, raw(UDP, &bytes));
    if src.is_ipv4() {
        let sum = sum16(&frame[14..34]);
        frame[24..26].copy_from_slice(&(!sum).to_be_bytes());
    }
    frame
}

/// A TCP segment with these numbers and payload.
fn segment(flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Transport {
    let mut bytes = vec![0x0f, 0xa0, 0, 80];
    bytes.extend(seq.to_be_bytes());
    bytes.extend(ack.to_be_bytes());
    bytes.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    bytes.extend(payload);
    raw(TCP, &bytes)
}

/// A reply, with its checksums checked.
#[derive(Debug)]
struct Reply {
    macs: [u8; 12],
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    body: Vec<u8>,
}

impl Reply {
    fn read(frame: &[u8]) -> Result<Self> {
        let (ethernet, packet) = frame.split_at(14);
        let v4 = ethernet[12..] == [8, 0];
        assert_eq!(ethernet[12..], if v4 { [8, 0] } else { [0x86, 0xdd] });
        let (header, body) = packet.split_at(if v4 { 20 } else { 40 });
        let (src, dst, protocol, len) = if v4 {
            assert_eq!(sum16(header), 0xffff, "IPv4 checksum");
            assert_eq!(header[0], 0x45);
            let address = |at: usize| <[u8; 4]>::try_from(&header[at..at + 4]);
            let len = u16::from_be_bytes([header[2], header[3]]) - 20;
            (address(12)?.into(), address(16)?.into(), header[9], len)
        } else {
            assert_eq!(header[0], 0x60);
            let address = |at: usize| <[u8; 16]>::try_from(&header[at..at + 16]);
            let len = u16::from_be_bytes([header[4], header[5]]);
            (address(8)?.into(), address(24)?.into(), header[6], len)
        };
        assert_eq!(usize::from(len), body.len(), "length of the packet");
        let over = if protocol == ICMP {
            Vec::new()
        } else {
            pseudo(src, dst, protocol, body.len())
        };
        assert_eq!(sum16(&[over, body.to_vec()].concat()), 0xffff, "checksum");
        Ok(Self {
            macs: ethernet[..12].try_into()?,
            src,
            dst,
            protocol,
            body: body.to_vec(),
        })
    }

    /// Fails unless the reply goes from the denied packet's destination back to the pod.
    fn expect_turned(&self, pod: IpAddr, dst: IpAddr, protocol: u8) {
        assert_eq!(self.macs, *[MAC, NODE_MAC].concat());
        assert_eq!((self.src, self.dst), (dst, pod));
        assert_eq!(self.protocol, protocol);
    }

    fn expect_reset(&self, seq: u32, ack: u32, flags: u8) {
        let mut expected = vec![0, 80, 0x0f, 0xa0];
        expected.extend(seq.to_be_bytes());
        expected.extend(ack.to_be_bytes());
        expected.extend([0x50, flags, 0, 0]);
        assert_eq!(self.body[..16], expected);
        assert_eq!(self.body.len(), 20);
    }

    /// Fails unless the reply is "administratively prohibited", with the start of the denied frame.
    fn expect_prohibited(&self, denied: &[u8]) {
        let (kind, quote) = if self.src.is_ipv4() {
            ([3, 13], 28)
        } else {
            ([1, 1], 48)
        };
        assert_eq!(self.body[..2], kind);
        assert_eq!(self.body[4..8], [0; 4]);
        assert_eq!(self.body[8..], denied[14..14 + quote]);
    }
}

#[test]
fn a_segment_gets_the_reset_of_a_closed_port() {
    with_deny_responses(ICMP_ONLY, |k| {
        for (pod, dst) in FAMILIES {
            let syn = frame(pod, dst, segment(SYN, 0xffff_ffff, 0, &[]));
            let reply = replied(k, "SYN", &syn)?;
            reply.expect_turned(pod, dst, TCP);
            reply.expect_reset(0, 0, RST | ACK);
            // With data, as TCP Fast Open sends it.
            let syn = frame(pod, dst, segment(SYN, 77, 0, b"data"));
            replied(k, "SYN with data", &syn)?.expect_reset(0, 78, RST | ACK);
            // A connection that policy no longer allows ends at once.
            let long = vec![7; 1400];
            let data = frame(pod, dst, segment(ACK, 1000, 0x8000_0001, &long));
            let reply = replied(k, "data", &data)?;
            reply.expect_turned(pod, dst, TCP);
            reply.expect_reset(0x8000_0001, 0, RST);
            let end = frame(pod, dst, segment(ACK | FIN, 1000, 5, &[]));
            replied(k, "FIN", &end)?.expect_reset(5, 0, RST);

            for (what, flags) in [("RST", RST), ("RST and ACK", RST | ACK), ("FIN only", FIN)] {
                let segment = frame(pod, dst, segment(flags, 1, 2, &[]));
                silent(k, what, &segment, Reason::PolicyDenied)?;
            }
        }
        Ok(())
    });
}

#[test]
fn other_packets_get_an_icmp_error_that_quotes_them() {
    with_deny_responses(ICMP_ONLY, |k| {
        for (pod, dst) in FAMILIES {
            let v6 = pod.is_ipv6();
            let protocol = if v6 { ICMPV6 } else { ICMP };
            let long = vec![0x55; 1200];
            let denied = [
                ("datagram", datagram(pod, dst, 80, b"hello")),
                ("empty datagram", datagram(pod, dst, 80, &[])),
                ("long datagram", datagram(pod, dst, 80, &long)),
                (
                    "query",
                    datagram(pod, dst, 53, &query(0x0120, [1, 0, 0, 0])),
                ),
                ("echo request", frame(pod, dst, echo(v6, false, 9))),
                ("GRE", frame(pod, dst, raw(47, &[1; 40]))),
            ];
            for (what, denied) in denied {
                let reply = replied(k, what, &denied)?;
                reply.expect_turned(pod, dst, protocol);
                reply.expect_prohibited(&denied);
            }
        }
        // A first fragment in IPv4, whose header has the usual length.
        let first = Packet::new(POD4, PEER4, udp(4000, 80)).fragment(0, true, 7);
        replied(k, "first fragment", &first.frame())?.expect_prohibited(&first.frame());
        // The endpoint's link-local address.
        let local = datagram(LINK_LOCAL, PEER6, 80, b"hello");
        replied(k, "from link-local", &local)?.expect_turned(LINK_LOCAL, PEER6, ICMPV6);
        Ok(())
    });
}

#[test]
fn an_explicit_deny_is_answered_as_well() {
    with_deny_responses(ICMP_ONLY, |k| {
        k.allow(0, EGRESS, 0, 0)?;
        let key = PolicyKey::new(PEER, EGRESS, UDP, 80, 16);
        k.policy(key, PolicyValue::deny(key))?;
        let denied = datagram(POD4, PEER4, 80, b"hello");
        let (reason, reply) = k.send_denied(&denied)?;
        assert_eq!(reason, Reason::PolicyDeny);
        Reply::read(&reply.context("no reply")?)?.expect_prohibited(&denied);
        Ok(())
    });
}

/// RFC 1122, section 3.2.2, and RFC 4443, section 2.4.
#[test]
fn errors_groups_and_other_drops_get_no_reply() {
    with_deny_responses(BOTH, |k| {
        let denied = Reason::PolicyDenied;
        for (pod, dst) in FAMILIES {
            let v6 = pod.is_ipv6();
            let about = Packet::new(dst, pod, udp(80, 4000));
            silent(k, "error", &frame(pod, dst, unreachable(&about)), denied)?;
            silent(k, "echo reply", &frame(pod, dst, echo(v6, true, 9)), denied)?;
            let redirect = icmp(v6, if v6 { 139 } else { 5 }, &[]);
            silent(k, "other message", &frame(pod, dst, redirect), denied)?;
            let late = Packet::new(pod, dst, udp(4000, 80)).fragment(8, false, 3);
            silent(k, "fragment", &late.frame(), Reason::FragmentUnknown)?;
            let broadcast = Packet::new(pod, dst, udp(4000, 80)).frame_to([0xff; 6]);
            silent(k, "broadcast frame", &broadcast, denied)?;
            let group = Packet::new(pod, dst, udp(4000, 80)).frame_to([1, 0, 0x5e, 0, 0, 1]);
            silent(k, "multicast frame", &group, denied)?;
        }
        // Later fragments of a datagram whose first fragment was denied.
        let first = Packet::new(POD4, PEER4, udp(4000, 80)).fragment(0, true, 8);
        replied(k, "first fragment", &first.frame())?;
        let later = Packet::new(POD4, PEER4, udp(4000, 80)).fragment(16, false, 8);
        silent(k, "later fragment", &later.frame(), denied)?;
        for dst in ["224.0.0.251", "255.255.255.255", "240.0.0.1", "0.0.0.0"] {
            let packet = frame(POD4, ip(dst), udp(4000, 80));
            silent(k, dst, &packet, denied)?;
        }
        for dst in ["ff02::fb", "ff0e::1", "::"] {
            let packet = frame(POD6, ip(dst), udp(4000, 80));
            silent(k, dst, &packet, denied)?;
        }
        let options = Packet::new(POD4, PEER4, tcp(4000, 80, SYN)).options(&[1, 1, 1, 0]);
        silent(k, "options", &options.frame(), denied)?;
        let extended = Packet::new(POD6, PEER6, tcp(4000, 80, SYN)).extensions(60, 1);
        silent(k, "extension header", &extended.frame(), denied)?;
        let short = frame(POD4, PEER4, raw(47, &[1; 4]));
        silent(k, "nothing to quote", &short, denied)?;

        let foreign = frame(STRANGER4, PEER4, udp(4000, 80));
        silent(k, "another source", &foreign, Reason::SpoofedSource)?;
        let loopback = frame(POD4, ip("127.0.0.1"), tcp(4000, 80, SYN));
        silent(k, "loopback", &loopback, Reason::Loopback)?;
        Ok(())
    });
}

#[test]
fn packets_on_a_bridge_are_answered_unless_it_shows_them_to_all() {
    with_deny_responses(ICMP_ONLY, |k| {
        let mut port = attachment(holdfast_e2e::kernel::IFINDEX);
        port.gateway_mac = Some([2, 0, 0, 0, 0, 9]);
        k.reload(&port)?;
        let neighbour = [2, 0x42, 10, 9, 1, 77];
        let mut denied = datagram(POD4, PEER4, 80, b"hello");
        denied[..6].copy_from_slice(&neighbour);
        let reply = replied(k, "to a neighbour", &denied)?;
        assert_eq!(reply.macs, *[MAC, neighbour].concat());
        reply.expect_prohibited(&denied);
        let mut shown = denied.clone();
        shown[..6].fill(0xff);
        silent(k, "to all", &shown, Reason::Misaddressed)?;
        denied[6..12].copy_from_slice(&neighbour);
        silent(k, "another source MAC", &denied, Reason::SourceMac)
    });
}

#[test]
fn without_the_settings_there_is_no_reply() {
    with_kernel(|k| {
        for (pod, dst) in FAMILIES {
            let packets = [
                frame(pod, dst, tcp(4000, 80, SYN)),
                datagram(pod, dst, 80, b"hello"),
                datagram(pod, dst, 53, &query(0x0120, [1, 0, 0, 0])),
            ];
            for packet in packets {
                silent(k, "denied", &packet, Reason::PolicyDenied)?;
            }
        }
        Ok(())
    });
}

/// A query for the address of `a.test`, with these flags and numbers of records.
fn query(flags: u16, counts: [u16; 4]) -> Vec<u8> {
    let mut query = vec![0x12, 0x34];
    query.extend(flags.to_be_bytes());
    for count in counts {
        query.extend(count.to_be_bytes());
    }
    query.extend(b"\x01a\x04test\0\0\x01\0\x01");
    if counts[3] == 1 {
        // EDNS, DO.
        query.extend([0, 0, 41, 4, 0xd0, 0, 0, 0x80, 0, 0, 0]);
    }
    query
}

#[test]
fn a_query_is_refused() {
    with_deny_responses(DNS_ONLY, |k| {
        for (pod, dst) in FAMILIES {
            // (flags of the query, flags of the answer): RD, AD and CD; CD only; none.
            for (asked, answered) in [(0x0130, 0x8115), (0x0010, 0x8015), (0, 0x8005)] {
                for counts in [[1, 0, 0, 0], [1, 0, 0, 1]] {
                    let asked = query(asked, counts);
                    let denied = datagram(pod, dst, 53, &asked);
                    let reply = replied(k, "query", &denied)?;
                    reply.expect_turned(pod, dst, UDP);
                    assert_eq!(reply.body[..4], [0, 53, 0x0f, 0xa0]);
                    let mut expected = asked.clone();
                    expected[2..4].copy_from_slice(&u16::to_be_bytes(answered));
                    assert_eq!(reply.body[8..], expected);
                }
            }
            let syn = segment(SYN, 5, 0, &[]);
            let over_tcp = frame(pod, dst, with_dport(syn, 53));
            let reply = replied(k, "query over TCP", &over_tcp)?;
            assert_eq!(reply.body[..2], [0, 53]);
            assert_eq!(reply.body[4..12], [0, 0, 0, 0, 0, 0, 0, 6]);
        }
        // The reply to a datagram without a checksum has no checksum, either.
        let mut without = datagram(POD4, PEER4, 53, &query(0x0100, [1, 0, 0, 0]));
        without[40..42].fill(0);
        let (_, reply) = k.send_denied(&without)?;
        assert_eq!(reply.context("no reply")?[40..42], [0, 0]);
        Ok(())
    });
}

fn with_dport(transport: Transport, port: u16) -> Transport {
    let packet = Packet::new(POD4, PEER4, transport).ip();
    let mut bytes = packet[20..].to_vec();
    bytes[2..4].copy_from_slice(&port.to_be_bytes());
    raw(TCP, &bytes)
}

#[test]
fn only_queries_are_refused() {
    let others = |pod, dst| {
        [
            (
                "response",
                datagram(pod, dst, 53, &query(0x8100, [1, 0, 0, 0])),
            ),
            (
                "update",
                datagram(pod, dst, 53, &query(0x2800, [1, 0, 0, 0])),
            ),
            (
                "no question",
                datagram(pod, dst, 53, &query(0, [0, 0, 0, 0])),
            ),
            (
                "two questions",
                datagram(pod, dst, 53, &query(0, [2, 0, 0, 0])),
            ),
            ("answers", datagram(pod, dst, 53, &query(0, [1, 1, 0, 0]))),
            (
                "authorities",
                datagram(pod, dst, 53, &query(0, [1, 0, 1, 0])),
            ),
            (
                "two additional",
                datagram(pod, dst, 53, &query(0, [1, 0, 0, 2])),
            ),
            ("short", datagram(pod, dst, 53, &[0; 11])),
            (
                "another port",
                datagram(pod, dst, 5353, &query(0, [1, 0, 0, 0])),
            ),
        ]
    };
    with_deny_responses(DNS_ONLY, |k| {
        for (pod, dst) in FAMILIES {
            for (what, packet) in others(pod, dst) {
                silent(k, what, &packet, Reason::PolicyDenied)?;
            }
            let web = frame(pod, dst, tcp(4000, 80, SYN));
            silent(k, "another port of TCP", &web, Reason::PolicyDenied)?;
        }
        let first = Packet::new(POD4, PEER4, udp(4000, 53)).fragment(0, true, 7);
        silent(k, "fragment", &first.frame(), Reason::PolicyDenied)
    });
    with_deny_responses(BOTH, |k| {
        for (pod, dst) in FAMILIES {
            for (what, packet) in others(pod, dst) {
                replied(k, what, &packet)?.expect_prohibited(&packet);
            }
        }
        Ok(())
    });
}

fn beyond(k: &Kernel, endpoint: EndpointId) -> Result<u64> {
    let map = k.open::<QuotaKey, Counter>(quota::NAME, MapKind::LruPerCpuHash)?;
    let key = QuotaKey {
        endpoint: endpoint.0,
        limit: Limit::DenyResponses as u8,
        pad: 0,
    };
    let values = map.get_per_cpu(&key)?;
    Ok(values.iter().flatten().map(|value| value.packets).sum())
}

#[test]
fn a_flood_of_denied_packets_gets_no_more_replies_than_the_quota() {
    with_deny_responses(ICMP_ONLY, |k| {
        let burst = BURST_NS / DENY_RESPONSE_INTERVAL_NS;
        let begun = std::time::Instant::now();
        let denied = datagram(POD4, PEER4, 80, b"hello");
        let (mut replies, mut sent) = (0, 0);
        while sent < 20 * burst {
            let (reason, reply) = k.send_denied(&denied)?;
            assert_eq!(reason, Reason::PolicyDenied);
            replies += u64::from(reply.is_some());
            sent += 1;
        }
        let due = u64::try_from(begun.elapsed().as_nanos())? / DENY_RESPONSE_INTERVAL_NS;
        assert!(replies >= burst, "{replies} replies");
        assert!(replies <= burst + due + 2, "{replies} replies, {due} due");
        assert_eq!(beyond(k, ENDPOINT)?, sent - replies);
        Ok(())
    });
}
