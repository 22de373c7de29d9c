//! The tunnel on the wire: two nodes and a router between them.
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use agent_core::{
    datapath::{
        attachment::Attachment,
        plan::{Datapath as _, Step},
    },
    high_scale::{
        blocks::Blocks,
        objects::{HighScaleView, World},
    },
};
use agent_datapath::{
    events::EventReader,
    routing,
    tunnel::{Tunnel, TunnelError, TunnelMode, TunnelSettings},
};
use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::kernel::node::udp_at;
use holdfast_e2e::kernel::tunnel::{Wrapped, with_mode, with_tunnel};
use holdfast_e2e::kernel::{Kernel, attachment};
use holdfast_e2e::packet::{Packet, udp};
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::{Netns, eventually, until};
use ipnet::Ipv4Net;
use nix::net::if_::if_nametoindex;
use shared_maps::event::Reason;
use shared_maps::ipcache::IpcacheValue;
use shared_maps::lxc::{LxcKey, LxcValue};
use shared_maps::mark;
use shared_maps::pin;
use shared_maps::policy::{EGRESS, INGRESS, PolicyKey, PolicyValue};
use shared_maps::tunnel::DEFAULT_PORT;
use shared_maps::user::ipcache_key;
use shared_maps::{EndpointId, IdentityId};

const TCP: u8 = 6;
const UDP: u8 = 17;
const SOON: Duration = Duration::from_secs(10);
const POD1: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const POD2: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
const POD3: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 3);
const ID1: u32 = 4242;
const ID2: u32 = 7777;
const ID3: u32 = 5151;
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
/// Longer than a segment, so that the stack hands over packets of many segments.
const MANY_BYTES: usize = 16 << 20;

fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status()?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

/// Every rule of a firewall that uses the whole mark, in this namespace.
fn rewrite_marks() -> Result<()> {
    let rules = "table ip marks {\n\
         chain a { type filter hook prerouting priority 100; meta mark set 0x11111111; }\n\
         chain b { type filter hook forward priority 100; meta mark set 0xffffffff; }\n\
         chain c { type filter hook postrouting priority -100; meta mark set 0; }\n\
         chain d { type filter hook output priority 100; meta mark set 0x0f00; }\n}\n";
    let mut nft = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .spawn()?;
    nft.stdin
        .take()
        .context("no input")?
        .write_all(rules.as_bytes())?;
    let status = nft.wait()?;
    ensure!(status.success(), "nft: {status}");
    Ok(())
}

fn block_on<T>(work: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    Ok(runtime.block_on(work))
}

fn settings(mode: TunnelMode) -> TunnelSettings {
    TunnelSettings {
        mode,
        devices: vec!["eth0".to_owned()],
        port: DEFAULT_PORT,
        knows_pod_blocks: false,
    }
}

fn tunnel(k: &mut Kernel, mode: TunnelMode) -> Result<Tunnel> {
    let programs = k.datapath().programs().clone();
    let mut tunnel = Tunnel::new(programs, k.globals(), settings(mode))?;
    let block: Ipv4Net = "203.0.113.0/24".parse()?;
    tunnel.follow(HighScaleView {
        world: World::Blocks(Arc::new(Blocks::of(&[block])?)),
        nodes: Arc::default(),
    })?;
    block_on(tunnel.refresh())??;
    Ok(tunnel)
}

/// Makes this namespace node `number`, with `eth0` towards the router.
fn connect(router: &Netns, number: u8) -> Result<()> {
    for (name, value) in [
        ("ip_forward", "1"),
        ("conf/all/rp_filter", "0"),
        ("conf/default/rp_filter", "0"),
    ] {
        std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value)?;
    }
    let far = format!("eth{}", number - 1);
    ip("link set lo up")?;
    ip(&format!(
        "link add eth0 type veth peer name {far} netns {}",
        router.name()
    ))?;
    ip(&format!("addr add 10.100.{number}.2/24 dev eth0"))?;
    ip("link set eth0 up")?;
    router.batch(&format!(
        "address add 10.100.{number}.1/24 dev {far}\nlink set {far} up\n\
         route add 10.{number}.0.0/24 via 10.100.{number}.2"
    ))?;
    ip(&format!("route add default via 10.100.{number}.1"))
}

/// Name that no other test has.
fn name_of(k: &Kernel) -> Result<String> {
    let globals = k.globals();
    let name = globals.root().file_name().context("no root")?;
    Ok(name.display().to_string())
}

