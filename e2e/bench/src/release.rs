//! `cargo xtask bench release`: how long an answer waits for its addresses.
//!
//! A pod queries names, each for the first time and then again. The first time the proxy holds the
//! answer until the agent has written identity and ipcache. The second time the pair is leased and
//! the answer is released at once. The difference is the time that gRPC, core and kernel maps need.
//! The benchmark runs with an idle machine and with every core busy.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use holdfast_e2e::lab::DNS4;
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Lab, Query};

/// Time to release.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Names per row
    #[arg(long, default_value_t = 1000)]
    names: u16,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let lab = Lab::new()?;
    let _programs = lab.start(&good_names())?;
    println!("microseconds per query over UDP, {} names", options.names);
    println!(
        "{:<6} {:<8} {:>8} {:>8} {:>8}",
        "cores", "answer", "p50", "p99", "max"
    );
    for (row, busy) in [(0, false), (1, true)] {
        let load = busy.then(Load::start).transpose()?;
        let late = lab.metric(9961, "holdfast_mapping_late_total", "")?;
        let names = known(&lab, row, options.names);
        let cores = if busy { "busy" } else { "idle" };
        for answer in ["new", "leased"] {
            let mut times = ask_all(&lab, &names)?;
            times.sort_unstable();
            let at = |percent: usize| times.get((times.len() - 1) * percent / 100);
            println!(
                "{cores:<6} {answer:<8} {:>8} {:>8} {:>8}",
                micros(at(50)),
                micros(at(99)),
                micros(at(100))
            );
        }
        let late = lab.metric(9961, "holdfast_mapping_late_total", "")? - late;
        println!("{cores:<6} released after the max delay, not by the agent: {late}");
        drop(load);
    }
    Ok(())
}

/// Names that are in the zone and were not looked up yet.
fn known(lab: &Lab, row: u8, count: u16) -> Vec<(String, IpAddr)> {
    (0..count)
        .map(|n| {
            let [high, low] = n.to_be_bytes();
            let address = IpAddr::V4(Ipv4Addr::new(100, 64 + row, high, low));
            let name = format!("n{n}-r{row}.good.test");
            lab.zone.set(&name, &[address], 600);
            (name, address)
        })
        .collect()
}

fn ask_all(lab: &Lab, names: &[(String, IpAddr)]) -> Result<Vec<Duration>> {
    lab.a.netns.enter(|| {
        names
            .iter()
            .map(|(name, address)| {
                let query = Query::a(name, DNS4);
                let start = Instant::now();
                let reply = query.send()?;
                let time = start.elapsed();
                ensure!(reply.addresses() == [*address], "{name}: {}", reply.code());
                Ok(time)
            })
            .collect()
    })?
}

fn micros(time: Option<&Duration>) -> u128 {
    time.map_or(0, Duration::as_micros)
}

/// One spinning thread per core, until dropped.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Load {
    fn start() -> Result<Self> {
        let cores = thread::available_parallelism().context("number of cores")?;
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..cores.get())
            .map(|_| {
                let stop = Arc::clone(&stop);
                thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        Ok(Self { stop, threads })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
