//! A local user of the node opens as many connections as possible. Pods and probes are not
//! affected.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::kernel::PROXY_PORT;
use holdfast_e2e::lab::{DNS4, DNS6, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Program, Query, eventually, with_lab};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

const SDP: u16 = 9961;
const AGENT: u16 = 9962;
/// A connection to the proxy that gets this old was not closed at once.
const LONG: Duration = Duration::from_secs(5);
/// Far more than the programs accept over HTTP, and more than the usual limit on descriptors.
const IDLE: usize = 1100;
/// A user that owns nothing here, and the proxies' own user.
const OTHER_USER: u32 = 4711;
const PROXY_USER: u32 = 10094;

#[test]
fn a_local_user_takes_no_seats_from_pods_and_no_descriptors_from_the_programs() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 1024.min(hard), hard).unwrap();
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        let programs = lab.start(&good_names())?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        let pod_asks = || -> Result<()> {
            for server in [DNS4, DNS6] {
                lab.a
                    .ask(&Query::a("www.good.test", server).tcp())?
                    .expect(web4(10))?;
            }
            Ok(())
        };

        // Connections to the proxy itself, from many addresses, are refused before they take a
        // place in the queue.
        let proxy = SocketAddr::from((Ipv4Addr::LOCALHOST, PROXY_PORT));
        lab.node.enter(|| -> Result<()> {
            for host in 0..200 {
                let connected = connect(Ipv4Addr::new(127, 0, host, 7), proxy);
                ensure!(
                    connected.is_err(),
                    "the proxy has a connection from loopback"
                );
            }
            let connected = TcpStream::connect((Ipv6Addr::LOCALHOST, PROXY_PORT));
            ensure!(connected.is_err(), "the proxy has a connection from ::1");
            Ok(())
        })??;
        ensure!(lab.metric(SDP, "holdfast_dns_tcp_connections", "")? == 0.0);
        ensure!(lab.metric(SDP, "holdfast_dns_tcp_refused_total", "")? == 0.0);
        pod_asks()?;

        // Connections to the ports of probes and metrics.
        for (port, program) in [(SDP, &programs.sdp), (AGENT, &programs.agent)] {
            let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let idle = lab.node.enter(|| -> Result<Vec<_>> {
                (0..IDLE)
                    .map(|_| connect(Ipv4Addr::LOCALHOST, to))
                    .collect()
            })??;
            let (code, body) = lab.http(port, "/readyz").context("while others are idle")?;
            ensure!(code == 200, "port {port}: {code} {body}");
            let open = descriptors(program)?;
            ensure!(open < 400, "{open} descriptors are open");
            pod_asks()?;
            drop(idle);
            let limit = descriptor_limit(program)?;
            ensure!(limit == hard, "{limit} descriptors of {hard} may be open");
        }
        Ok(())
    });
}

/// Longest time to an answer.
const SOON: Duration = Duration::from_secs(1);
/// Number of queries of the pod while a local user floods the proxy's port.
const QUERIES: usize = 400;

#[test]
fn datagrams_of_a_local_user_take_no_place_in_the_queue_of_pods() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        let _programs = lab.start(&good_names())?;
        let queries = [DNS4, DNS6].map(|server| Query::a("www.good.test", server));
        for query in &queries {
            lab.a.ask(query)?.expect(web4(10))?;
        }
        let stop = AtomicBool::new(false);
        let sent = AtomicU64::new(0);
        let lost = std::thread::scope(|scope| -> Result<Vec<String>> {
            for ip in [
                IpAddr::from(Ipv4Addr::LOCALHOST),
                Ipv6Addr::LOCALHOST.into(),
            ] {
                let (stop, sent) = (&stop, &sent);
                scope.spawn(move || {
                    lab.node
                        .enter(|| flood((ip, PROXY_PORT).into(), stop, sent))
                });
            }
            let begun = eventually("a flood", LONG, || {
                let sent = sent.load(Ordering::Relaxed);
                ensure!(sent > 100_000, "{sent} datagrams");
                Ok(())
            });
            let lost = (0..QUERIES).filter_map(|number| {
                let query = queries[number % queries.len()].clone().within(SOON);
                let reply = lab.a.ask(&query);
                reply.and_then(|reply| reply.expect(web4(10))).err()
            });
            // A few lost queries are enough, because each of them takes its whole time limit.
            let lost = lost.map(|error| format!("{error:#}")).take(10);
            let lost: Vec<_> = lost.collect();
            stop.store(true, Ordering::Relaxed);
            begun?;
            Ok(lost)
        })?;
        println!(
            "{sent:?} datagrams, {} of {QUERIES} queries lost",
            lost.len()
        );
        ensure!(
            lost.is_empty(),
            "{} or more of {QUERIES} lost: {:?}",
            lost.len(),
            lost.first()
        );
        let refused = lab.metric(SDP, "holdfast_dns_queries_total", "result=\"loop\"")?;
        ensure!(
            refused == 0.0,
            "the proxy received {refused} datagrams of a local user"
        );
        Ok(())
    });
}

/// Sends 64 queries each half of a millisecond.
fn flood(to: SocketAddr, stop: &AtomicBool, sent: &AtomicU64) -> Result<()> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    let query = Query::a("www.good.test", to.ip()).encode(1)?;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..64 {
            // An ICMP error for an earlier datagram makes the next call fail.
            let _ = socket.send_to(&query, to);
        }
        sent.fetch_add(64, Ordering::Relaxed);
        // The flood is to fill queues, and not to occupy the CPUs.
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}

/// Whether a process of this user and group may connect to a unix socket.
fn may_connect(user: u32, socket: &Path) -> Result<bool> {
    let mut command = Command::new("setpriv");
    command.args(["--clear-groups", &format!("--reuid={user}")]);
    command.arg(format!("--regid={user}")).args(["test", "-w"]);
    Ok(command.arg(socket).status().context("setpriv")?.success())
}

#[test]
fn another_user_may_not_connect_to_the_sockets_of_agent_and_proxies() {
    with_lab(|lab| {
        let _programs = lab.start(&good_names())?;
        for socket in [lab.sdp_socket(), lab.agent_socket(), lab.sdp_admin("one")] {
            let at = socket.display();
            ensure!(may_connect(0, &socket)?, "root may not connect to {at}");
            ensure!(
                !may_connect(OTHER_USER, &socket)?,
                "anyone may connect to {at}"
            );
        }
        ensure!(may_connect(PROXY_USER, &lab.sdp_socket())?);
        ensure!(!may_connect(PROXY_USER, &lab.agent_socket())?);
        Ok(())
    });
}

fn connect(from: Ipv4Addr, to: SocketAddr) -> Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect_timeout(&to.into(), LONG)?;
    Ok(socket.into())
}

fn descriptors(program: &Program) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{}/fd", program.id()))?.count())
}

/// The soft limit on open descriptors.
fn descriptor_limit(program: &Program) -> Result<u64> {
    let limits = fs::read_to_string(format!("/proc/{}/limits", program.id()))?;
    let line = limits.lines().find(|l| l.starts_with("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().nth(3));
    Ok(soft.context("a limit")?.parse()?)
}
