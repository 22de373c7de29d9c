//! Open-loop DNS load from several pods, in a process of its own. It sends a fixed number of
//! queries per second, whatever their outcome. It repeats none, and counts each as right, wrong or
//! lost.
//!
//! UDP queries are sent through raw sockets, each from the next source port, so that 50,000 ports
//! need no 50,000 sockets. TCP connections are real: most send one query and close, some stay and
//! send query after query.

pub(crate) mod names;
mod tcp;
mod udp;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shared_maps::user::monotonic_ns;

use crate::netns::Netns;
use crate::pod::Pod;
use crate::wait::{eventually, until};
use crate::{config, traffic::names::Names};

/// How often the process prints its progress.
const PROGRESS: Duration = Duration::from_millis(100);
/// Maximum number of lost queries whose time of sending is stored.
const LOST_KEPT: usize = 200_000;
/// Maximum number of failures that are described in words.
const SAMPLES: usize = 12;
/// Maximum number of right answers of one sender whose time is stored.
const TIMES_KEPT: usize = 200_000;

/// Kind, rate and duration of the load that the process sends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub clients: Vec<Client>,
    /// Servers that get the queries in turn, port 53. One per family at most.
    pub servers: Vec<IpAddr>,
    /// UDP queries per second, of all pods together.
    pub udp_rate: u32,
    /// TCP connections per second with one query each, of all pods together.
    pub tcp_rate: u32,
    /// TCP connections per pod and server that stay open.
    pub lasting: u32,
    /// Names from which each query is chosen.
    pub names: Names,
    /// Longest wait for answers at the end.
    pub lost_after: Duration,
}

/// A pod from which the load is sent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Client {
    /// Name of its network namespace.
    pub netns: String,
    /// Its addresses: one per family at most.
    pub addresses: Vec<IpAddr>,
}

impl Client {
    /// The pod as a sender.
    pub fn of(pod: &Pod) -> Self {
        Self {
            netns: pod.netns.name().to_owned(),
            addresses: vec![pod.v4.into(), pod.v6.into()],
        }
    }
}

/// Outcome of the queries of one transport. At the end `sent` = `right` + `wrong` + `lost`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Queries sent. Over TCP, a connection that fails counts as one.
    pub sent: u64,
    /// Queries answered with the zone's address, from the server's address, to the right port, with
    /// the right id.
    pub right: u64,
    /// Queries that were answered, but not as `right` requires.
    pub wrong: u64,
    /// Queries that were not answered in time, or that failed over TCP.
    pub lost: u64,
    /// Answers without a waiting query, and repeated answers.
    pub stray: u64,
    /// Lasting connections that the proxy closed between two queries.
    pub reopened: u64,
    /// Queries on a lasting connection that arrived after the peer had closed it. The client sends
    /// such a query again (RFC 7766, 6.2.4). They are not included in `sent`.
    pub crossed: u64,
    /// When lost queries were sent, CLOCK_MONOTONIC, nanoseconds.
    pub lost_at: Vec<u64>,
    /// Longest time to a right answer, milliseconds.
    pub slowest_ms: u64,
    /// Times to the first right answers, microseconds.
    pub times_us: Vec<u32>,
    /// Some of the errors, as text.
    pub samples: Vec<String>,
}

impl Counts {
    /// The sums of both, with the longer of the two longest times.
    pub fn plus(&self, other: &Self) -> Self {
        fn joined<T: Copy>(a: &[T], b: &[T]) -> Vec<T> {
            a.iter().chain(b).copied().collect()
        }
        let mut samples = self.samples.clone();
        samples.extend(other.samples.iter().cloned());
        samples.truncate(SAMPLES);
        Self {
            sent: self.sent + other.sent,
            right: self.right + other.right,
            wrong: self.wrong + other.wrong,
            lost: self.lost + other.lost,
            stray: self.stray + other.stray,
            reopened: self.reopened + other.reopened,
            crossed: self.crossed + other.crossed,
            lost_at: joined(&self.lost_at, &other.lost_at),
            slowest_ms: self.slowest_ms.max(other.slowest_ms),
            times_us: joined(&self.times_us, &other.times_us),
            samples,
        }
    }

