//! Other systems on the node: their programs at a pod's interface, and their rules that rewrite
//! marks of packets.
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::eventually;
use holdfast_e2e::kernel::node::{MANY, NODE4, NODE6, Node, Proxy, SOON, udp_at, with_node};
use holdfast_e2e::kernel::{PEER4, PEER6, POD4, POD6};
use shared_maps::IdentityId;
use shared_maps::event::Reason;
use shared_maps::mark::{self, MAGIC_FROM_EGRESS_PROXY};
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::steering::KIND_SDP;

const UDP: u8 = 17;
const PORT: u16 = 7777;
/// Both families: (pod, node, peer).
const FAMILIES: [(IpAddr, IpAddr, IpAddr); 2] = [(POD4, NODE4, PEER4), (POD6, NODE6, PEER6)];

fn counted(node: &mut Node<'_>, reason: Reason, at_least: u64) -> Result<()> {
    eventually("the packets are counted", SOON, || {
        let now = node.kernel().counted(reason)?;
        ensure!(now >= at_least, "{reason:?}: {now} of {at_least}");
        Ok(())
    })
}

fn is_empty(socket: &UdpSocket) -> Result<bool> {
    socket.set_nonblocking(true)?;
    Ok(socket.recv(&mut [0; 64]).is_err())
}

#[test]
fn programs_after_ours_receive_allowed_packets_and_none_for_the_proxy() {
    with_node(|node| {
        node.kernel().allow(0, EGRESS, UDP, PORT)?;
        let proxy = node.proxy(0, KIND_SDP)?;
        for (pod, address, peer) in FAMILIES {
            let server = UdpSocket::bind((address, PORT))?;
            server.set_read_timeout(Some(SOON))?;
            let client = node.pod().enter(|| UdpSocket::bind((pod, 0)))??;
            client.send_to(b"before", (address, PORT))?;
            server
                .recv(&mut [0; 64])
                .context("without the other program")?;
            node.drop_after_us("ingress")?;
            let before = node.kernel().counted(Reason::Allowed)?;
            client.send_to(b"after", (address, PORT))?;
            counted(node, Reason::Allowed, before + 1)?;
            // The other program would drop these, too.
            assert_eq!(node.ask(peer, [&proxy])?, [MANY]);
            assert!(is_empty(&server)?, "the other program did not run");
            node.leave_all()?;
        }
        Ok(())
    });
}

#[test]
fn programs_after_ours_receive_packets_to_a_pod() {
    with_node(|node| {
        for (pod, address, _) in FAMILIES {
            let client = node.pod().enter(|| UdpSocket::bind((pod, PORT)))??;
            client.set_read_timeout(Some(SOON))?;
            let server = UdpSocket::bind((address, 0))?;
            server.send_to(b"before", (pod, PORT))?;
            client
                .recv(&mut [0; 64])
                .context("without the other program")?;
            node.drop_after_us("egress")?;
            let before = node.kernel().counted(Reason::Allowed)?;
            server.send_to(b"after", (pod, PORT))?;
            counted(node, Reason::Allowed, before + 1)?;
            node.leave_all()?;
            // The dropped packet does not arrive late: the packet that was sent after it arrives
            // first.
            server.send_to(b"last", (pod, PORT))?;
            let mut buffer = [0; 64];
            let length = client.recv(&mut buffer)?;
            assert_eq!(buffer.get(..length), Some(&b"last"[..]));
        }
        Ok(())
    });
}

/// The pod sends a query over TCP and gets an answer. The proxy closes first.
fn tcp_exchange(node: &Node<'_>, proxy: &Proxy, server: IpAddr) -> Result<()> {
    let wait = Duration::from_secs(3);
    let to: SocketAddr = (server, 53).into();
    let mut client = node
        .pod()
        .enter(|| TcpStream::connect_timeout(&to, wait))?
        .context("connect")?;
    let listener = &proxy.tcp[usize::from(server.is_ipv6())];
    let (mut stream, _) = eventually("a connection", SOON, || Ok(listener.accept()?))?;
    stream.write_all(b"answer")?;
    drop(stream);
    client.set_read_timeout(Some(wait))?;
    let mut got = Vec::new();
    client.read_to_end(&mut got).context("the answer")?;
    ensure!(got == b"answer", "{got:?}");
    Ok(())
}

#[test]
fn the_proxy_is_recognised_by_its_socket_although_others_rewrite_marks_of_packets() {
    with_node(|node| {
        let proxy = node.proxy(0, KIND_SDP)?;
        let client = IdentityId(3000);
        for (pod, _, peer) in FAMILIES {
            let asker = node.pod().enter(|| UdpSocket::bind((pod, 0)))??;
            asker.set_read_timeout(Some(SOON))?;
            asker.send_to(b"query", (peer, 53))?;
            let asked_from = asker.local_addr()?;
            let answers = udp_at((peer, 53).into(), MAGIC_FROM_EGRESS_PROXY)?;
            let other = udp_at((peer, 53).into(), 0)?;

            // A firewall that uses the whole mark.
            node.on_output("meta l4proto udp meta mark set 0")?;
            answers.send_to(b"answer", asked_from)?;
            asker.recv(&mut [0; 64]).context("answer of the proxy")?;

            // A rule does not turn a sender into the proxy.
            node.on_output("meta l4proto udp meta mark set 0xb00")?;
            let before = node.kernel().counted(Reason::ForgedAnswer)?;
            other.send_to(b"forged", asked_from)?;
            counted(node, Reason::ForgedAnswer, before + 1)?;
            assert!(is_empty(&asker)?, "a forged answer");

            // Calico's default mask contains the bits of the identity in our marks.
            node.on_output("meta mark set meta mark & 0x0000ffff")?;
            tcp_exchange(node, &proxy, peer)?;
            let query = udp_at((peer, 0).into(), mark::from_proxy(client))?;
            let denied = node.kernel().counted(Reason::PolicyDenied)?;
            query.send_to(b"query", (pod, PORT))?;
            counted(node, Reason::PolicyDenied, denied + 1)
                .context("the pod that asks, not the node, is the source")?;
            node.kernel().allow(client.0, INGRESS, UDP, PORT)?;
            let server = node.pod().enter(|| UdpSocket::bind((pod, PORT)))??;
            server.set_read_timeout(Some(SOON))?;
            query.send_to(b"query", (pod, PORT))?;
            server.recv(&mut [0; 64]).context("the allowed query")?;
            node.on_output("accept")?;
            let key = shared_maps::policy::PolicyKey::new(client.0, INGRESS, UDP, PORT, 16);
            node.kernel().forget(key)?;
        }
        Ok(())
    });
}
