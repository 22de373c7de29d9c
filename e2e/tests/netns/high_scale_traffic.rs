//! Traffic between two nodes in mode `full`: Services, long streams, and a router with a small MTU.
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::fleet::{Fleet, with_fleet};
use holdfast_e2e::lab::at;
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::service::{ServicePort, kube_proxy, service4};
use holdfast_e2e::web::Web;
use holdfast_e2e::{Lab, Netns, Pod, Program};
use shared_maps::event::Reason;

use super::high_scale::{
    NEVER, PORT, Pods, SOON, add_endpoints, add_pods, connects, documents, is_ipv4, options,
    other_is_recorded, wrapped,
};

/// For a stream of 100 MiB, on a busy machine.
const LONG: Duration = Duration::from_secs(120);
/// Port of the server that sends streams back.
const BACK: u16 = 9003;
const MIB: usize = 1 << 20;
const PIECE: usize = 64 << 10;

/// Agents of both nodes in mode `full`, with the test's pods. The agents end when this is dropped.
pub(super) struct Running {
    pub(super) pods: Pods,
    _agents: [Program; 2],
}

pub(super) fn start(fleet: &Fleet<'_>) -> Result<Running> {
    let pods = add_pods(fleet)?;
    for lab in [fleet.one, fleet.two] {
        documents(lab)?;
    }
    let agents = [
        fleet.one.start_agent(&options("full"))?,
        fleet.two.start_agent(&options("full"))?,
    ];
    add_endpoints(fleet, &pods)?;
    for lab in [fleet.one, fleet.two] {
        lab.status_has(SOON, &["wraps packets of at most 1450 bytes"])?;
    }
    Ok(Running {
        pods,
        _agents: agents,
    })
}

/// Packets of the tunnel and other IPv4 packets that the socket has seen.
pub(super) fn seen(wire: &RawFrames) -> Result<(usize, usize)> {
    let (mut of_tunnel, mut plain) = (0, 0);
    while let Some(frame) = wire.next(Duration::from_millis(200))? {
        match wrapped(&frame) {
            Some(_) => of_tunnel += 1,
            None if is_ipv4(&frame) => plain += 1,
            None => {}
        }
    }
    Ok((of_tunnel, plain))
}

#[test]
fn high_scale_a_service_leads_to_a_pod_of_the_other_node() {
    with_fleet(|fleet| {
        let running = start(fleet)?;
        let pods = &running.pods;
        let server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
        let backend = at(pods.client.v4.into(), PORT);
        let service = at(service4(80), 80);
        let translated = ServicePort {
            protocol: "tcp",
            at: service,
            backends: vec![backend],
        };
        kube_proxy(fleet.one, &[translated])?;
        let wire = RawFrames::open(fleet.router())?;
        pods.web.expect_open(service)?;
        ensure!(server.visits(backend) == 1, "{}", server.visits(backend));
        ensure!(
            !connects(&pods.other, service, NEVER)?,
            "the other pod is admitted"
        );
        let (of_tunnel, plain) = seen(&wire)?;
        ensure!(of_tunnel > 4, "{of_tunnel} packets of the tunnel");
        ensure!(plain == 0, "{plain} packets that are not wrapped");
        other_is_recorded(fleet.two)?;
        ensure!(server.visits(backend) == 1, "{}", server.visits(backend));
        Ok(())
    });
}

/// Bytes of a piece of the stream, which differ from those of every other piece.
fn piece(number: usize) -> Vec<u8> {
    let words = PIECE / 8;
    let word = |at: usize| ((number * words + at) as u64).to_be_bytes();
    (0..words).flat_map(word).collect()
}

/// Sends `length` bytes to the other pod, which sends them back, and compares them.
fn transfer(from: &Pod, to: &Pod, length: usize) -> Result<()> {
    let listener = to.netns.enter(|| TcpListener::bind((to.v4, BACK)))??;
    let server = thread::spawn(move || -> std::io::Result<u64> {
        let (stream, _) = listener.accept()?;
        let (mut input, mut output) = (&stream, &stream);
        let copied = std::io::copy(&mut input, &mut output)?;
        stream.shutdown(std::net::Shutdown::Write)?;
        Ok(copied)
    });
    let stream = from.connect((to.v4, BACK).into(), SOON)?;
    stream.set_read_timeout(Some(LONG))?;
    stream.set_write_timeout(Some(LONG))?;
    let pieces = length / PIECE;
    let begin = Instant::now();
    let mut output = stream.try_clone()?;
    let sender = thread::spawn(move || -> std::io::Result<()> {
        for number in 0..pieces {
            output.write_all(&piece(number))?;
        }
        output.shutdown(std::net::Shutdown::Write)
    });
    let back = receive(stream, pieces);
    sender.join().ok().context("the sender")??;
    back?;
    let copied = server.join().ok().context("the server")??;
    ensure!(copied == length as u64, "{copied} bytes");
    println!("{length} bytes there and back in {:?}", begin.elapsed());
    Ok(())
}

