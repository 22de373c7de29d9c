//! Nodes that go from one mode of the tunnel to the next, one after the other.
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::fleet::{Fleet, with_fleet};
use holdfast_e2e::lab::at;
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Pod, eventually};

use super::high_scale::{
    POLICY, PORT, Pods, SOON, add_endpoints, add_pods, connects, documents, options, stop, wraps,
};

/// Ports of the echo server.
const STREAM: u16 = 9001;
const DATAGRAMS: u16 = 9002;
/// Between two messages.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a message of the stream may take.
const STALLED: Duration = Duration::from_secs(5);

/// While plain packets come, a node has to know the pods of others.
pub(super) fn with_known_address(fleet: &Fleet<'_>, pods: &Pods) -> Result<()> {
    for lab in [fleet.one, fleet.two] {
        documents(lab)?;
    }
    let known = format!("{POLICY}  - fromCIDR: [\"{}/32\"]\n", pods.web.v4);
    fleet.two.write_policy("in.yaml", &known)
}

/// A pod that sends back what it receives, until the test ends.
pub(super) fn echo(pod: &Pod) -> Result<()> {
    let listener = pod.netns.enter(|| TcpListener::bind((pod.v4, STREAM)))??;
    let datagrams = pod.netns.enter(|| UdpSocket::bind((pod.v4, DATAGRAMS)))??;
    thread::spawn(move || {
        let mut message = [0; 8];
        if let Ok((mut stream, _)) = listener.accept() {
            while stream.read_exact(&mut message).is_ok() && stream.write_all(&message).is_ok() {}
        }
    });
    thread::spawn(move || {
        let mut message = [0; 64];
        while let Ok((length, from)) = datagrams.recv_from(&mut message) {
            let _lost = datagrams.send_to(&message[..length], from);
        }
    });
    Ok(())
}

/// A stream and a flow of datagrams from one pod to another, and how they fare.
pub(super) struct Traffic {
    stop: Arc<AtomicBool>,
    /// Messages of the stream that came back, or why it ended.
    stream: JoinHandle<Result<u32>>,
    sent: Arc<AtomicU32>,
    received: Arc<AtomicU32>,
}