/// A pod of this namespace's node, which may send anything.
fn pod(k: &mut Kernel, address: Ipv4Addr, identity: u32, mtu: u32) -> Result<Netns> {
    let [_, node, _, host] = address.octets();
    let name = format!("{}-{node}-{host}", name_of(k)?);
    let netns = Netns::create(name)?;
    let (side, mac) = (format!("lxc{host}"), [2, 0, 0, 0, node, host]);
    let written = mac.map(|byte| format!("{byte:02x}")).join(":");
    ip(&format!(
        "link add {side} type veth peer name eth0 address {written} netns {}",
        netns.name()
    ))?;
    ip(&format!("addr add 10.{node}.0.1/32 dev {side}"))?;
    ip(&format!("link set {side} up"))?;
    ip(&format!("route add {address}/32 dev {side}"))?;
    netns.batch(&format!(
        "address add {address}/32 dev eth0\nlink set eth0 mtu {mtu}\nlink set eth0 up\n\
         route add 10.{node}.0.1/32 dev eth0\nroute add default via 10.{node}.0.1"
    ))?;
    let endpoint = EndpointId(u16::from(node) << 8 | u16::from(host));
    let ifindex = if_nametoindex(side.as_str())?;
    let value = LxcValue {
        ifindex,
        lxc_id: endpoint.0,
        sec_id: identity,
        ..LxcValue::default()
    };
    let known = IpcacheValue {
        sec_identity: identity,
        ..IpcacheValue::default()
    };
    let any = PolicyKey::new(0, EGRESS, 0, 0, 0);
    for step in [
        Step::CreatePolicyMap(endpoint),
        Step::SetLxc(LxcKey::v4(address.octets()), value),
        Step::SetIpcache(ipcache_key(address.into(), 32), known),
        Step::SetPolicy(endpoint, any, PolicyValue::allow(any)),
        Step::Attach(Attachment {
            endpoint,
            identity: IdentityId(identity),
            ipv4: Some(address),
            ipv6: None,
            mac,
            ..attachment(ifindex)
        }),
    ] {
        k.datapath().apply(&step)?;
    }
    Ok(netns)
}

/// Two nodes in `full`, whose firewalls rewrite marks: pod 1 and pod 3 on the first, pod 2 on the second.
struct Fleet<'a> {
    /// Namespace of the first node.
    node_one: Netns,
    one: &'a mut Kernel,
    two: &'a mut Kernel,
    router: &'a Netns,
    pod1: &'a Netns,
    pod2: Netns,
    pod3: &'a Netns,
}

/// Runs `test` in the namespace of the second node.
fn with_fleet(mtu: u32, test: impl FnOnce(&mut Fleet<'_>) -> Result<()> + Send) {
    with_nodes(mtu, false, test);
}

/// Like [`with_fleet`]. `transparent`: proxies of the first node send queries under pods' addresses.
/// They find their answers by a mark, which no firewall rewrites then.
fn with_nodes(mtu: u32, transparent: bool, test: impl FnOnce(&mut Fleet<'_>) -> Result<()> + Send) {
    with_mode(TunnelMode::Full, transparent, |one| {
        let router = Netns::create(format!("{}-r", name_of(one)?))?;
        router.sysctl(&[
            ("net.ipv4.ip_forward", "1"),
            ("net.ipv4.conf.all.rp_filter", "0"),
        ])?;
        router.batch(&format!("address add {OUTSIDE}/32 dev lo"))?;
        connect(&router, 1)?;
        if transparent {
            block_on(routing::install(true, false))??;
        } else {
            rewrite_marks()?;
        }
        let here = format!("/proc/self/task/{}/ns/net", nix::unistd::gettid());
        let pod1 = pod(one, POD1, ID1, mtu)?;
        let pod3 = pod(one, POD3, ID3, mtu)?;
        let _one = tunnel(one, TunnelMode::Full)?;
        with_tunnel(TunnelMode::Full, |two| {
            connect(&router, 2)?;
            rewrite_marks()?;
            let pod2 = pod(two, POD2, ID2, mtu)?;
            let _two = tunnel(two, TunnelMode::Full)?;
            let endpoint = EndpointId(2 << 8 | 2);
            for (protocol, port) in [(TCP, 80), (UDP, 53)] {
                let key = PolicyKey::new(ID1, INGRESS, protocol, port, 16);
                let step = Step::SetPolicy(endpoint, key, PolicyValue::allow(key));
                two.datapath().apply(&step)?;
            }
            test(&mut Fleet {
                node_one: Netns::at("one".to_owned(), here.into()),
                one,
                two,
                router: &router,
                pod1: &pod1,
                pod2,
                pod3: &pod3,
            })
        });
        Ok(())
    });
}

/// Pod 2 serves one connection and gives the sum of what it got.
fn serve(pod2: &Netns) -> Result<std::thread::JoinHandle<()>> {
    let listener = pod2.enter(|| TcpListener::bind((POD2, 80)))??;
    Ok(std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else {
            return;
        };
        let mut bytes = Vec::new();
        if stream.read_to_end(&mut bytes).is_ok() {
            let _sent = stream.write_all(&sum(&bytes).to_be_bytes());
        }
    }))
}

