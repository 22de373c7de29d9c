//! Flows that the node translates, and their removal from its connection tracking. Like kube-proxy,
//! this module removes UDP flows to a backend that is gone.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use nix::libc::{AF_INET, AF_INET6, AF_NETLINK, ENOENT, IPPROTO_UDP, NETLINK_NETFILTER};
use socket2::{Domain, Protocol, Socket, Type};

use crate::lab::Lab;

/// Type of a message: the subsystem of connection tracking (1), and its request to delete (2).
const DELETE: u16 = 1 << 8 | 2;
/// A request (1) that is acknowledged (4).
const ACKNOWLEDGED: u16 = 1 | 4;
/// Flag of an attribute that contains attributes.
const NESTED: u16 = 1 << 15;
/// `CTA_TUPLE_ORIG`, and its `CTA_TUPLE_IP` and `CTA_TUPLE_PROTO`.
const ORIGINAL: u16 = 1 | NESTED;
const ADDRESSES: u16 = 1 | NESTED;
const PORTS: u16 = 2 | NESTED;

/// A flow with the addresses of its first packet, and the address to which the node translates it.
#[derive(Clone, Copy, Debug)]
struct Flow {
    is_udp: bool,
    /// Whether a TCP flow is established, so that both ends may send.
    is_established: bool,
    from: (IpAddr, u16),
    to: (IpAddr, u16),
    backend: IpAddr,
}

/// Removes the UDP flows to these backends. Fails if there were any flows to them, so that the
/// caller tries again.
pub(crate) fn forget(lab: &Lab, backends: &BTreeSet<IpAddr>) -> Result<()> {
    let table = lab
        .node
        .enter(|| std::fs::read_to_string("/proc/thread-self/net/nf_conntrack"))??;
    let flows = table.lines().filter_map(read);
    let left: Vec<Flow> = flows
        .filter(|flow| flow.to.0 != flow.backend && backends.contains(&flow.backend))
        .filter(|flow| flow.is_udp || flow.is_established)
        .collect();
    let udp: Vec<Flow> = left.iter().filter(|flow| flow.is_udp).copied().collect();
    lab.node.enter(|| delete(&udp))??;
    ensure!(
        left.is_empty(),
        "{} flows, one is {:?}",
        left.len(),
        left[0]
    );
    Ok(())
}

/// Parses a line such as `ipv4 2 udp 17 29 src=A dst=B sport=1 dport=2 src=C dst=A sport=2 dport=1
/// …`.
fn read(line: &str) -> Option<Flow> {
    let all = |name: &str| {
        let words = line.split_whitespace();
        let values = words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        values.collect::<Vec<_>>()
    };
    let address = |name, at: usize| all(name).get(at)?.parse::<IpAddr>().ok();
    let port = |name| all(name).first()?.parse().ok();
    Some(Flow {
        is_udp: line.contains(" udp "),
        is_established: line.contains(" ESTABLISHED "),
        from: (address("src", 0)?, port("sport")?),
        to: (address("dst", 0)?, port("dport")?),
        backend: address("src", 1)?,
    })
}

/// Deletes flows in the namespace of this thread. A flow that has already ended is no error.
fn delete(flows: &[Flow]) -> Result<()> {
    let kind = Type::RAW;
    let protocol = Protocol::from(NETLINK_NETFILTER);
    let socket = Socket::new(Domain::from(AF_NETLINK), kind, Some(protocol))?;
    for flow in flows {
        socket.send(&request(flow)?).context("delete a flow")?;
        let mut reply = [0; 1024];
        let length = (&socket).read(&mut reply)?;
        let code = reply.get(16..20).filter(|_| length >= 20);
        let code = i32::from_ne_bytes(code.context("a short reply")?.try_into()?);
        ensure!(
            code == 0 || code == -ENOENT,
            "delete {flow:?}: error {code}"
        );
    }
    Ok(())
}

fn request(flow: &Flow) -> Result<Vec<u8>> {
    let (family, kinds) = match flow.to.0 {
        IpAddr::V4(_) => (AF_INET, [1, 2]),
        IpAddr::V6(_) => (AF_INET6, [3, 4]),
    };
    let bytes = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let addresses = [
        attribute(kinds[0], &bytes(flow.from.0))?,
        attribute(kinds[1], &bytes(flow.to.0))?,
    ];
    let ports = [
        attribute(1, &[u8::try_from(IPPROTO_UDP)?])?,
        attribute(2, &flow.from.1.to_be_bytes())?,
        attribute(3, &flow.to.1.to_be_bytes())?,
    ];
    let tuple = [
        attribute(ADDRESSES, &addresses.concat())?,
        attribute(PORTS, &ports.concat())?,
    ];
    let tuple = attribute(ORIGINAL, &tuple.concat())?;
    // Netlink's header is 16 bytes, netfilter's 4.
    let mut message = Vec::new();
    message.extend_from_slice(&u32::try_from(20 + tuple.len())?.to_ne_bytes());
    message.extend_from_slice(&DELETE.to_ne_bytes());
    message.extend_from_slice(&ACKNOWLEDGED.to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(&[u8::try_from(family)?, 0, 0, 0]);
    message.extend_from_slice(&tuple);
    Ok(message)
}

/// An attribute: length and type, then the value, padded to four bytes.
fn attribute(kind: u16, value: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = u16::try_from(4 + value.len())?.to_ne_bytes().to_vec();
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    Ok(bytes)
}
