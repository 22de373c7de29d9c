//! The programs of an earlier build beside those of this one, with the same packets in turns.
//!
//! This build is there twice: the difference between the two is that of the measurement. Programs are
//! loaded again after some rounds, because their place in memory has an effect too.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use holdfast_e2e::bench::median;
use holdfast_e2e::kernel::{From, Kernel, PEER, PEER4, PEER6, POD4, POD6, with_objects};
use holdfast_e2e::packet::{ACK, Packet, tcp, udp};
use nix::time::{ClockId, clock_gettime};
use shared_maps::policy::{EGRESS, INGRESS};

/// How often the programs are loaded.
const LOADS: usize = 6;
/// Turns of each object in a round.
const TURNS: usize = 60;
/// Runs of a program in a turn.
const REPEAT: u32 = 10_000;

/// A packet at one of the programs.
struct Row {
    what: &'static str,
    frame: Vec<u8>,
    /// Whether the pod receives it.
    inward: bool,
}

/// Times of one row, with the median ratio of each load.
#[derive(Default)]
struct Times {
    before: Vec<f64>,
    now: Vec<f64>,
    ratios: Vec<f64>,
    noise: Vec<f64>,
}

/// Prints the cost of each row before and now.
pub(crate) fn compare(object: &Path, rounds: u32) -> Result<()> {
    let bytes = fs::read(object).with_context(|| object.display().to_string())?;
    let before: &'static [u8] = Vec::leak(bytes);
    let rows = rows();
    let mut times: Vec<Times> = rows.iter().map(|_| Times::default()).collect();
    for load in 0..LOADS {
        // Each object is also loaded first, second and third equally often.
        let mut objects = [Some(before), None, None];
        objects.rotate_right(load % 3);
        with_objects(&objects, |kernels| {
            for kernel in &mut *kernels {
                prepare(kernel)?;
            }
            kernels.rotate_left(load % 3);
            for (row, times) in rows.iter().zip(&mut times) {
                for _ in 0..rounds {
                    round(kernels, row, times)?;
                }
            }
            Ok(())
        });
    }
    let mut all = Times::default();
    for (row, times) in rows.iter().zip(&times) {
        all.ratios.extend(&times.ratios);
        all.noise.extend(&times.noise);
        println!(
            "{}: {:.1} ns before, {:.1} ns now; now / before {}; now / now {}",
            row.what,
            median(times.before.iter().copied()),
            median(times.now.iter().copied()),
            spread(&times.ratios),
            spread(&times.noise),
        );
    }
    println!(
        "all rows: now / before {}; now / now {}",
        spread(&all.ratios),
        spread(&all.noise)
    );
    Ok(())
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = |what, frame: Packet, inward| {
        let frame = frame.frame();
        rows.push(Row {
            what,
            frame,
            inward,
        });
    };
    let ack = || tcp(4000, 80, ACK);
    let reply = || tcp(80, 4000, ACK);
    let out = |transport| Packet::new(POD4, PEER4, transport);
    let inward = |transport| Packet::new(PEER4, POD4, transport);
    row("from_pod IPv4 TCP segment", out(ack()), false);
    row(
        "from_pod IPv4 UDP query, redirected",
        out(udp(4000, 53)),
        false,
    );
    row(
        "from_pod IPv4 UDP packet, refused",
        out(udp(4000, 99)),
        false,
    );
    row("from_pod IPv4 UDP reply", out(udp(90, 5000)), false);
    row("to_pod IPv4 UDP packet", inward(udp(5000, 90)), true);
    row(
        "to_pod IPv4 UDP packet, refused",
        inward(udp(5000, 99)),
        true,
    );
    row("to_pod IPv4 TCP reply", inward(reply()), true);
    let out = |transport| Packet::new(POD6, PEER6, transport);
    let inward = |transport| Packet::new(PEER6, POD6, transport);
    row("from_pod IPv6 TCP segment", out(ack()), false);
    row("from_pod IPv6 UDP reply", out(udp(90, 5000)), false);
    row("to_pod IPv6 UDP packet", inward(udp(5000, 90)), true);
    row("to_pod IPv6 TCP reply", inward(reply()), true);
    rows
}

/// Policy and connections of the rows.
fn prepare(kernel: &mut Kernel) -> Result<()> {
    kernel.redirect_dns()?;
    kernel.allow(PEER, EGRESS, 6, 80)?;
    kernel.allow(PEER, INGRESS, 17, 90)?;
    for (pod, peer) in [(POD4, PEER4), (POD6, PEER6)] {
        kernel.send(&Packet::new(pod, peer, tcp(4000, 80, ACK)).frame())?;
        kernel.receive(
            &Packet::new(peer, pod, udp(5000, 90)).frame(),
            From::Outside,
        )?;
    }
    Ok(())
}

/// The objects in turns.
fn round(kernels: &mut [Kernel], row: &Row, times: &mut Times) -> Result<()> {
    let (mut ratios, mut noise) = (Vec::new(), Vec::new());
    for turn in 0..TURNS {
        // Each object comes first, second and third equally often.
        let mut costs = [0.0; 3];
        for place in 0..3 {
            let object = (turn + place) % 3;
            if let (Some(kernel), Some(slot)) = (kernels.get_mut(object), costs.get_mut(object)) {
                *slot = cost(kernel, row)?;
            }
        }
        let [before, now, again] = costs;
        times.before.push(before);
        times.now.push(now);
        ratios.push(now / before);
        noise.push(again / now);
    }
    times.ratios.push(median(ratios));
    times.noise.push(median(noise));
    Ok(())
}

/// Nanoseconds of CPU time for each run.
fn cost(kernel: &mut Kernel, row: &Row) -> Result<f64> {
    let begin = cpu_time()?;
    match row.inward {
        true => kernel.cost_in(&row.frame, REPEAT)?,
        false => kernel.cost(&row.frame, REPEAT)?,
    };
    let time = cpu_time()?.saturating_sub(begin);
    Ok(time.as_secs_f64() * 1e9 / f64::from(REPEAT))
}

/// Of this thread. The kernel gives the mean of its own runs in whole nanoseconds only.
fn cpu_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// The median, and the least and the most.
fn spread(values: &[f64]) -> String {
    let all = || values.iter().copied();
    let (least, most) = (
        all().fold(f64::NAN, f64::min),
        all().fold(f64::NAN, f64::max),
    );
    format!("{:.4} ({least:.4} to {most:.4})", median(all()))
}