/// FNV-1a.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn transfer(from: &Netns, length: usize) -> Result<()> {
    let mut stream = from.enter(|| TcpStream::connect_timeout(&(POD2, 80).into(), SOON))??;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let bytes: Vec<u8> = (0..=250_u8).cycle().take(length).collect();
    stream.write_all(&bytes)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).context("the sum")?;
    ensure!(
        u64::from_be_bytes(answer) == sum(&bytes),
        "other bytes arrived"
    );
    Ok(())
}

/// Addresses, port and VNI of a packet of the tunnel.
fn wrapped(frame: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr, u32)> {
    let ip = frame.get(14..)?;
    let is_ours = frame.get(12..14)? == [8, 0] && ip.first()? == &0x45 && ip.get(9)? == &UDP;
    let port = u16::from_be_bytes(ip.get(22..24)?.try_into().ok()?);
    if !is_ours || port != DEFAULT_PORT {
        return None;
    }
    let address = |at: usize| {
        Some(Ipv4Addr::from(
            <[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?,
        ))
    };
    let (source, destination) = (address(12)?, address(16)?);
    // Inner addresses are the same.
    let inside = (address(50 + 12)?, address(50 + 16)?);
    let header: [u8; 8] = ip.get(28..36)?.try_into().ok()?;
    let good = inside == (source, destination) && header[0] == 8 && ip.get(6)? & 0x40 != 0;
    good.then(|| (source, destination, shared_maps::tunnel::vni_in(header)))
}

#[test]
fn tunnel_connects_pods_of_nodes_that_know_each_other_s_pods_by_identity_only() {
    with_fleet(1500, |fleet| {
        let mut records = EventReader::open(&fleet.two.globals())?;
        let wire = RawFrames::open(fleet.router)?;
        let server = serve(&fleet.pod2)?;
        transfer(fleet.pod1, 3000)?;
        server.join().expect("the server");
        let mut seen = std::collections::BTreeSet::new();
        let mut plain = Vec::new();
        while let Some(frame) = wire.next(Duration::from_millis(200))? {
            match wrapped(&frame) {
                Some(packet) => drop(seen.insert(packet)),
                None if frame.get(12..14) == Some(&[8, 0]) => plain.push(frame),
                None => {}
            }
        }
        let expected = [(POD1, POD2, ID1), (POD2, POD1, ID2)];
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected);
        assert!(plain.is_empty(), "plain packets: {plain:02x?}");
        // Neither node has an ipcache entry of the other's pods: policy knew the sender by the tunnel.
        let ipcache = fleet
            .two
            .globals()
            .ipcache(shared_maps::user::Access::ReadOnly)?;
        assert_eq!(ipcache.get(&ipcache_key(POD1.into(), 32))?, None);

        // Pod 3 is refused, and the record names it.
        let asker = fleet.pod3.enter(|| UdpSocket::bind((POD3, 0)))??;
        asker.send_to(b"hello", (POD2, 53))?;
        let denied = |records: &mut EventReader| {
            let found = records.take(100).into_iter();
            let mut found = found.filter(|record| record.reason == Reason::PolicyDenied as u8);
            found.next().context("no record of a drop yet")
        };
        let record = eventually("the drop is recorded", SOON, || denied(&mut records))?;
        assert_eq!(record.remote_identity, ID3);
        assert_eq!(record.saddr[..4], POD3.octets());
        Ok(())
    });
}