impl Traffic {
    pub(super) fn start(from: &Pod, to: Ipv4Addr) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stream = from
            .netns
            .enter(|| TcpStream::connect_timeout(&(to, STREAM).into(), SOON))??;
        stream.set_read_timeout(Some(STALLED))?;
        let ended = Arc::clone(&stop);
        let stream = thread::spawn(move || talk(stream, &ended));
        let socket = from.netns.enter(|| UdpSocket::bind((from.v4, 0)))??;
        socket.connect((to, DATAGRAMS))?;
        let answers = socket.try_clone()?;
        let (sent, received) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (counts, ended) = (Arc::clone(&sent), Arc::clone(&stop));
        thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                // A port that is closed for a moment is an error of the next call.
                let _lost = socket.send(b"datagram");
                counts.fetch_add(1, Ordering::Relaxed);
                thread::sleep(PAUSE);
            }
        });
        let counts = Arc::clone(&received);
        thread::spawn(move || {
            let mut message = [0; 64];
            loop {
                if answers.recv(&mut message).is_ok() {
                    counts.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Ok(Self {
            stop,
            stream,
            sent,
            received,
        })
    }

    /// Fails if the stream ended or stalled, or if more than one datagram of a hundred was lost.
    pub(super) fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let messages = self.stream.join().ok().context("the stream's thread")?;
        let messages = messages.context("the stream")?;
        ensure!(messages > 100, "{messages} messages");
        // Waits for the datagrams that are on their way.
        thread::sleep(Duration::from_millis(500));
        let (sent, received) = (&self.sent, &self.received);
        let (sent, received) = (
            sent.load(Ordering::Relaxed),
            received.load(Ordering::Relaxed),
        );
        println!("{messages} messages of the stream, {received} of {sent} datagrams");
        ensure!(sent > 100, "{sent} datagrams sent");
        let lost = sent.saturating_sub(received);
        ensure!(lost * 100 <= sent, "{lost} of {sent} datagrams lost");
        Ok(())
    }
}

/// Sends messages and waits for each to come back.
fn talk(mut stream: TcpStream, ended: &AtomicBool) -> Result<u32> {
    let mut messages = 0;
    while !ended.load(Ordering::Relaxed) {
        let message = u64::from(messages).to_be_bytes();
        stream.write_all(&message)?;
        let mut back = [0; 8];
        let read = stream.read_exact(&mut back);
        read.with_context(|| format!("message {messages} did not come back"))?;
        ensure!(back == message, "another message");
        messages += 1;
        thread::sleep(PAUSE);
    }
    Ok(messages)
}

#[test]
fn high_scale_migration_loses_no_connection() {
    with_fleet(|fleet| {
        let pods = add_pods(fleet)?;
        let _server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
        let to = at(pods.client.v4.into(), PORT);
        with_known_address(fleet, &pods)?;
        echo(&pods.client)?;
        let unset = AgentOptions::default().flag("--enable-ipv6=false");
        let mut one = Some(fleet.one.start_agent(&unset)?);
        let mut two = Some(fleet.two.start_agent(&unset)?);
        add_endpoints(fleet, &pods)?;
        let traffic = Traffic::start(&pods.web, pods.client.v4)?;
        for mode in ["off", "decap-only", "full", "decap-only", "off"] {
            for (lab, agent) in [(fleet.one, &mut one), (fleet.two, &mut two)] {
                stop(agent)?;
                ensure!(
                    connects(&pods.web, to, SOON)?,
                    "before {mode}, without an agent"
                );
                *agent = Some(lab.start_agent(&options(mode))?);
                ensure!(connects(&pods.web, to, SOON)?, "{mode}");
            }
            if mode == "full" {
                eventually("packets are wrapped", SOON, || {
                    ensure!(wraps(fleet, &pods, to)?, "not wrapped");
                    Ok(())
                })?;
            } else {
                assert!(!wraps(fleet, &pods, to)?, "{mode}");
            }
        }
        // Without a mode, nothing is left of it.
        stop(&mut two)?;
        two = Some(fleet.two.start_agent(&unset)?);
        for name in agent_datapath::tunnel::PINS {
            assert!(!fleet.two.pin(name).exists(), "{name}");
        }
        ensure!(connects(&pods.web, to, SOON)?, "unset");
        traffic.end()?;
        drop((one, two));
        Ok(())
    });
}

/// Packets are lost exactly where one node wraps and the other does not unwrap.
#[test]
fn high_scale_migration_of_each_pair_of_modes() {
    with_fleet(|fleet| {
        let pods = add_pods(fleet)?;
        let _server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
        let to: SocketAddr = at(pods.client.v4.into(), PORT);
        with_known_address(fleet, &pods)?;
        let forced = |mode: &str| options(mode).flag("--high-scale-force=true");
        let modes = ["off", "decap-only", "full"];
        let (mut one, mut two) = (None, None);
        let mut has_endpoints = false;
        for of_one in modes {
            if one.is_some() {
                stop(&mut one)?;
            }
            one = Some(fleet.one.start_agent(&forced(of_one))?);
            for of_two in modes {
                if two.is_some() {
                    stop(&mut two)?;
                }
                two = Some(fleet.two.start_agent(&forced(of_two))?);
                if !std::mem::replace(&mut has_endpoints, true) {
                    add_endpoints(fleet, &pods)?;
                }
                for (lab, mode) in [(fleet.one, of_one), (fleet.two, of_two)] {
                    if mode == "full" {
                        eventually("it wraps", SOON, || {
                            let status = lab.agent(&["status"])?;
                            ensure!(status.contains("wraps packets"), "{status}");
                            Ok(())
                        })?;
                    }
                }
                let reaches = |from: &str, to: &str| from != "full" || to != "off";
                let expected = reaches(of_one, of_two) && reaches(of_two, of_one);
                let limit = if expected {
                    SOON
                } else {
                    Duration::from_secs(2)
                };
                let connected = connects(&pods.web, to, limit)?;
                assert_eq!(connected, expected, "{of_one} to {of_two}");
            }
        }
        drop((one, two));
        Ok(())
    });
}