    /// The time within which `percent` of 100 right answers arrived, milliseconds; 0 without
    /// answers.
    pub fn percentile_ms(&self, percent: usize) -> f64 {
        let mut times = self.times_us.clone();
        times.sort_unstable();
        let at = (times.len() * percent / 100).min(times.len().saturating_sub(1));
        times.get(at).map_or(0.0, |us| f64::from(*us) / 1e3)
    }

    fn right(&mut self, sent_at: u64) {
        self.right += 1;
        let took = monotonic_ns().saturating_sub(sent_at);
        self.slowest_ms = self.slowest_ms.max(took / 1_000_000);
        if self.times_us.len() < TIMES_KEPT {
            let took = u32::try_from(took / 1_000).unwrap_or(u32::MAX);
            self.times_us.push(took);
        }
    }

    fn wrong(&mut self, why: impl FnOnce() -> String) {
        self.wrong += 1;
        self.sample(why);
    }

    fn lost(&mut self, sent_at: u64, why: impl FnOnce() -> String) {
        self.lost += 1;
        if self.lost_at.len() < LOST_KEPT {
            self.lost_at.push(sent_at);
        }
        self.sample(why);
    }

    fn sample(&mut self, why: impl FnOnce() -> String) {
        if self.samples.len() < SAMPLES {
            self.samples.push(why());
        }
    }
}

/// The counts of a whole run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub udp: Counts,
    pub tcp: Counts,
    /// Pairs of pod address and UDP source port that were used.
    pub source_ports: u64,
    /// How long queries were sent, seconds.
    pub seconds: f64,
}

impl Report {
    /// Counts of UDP and TCP together.
    pub fn total(&self) -> Counts {
        self.udp.plus(&self.tcp)
    }
}

/// Progress of a run of the load.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    pub sent: u64,
    pub right: u64,
}

/// A line that the process prints.
#[derive(Debug, Serialize, Deserialize)]
enum Line {
    Progress(Progress),
    Report(Box<Report>),
}

/// One pod's part of a rate.
#[derive(Clone, Copy, Debug)]
struct Pace {
    per_second: u32,
    among: usize,
}

impl Pace {
    /// Number of queries that are due since the time `since`.
    fn due(self, since: Instant) -> u64 {
        let all = since.elapsed().as_micros() * u128::from(self.per_second) / 1_000_000;
        u64::try_from(all).unwrap_or(u64::MAX) / (self.among.max(1) as u64)
    }

    /// Number of queries that are due in this part of a second.
    fn of_a_second(self, parts: u64) -> u64 {
        u64::from(self.per_second) / (self.among.max(1) as u64) / parts
    }
}

/// State that all senders of the process share.
#[derive(Debug, Default)]
struct Common {
    /// Whether to send no more queries, and only wait for outstanding answers.
    stop: AtomicBool,
    sent: AtomicU64,
    right: AtomicU64,
}

/// The load process. It sends until its standard input is closed, then prints its report.
pub fn serve(spec: &Spec) -> Result<()> {
    let common = Arc::new(Common::default());
    let until_closed = Arc::clone(&common);
    std::thread::spawn(move || {
        let _ = std::io::stdin().lines().last();
        until_closed.stop.store(true, Ordering::Release);
    });
    let report = run(spec, &common, |progress| print(&Line::Progress(progress)))?;
    print(&Line::Report(Box::new(report)));
    Ok(())
}