#[test]
fn tunnel_carries_long_streams_whole_whatever_the_pods_mtu() {
    for mtu in [1450, 1500] {
        with_fleet(mtu, |fleet| {
            let server = serve(&fleet.pod2)?;
            transfer(fleet.pod1, MANY_BYTES).with_context(|| format!("MTU {mtu}"))?;
            server.join().expect("the server");
            let told = fleet.one.counted(Reason::TooBig)? > 0;
            assert_eq!(
                told,
                mtu == 1500,
                "pods receive the length that fits: MTU {mtu}"
            );
            let snmp = fleet.router.run("cat", &["/proc/net/snmp"])?;
            let fragments = snmp
                .lines()
                .filter(|line| line.starts_with("Ip:"))
                .nth(1)
                .map(|line| {
                    let numbers: Vec<&str> = line.split_whitespace().collect();
                    // FragOKs, FragFails, FragCreates.
                    numbers[17..20].join(" ")
                });
            assert_eq!(fragments.as_deref(), Some("0 0 0"), "{snmp}");
            Ok(())
        });
    }
}

#[test]
fn tunnel_packets_that_others_make_up_are_not_delivered() {
    with_fleet(1500, |fleet| {
        let victim = fleet.pod2.enter(|| UdpSocket::bind((POD2, 53)))??;
        victim.set_read_timeout(Some(SOON))?;
        let count = |k: &Kernel, reason, at_least| {
            until(
                "the packet is counted",
                SOON,
                || k.counted(reason),
                |seen| *seen >= at_least,
            )
        };
        // The path works.
        let good = fleet.pod1.enter(|| UdpSocket::bind((POD1, 0)))??;
        good.send_to(b"hello", (POD2, 53))?;
        victim.recv(&mut [0; 64]).context("a datagram of pod 1")?;

        let payload = |from: Ipv4Addr, to: Ipv4Addr| {
            let inner = Packet::new(from.into(), to.into(), udp(4000, 53));
            Wrapped::new(from, to, ID1, &inner).ip().split_off(28)
        };
        // Pod 3 claims to be pod 1.
        let forger = fleet.pod3.enter(|| UdpSocket::bind((POD3, 0)))??;
        forger.send_to(&payload(POD3, POD2), (POD2, DEFAULT_PORT))?;
        count(fleet.one, Reason::TunnelPort, 1)?;
        // So does a machine outside, whose addresses are a block of the world.
        let outside = fleet.router.enter(|| UdpSocket::bind((OUTSIDE, 0)))??;
        outside.send_to(&payload(OUTSIDE, POD2), (POD2, DEFAULT_PORT))?;
        count(fleet.two, Reason::TunnelForged, 1)?;
        // And one that sends to the node itself, where the kernel unwraps.
        let node = Ipv4Addr::new(10, 100, 2, 2);
        outside.send_to(&payload(POD1, POD2), (node, DEFAULT_PORT))?;
        count(fleet.two, Reason::TunnelForged, 2)?;
        victim.set_read_timeout(Some(Duration::from_millis(300)))?;
        assert!(
            victim.recv(&mut [0; 64]).is_err(),
            "a forged datagram was delivered"
        );
        victim.set_read_timeout(Some(SOON))?;
        good.send_to(b"hello", (POD2, 53))?;
        victim
            .recv(&mut [0; 64])
            .context("a later datagram of pod 1")?;

        // What goes to the world is plain.
        let server = fleet.router.enter(|| UdpSocket::bind((OUTSIDE, 53)))??;
        server.set_read_timeout(Some(SOON))?;
        good.send_to(b"hello", (OUTSIDE, 53))?;
        let (_, from) = server
            .recv_from(&mut [0; 64])
            .context("a datagram to the world")?;
        assert_eq!(from.ip(), POD1);
        Ok(())
    });
}