fn receive(mut stream: TcpStream, pieces: usize) -> Result<()> {
    let mut back = vec![0; PIECE];
    for number in 0..pieces {
        let read = stream.read_exact(&mut back);
        read.with_context(|| format!("piece {number} of {pieces}"))?;
        ensure!(back == piece(number), "piece {number} differs");
    }
    Ok(())
}

/// A counter of /proc/net/snmp.
fn snmp(netns: &Netns, group: &str, name: &str) -> Result<u64> {
    let text = netns.enter(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))??;
    let group = format!("{group}:");
    let mut lines = text.lines().filter(|line| line.starts_with(&group));
    let names = lines.next().context("no names")?.split_whitespace();
    let values = lines.next().context("no values")?.split_whitespace();
    let found = names.zip(values).find(|(of, _)| *of == name);
    Ok(found.with_context(|| format!("no {name}"))?.1.parse()?)
}

/// IP fragments that were made or received anywhere.
fn fragments(fleet: &Fleet<'_>, pods: &Pods) -> Result<u64> {
    let mut sum = 0;
    for netns in [
        &fleet.one.node,
        &fleet.two.node,
        fleet.router(),
        &pods.web.netns,
        &pods.client.netns,
    ] {
        for name in ["FragCreates", "ReasmReqds"] {
            sum += snmp(netns, "Ip", name)?;
        }
    }
    Ok(sum)
}

fn set_mtu(lab: &Lab, pod: &Pod, mtu: u32) -> Result<()> {
    pod.netns.batch(&format!("link set eth0 mtu {mtu}"))?;
    lab.node
        .batch(&format!("link set {} mtu {mtu}", pod.host_side))
}

/// The path MTU from one pod to the other, as the routes of `from` show it.
fn path_mtu(from: &Pod, to: &Pod) -> Result<String> {
    let to = to.v4.to_string();
    let route = from.netns.run("ip", &["route", "get", &to])?;
    let mut words = route.split_whitespace().skip_while(|word| *word != "mtu");
    Ok(words.nth(1).unwrap_or_default().to_owned())
}

#[test]
fn high_scale_carries_100_mib_without_fragments_from_short_and_from_long_pods() {
    with_fleet(|fleet| {
        let running = start(fleet)?;
        let pods = &running.pods;
        for mtu in [1450, 1500] {
            set_mtu(fleet.one, &pods.web, mtu)?;
            set_mtu(fleet.two, &pods.client, mtu)?;
            let before = fleet.one.counted(Reason::Wrapped)?;
            transfer(&pods.web, &pods.client, 100 * MIB)?;
            let wrapped = fleet.one.counted(Reason::Wrapped)? - before;
            ensure!(wrapped > 1_000, "{mtu}: {wrapped} packets wrapped");
            ensure!(fragments(fleet, pods)? == 0, "{mtu}: fragments");
        }
        // Pods whose packets are too long were told so.
        ensure!(path_mtu(&pods.web, &pods.client)? == "1450");
        ensure!(path_mtu(&pods.client, &pods.web)? == "1450");
        Ok(())
    });
}

#[test]
fn high_scale_pods_learn_of_a_router_with_short_packets() {
    with_fleet(|fleet| {
        let running = start(fleet)?;
        let pods = &running.pods;
        for (pod, via) in [(&pods.client, "192.0.9.2"), (&pods.web, "192.0.2.1")] {
            let line = format!("route replace {}/32 via {via} mtu 1400", pod.v4);
            fleet.router().batch(&line)?;
        }
        let too_big = |pod: &Pod| snmp(&pod.netns, "Icmp", "InDestUnreachs");
        transfer(&pods.web, &pods.client, 8 * MIB)?;
        ensure!(fragments(fleet, pods)? == 0, "fragments");
        for (from, to) in [(&pods.web, &pods.client), (&pods.client, &pods.web)] {
            ensure!(too_big(from)? > 0, "{} got no ICMP", from.v4);
            let mtu = path_mtu(from, to)?;
            ensure!(mtu == "1350", "{}: {mtu}", from.v4);
        }
        Ok(())
    });
}