fn print(line: &Line) {
    let text = serde_json::to_string(line).unwrap_or_default();
    // If this fails, the reader has closed the pipe and does not need the line.
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn run(spec: &Spec, common: &Arc<Common>, show: impl Fn(Progress)) -> Result<Report> {
    let report = Arc::new(Mutex::new(Report::default()));
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let start = Instant::now();
    for number in 0..spec.clients.len() {
        let udp = udp::Sender::new(spec, number)?;
        let tcp = tcp::Sender::new(spec, number)?;
        let netns = Netns::existing(&spec.clients[number].netns);
        let (common_udp, into) = (Arc::clone(common), Arc::clone(&report));
        threads.push(std::thread::spawn(move || {
            let (counts, ports) = udp.run(&common_udp);
            let mut report = into.lock();
            report.udp = report.udp.plus(&counts);
            report.source_ports += ports;
        }));
        let (common, into) = (Arc::clone(common), Arc::clone(&report));
        threads.push(netns.spawn(move || {
            let counts = tcp.run(&common);
            let mut report = into.lock();
            report.tcp = report.tcp.plus(&counts);
        })?);
    }
    let mut seconds = 0.0;
    while threads.iter().any(|thread| !thread.is_finished()) {
        if !common.stop.load(Ordering::Acquire) {
            seconds = start.elapsed().as_secs_f64();
        }
        show(Progress {
            sent: common.sent.load(Ordering::Relaxed),
            right: common.right.load(Ordering::Relaxed),
        });
        std::thread::sleep(PROGRESS);
    }
    for thread in threads {
        ensure!(thread.join().is_ok(), "a sender panicked");
    }
    let mut report = report.lock().clone();
    report.seconds = seconds;
    Ok(report)
}

/// A running load process; ended when dropped.
#[derive(Debug)]
pub(crate) struct Traffic {
    child: Child,
    input: Option<ChildStdin>,
    progress: Arc<Mutex<Progress>>,
    reader: Option<JoinHandle<Option<Report>>>,
    lost_after: Duration,
}

impl Traffic {
    /// Starts the load process, which begins to send at once.
    pub(crate) fn start(spec: &Spec) -> Result<Self> {
        let mut child = Command::new(config::program("lab")?)
            .arg("traffic")
            .arg(serde_json::to_string(spec)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the load")?;
        let output = BufReader::new(child.stdout.take().context("the output is piped")?);
        let progress = Arc::new(Mutex::new(Progress::default()));
        let shown = Arc::clone(&progress);
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(Line::Progress(now)) => *shown.lock() = now,
                    Ok(Line::Report(report)) => return Some(*report),
                    Err(error) => eprintln!("unreadable line of the load {line}: {error}"),
                }
            }
            None
        });
        Ok(Self {
            input: child.stdin.take(),
            child,
            progress,
            reader: Some(reader),
            lost_after: spec.lost_after,
        })
    }

    /// The last progress that the process has reported.
    pub(crate) fn progress(&self) -> Progress {
        *self.progress.lock()
    }

    /// Waits for `more` further right answers.
    pub(crate) fn flows(&self, more: u64) -> Result<()> {
        let wanted = self.progress().right + more;
        let progress = || Ok(self.progress());
        until(
            &format!("{wanted} right answers"),
            Duration::from_secs(20),
            progress,
            |progress| progress.right >= wanted,
        )?;
        Ok(())
    }

    /// Lets the process send for this long.
    pub(crate) fn lasts(&self, duration: Duration) {
        std::thread::sleep(duration);
    }

    /// Stops sending, waits for outstanding answers, and returns the report.
    pub(crate) fn finish(mut self) -> Result<Report> {
        drop(self.input.take());
        let reader = self.reader.take().context("the account is taken once")?;
        let limit = self.lost_after + Duration::from_secs(20);
        eventually("the load ends", limit, || {
            ensure!(reader.is_finished(), "{:?}", self.progress());
            Ok(())
        })?;
        let report = reader.join().ok().flatten();
        let report = report.context("the load ended without an account")?;
        for (name, of) in [("UDP", &report.udp), ("TCP", &report.tcp)] {
            ensure!(
                of.sent == of.right + of.wrong + of.lost,
                "the account does not close: {name} {of:?}"
            );
        }
        Ok(report)
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        // This fails only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