#[test]
fn tunnel_carries_queries_that_a_proxy_sends_for_a_pod() {
    with_nodes(1500, true, |fleet| {
        // Policy sends pod 1's queries to the proxy.
        let endpoint = EndpointId(1 << 8 | 2);
        let key = PolicyKey::new(IdentityId::WORLD.0, EGRESS, UDP, 53, 16);
        let redirect = PolicyValue::dns_redirect(key, 10_094);
        let step = Step::SetPolicy(endpoint, key, redirect);
        fleet.one.datapath().apply(&step)?;
        let asker = fleet.pod1.enter(|| UdpSocket::bind((POD1, 0)))??;
        asker.send_to(b"query", (POD2, 53))?;
        until(
            "the query is redirected",
            SOON,
            || fleet.one.counted(Reason::Redirected),
            |seen| *seen > 0,
        )?;

        let server = fleet.pod2.enter(|| UdpSocket::bind((POD2, 53)))??;
        server.set_read_timeout(Some(SOON))?;
        let wire = RawFrames::open(fleet.router)?;
        let mark = mark::from_proxy(IdentityId(ID1));
        let proxy = fleet.node_one.enter(|| -> Result<UdpSocket> {
            let socket = udp_at((POD1, 0).into(), mark)?;
            socket.connect((POD2, 53))?;
            Ok(socket)
        })??;
        proxy.set_read_timeout(Some(SOON))?;
        proxy.send(b"query")?;
        let (_, from) = server.recv_from(&mut [0; 64]).context("the query")?;
        assert_eq!(from, proxy.local_addr()?);
        server.send_to(b"answer", from)?;
        let mut answer = [0; 64];
        let length = proxy.recv(&mut answer).context("the answer")?;
        assert_eq!(&answer[..length], b"answer");
        assert_eq!(fleet.one.counted(Reason::Returned)?, 1);
        let mut seen = Vec::new();
        while let Some(frame) = wire.next(Duration::from_millis(200))? {
            seen.extend(wrapped(&frame));
        }
        assert_eq!(seen, [(POD1, POD2, ID1), (POD2, POD1, ID2)]);
        Ok(())
    });
}

/// Programs at an interface, and whether the device that wraps is there.
fn state(k: &Kernel) -> Result<(Vec<String>, bool)> {
    let links = k.globals().root().join(pin::LINKS);
    let mut found = Vec::new();
    for name in ["from_net", "to_net", "tunnel"] {
        for entry in std::fs::read_dir(links.join(name)).into_iter().flatten() {
            let name = entry?.file_name();
            found.push(
                name.to_string_lossy()
                    .rsplit_once('_')
                    .context("a pin")?
                    .0
                    .to_owned(),
            );
        }
    }
    Ok((found, if_nametoindex("hf_vxlan").is_ok()))
}

#[test]
fn tunnel_programs_come_and_go_with_the_mode() {
    with_tunnel(TunnelMode::Full, |k| {
        ip("link add eth0 type veth peer name far")?;
        for mode in [
            TunnelMode::Off,
            TunnelMode::DecapOnly,
            TunnelMode::Full,
            TunnelMode::Full,
            TunnelMode::DecapOnly,
            TunnelMode::Full,
            TunnelMode::Off,
        ] {
            // As a restarted agent does: its programs replace those of the run before.
            let _tunnel = tunnel(k, mode)?;
            let (programs, device): (&[&str], _) = match mode {
                TunnelMode::Off => (&["to_net"], false),
                TunnelMode::DecapOnly => (&["from_net", "to_net"], false),
                TunnelMode::Full => (&["from_net", "to_net", "from_tunnel"], true),
            };
            let found = state(k)?;
            assert_eq!(
                (
                    found.0.iter().map(String::as_str).collect::<Vec<_>>(),
                    found.1
                ),
                (programs.to_vec(), device),
                "{mode:?}"
            );
        }
        let _full = tunnel(k, TunnelMode::Full)?;
        block_on(agent_datapath::tunnel::clear(&k.globals()))??;
        assert_eq!(state(k)?, (Vec::new(), false));
        Ok(())
    });
}

#[test]
fn tunnel_refuses_devices_and_ports_that_it_cannot_use() {
    with_tunnel(TunnelMode::Full, |k| {
        let refused = |k: &mut Kernel| -> Result<String> {
            let programs = k.datapath().programs().clone();
            let mut tunnel = Tunnel::new(programs, k.globals(), settings(TunnelMode::Full))?;
            let error: TunnelError = block_on(tunnel.refresh())?.err().context("not refused")?;
            Ok(error.to_string())
        };
        assert_eq!(
            refused(k)?,
            "--high-scale-device eth0: there is no such device; name one that `ip link` lists"
        );
        ip("tuntap add dev eth0 mode tun")?;
        assert!(
            refused(k)?.contains("not an Ethernet device"),
            "{}",
            refused(k)?
        );
        ip("link delete eth0")?;
        ip("link add eth0 type veth peer name far")?;
        ip("link add flannel.1 type vxlan id 1 dstport 8472")?;
        let text = refused(k)?;
        assert!(
            text.starts_with("--tunnel-port 8472: the VXLAN device flannel.1"),
            "{text}"
        );
        assert_eq!(state(k)?, (Vec::new(), false), "something was attached");
        ip("link delete flannel.1")?;
        tunnel(k, TunnelMode::Full)?;
        Ok(())
    });
}
