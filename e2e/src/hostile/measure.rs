//! Pod B's results during one attack.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;

use super::attack::{SERVER, ZONE};
use super::setup::{MAX_DELAY, PUSH_PORT, SERVER4, Setup};
use super::{Attack, Row};
use crate::bench::usage::peak_resident;
use crate::dns::probe::Query;
use crate::lab::at;
use crate::pod::FIRST_SYN;
use crate::traffic::names as zone;
use crate::wait::eventually;

/// The load flows this long before the attack begins.
const BEFORE: Duration = Duration::from_millis(500);
/// Time that the attack runs before B is measured.
const TAKES_HOLD: Duration = Duration::from_millis(500);
/// Longest time until pod A can use its own share again after an attack.
const QUIET_AGAIN: Duration = Duration::from_secs(60);
/// Maximum number of B's failures whose text is recorded.
const SAMPLES: usize = 8;

/// Times of pod B on a quiet node, milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Quiet {
    pub p99_ms: f64,
}

impl Quiet {
    /// Ratio of B's 99th percentile under attack to the same percentile on a quiet node. The latter
    /// counts as at least one millisecond.
    pub fn factor(self, attacked_p99_ms: f64) -> f64 {
        attacked_p99_ms / self.p99_ms.max(1.0)
    }
}

/// Outcome of the fresh names.
#[derive(Debug, Default)]
struct Fresh {
    asked: u64,
    not_open: u64,
    late: u64,
    samples: Vec<String>,
}

impl Setup {
    /// Measures B while A runs `attack`.
    pub fn play(&mut self, attack: Attack) -> Result<Row> {
        let mut row = Row {
            attack: attack.name().to_owned(),
            ..Row::default()
        };
        // Effects of the previous attack may last for a moment.
        let mut stream = eventually("B opens a connection", QUIET_AGAIN, || {
            let name = self.next_name();
            let query = Query::a(&zone::name(name), SERVER4);
            self.lab.b.ask(&query)?.expect(zone::v4(name).into())?;
            let to = at(zone::v4(name).into(), PUSH_PORT);
            self.lab.b.connect(to, FIRST_SYN)
        })?;
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        let port = stream.local_addr()?.port();
        let mut server = loop {
            let (server, peer) = self.push.accept()?;
            if peer.port() == port {
                break server;
            }
        };
        if attack != Attack::None {
            // A's own share must be free again. Without it the attack would not work.
            eventually("A gets an answer over TCP", QUIET_AGAIN, || {
                let name = format!("quiet{}.{ZONE}", self.next_name());
                self.lab.a.ask(&Query::a(&name, SERVER).tcp())
            })?;
        }

        let traffic = self.load_of_b()?;
        traffic.flows(u64::from(self.size.udp_rate / 4))?;
        traffic.lasts(BEFORE);
        let attacking = attack.start(&self.lab, &self.size)?;
        std::thread::sleep(TAKES_HOLD);
        let fresh = self.fresh_names()?;
        // The attack continues until B has its last answer.
        let report = traffic.finish()?;
        row.strikes = attacking.finish();
        let total = report.total();
        row.b_sent = total.sent;
        row.b_lost = total.lost;
        row.b_wrong = total.wrong;
        row.b_p50_ms = total.percentile_ms(50);
        row.b_p99_ms = total.percentile_ms(99);
        row.b_p99_ms_by_transport =
            [&report.udp, &report.tcp].map(|counts| counts.percentile_ms(99));
        row.b_fresh = fresh.asked;
        row.b_not_open = fresh.not_open;
        row.b_late = fresh.late;
        row.samples = total.samples;
        row.samples.extend(fresh.samples);
        // The server sends first. Its packet passes only because of the connection's entry.
        let mut echo = [0; 5];
        let spoken = server
            .write_all(b"alive")
            .and_then(|()| stream.read_exact(&mut echo));
        row.b_stream_alive = spoken.is_ok() && &echo == b"alive";
        self.sdp.check_alive()?;
        self.agent.check_alive()?;
        let peak_mb = |pid| Ok::<_, anyhow::Error>(peak_resident(pid)?.div_ceil(1 << 20));
        row.rss_mb = [peak_mb(self.sdp.id())?, peak_mb(self.agent.id())?];
        ensure!(
            attack == Attack::None || row.strikes > 0,
            "{}: the attacker did nothing",
            row.attack
        );
        ensure!(row.b_fresh > 0, "{}: B queried no fresh name", row.attack);
        Ok(row)
    }

    /// Queries fresh names and connects to each at once, until the attack ends.
    fn fresh_names(&self) -> Result<Fresh> {
        let fresh = Arc::new(Mutex::new(Fresh::default()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| -> Result<()> {
            let (fresh, stop) = (&fresh, &stop);
            let prober = scope.spawn(move || {
                let pause = Duration::from_secs(1) / self.size.fresh_rate.max(1);
                while !stop.load(Ordering::Relaxed) {
                    let number = self.next_name();
                    let outcome = self.fresh_name(number);
                    let mut fresh = fresh.lock();
                    fresh.asked += 1;
                    match outcome {
                        Ok(took) if took < MAX_DELAY => {}
                        Ok(_) => fresh.late += 1,
                        Err(error) => {
                            fresh.not_open += 1;
                            if fresh.samples.len() < SAMPLES {
                                fresh.samples.push(format!("{error:#}"));
                            }
                        }
                    }
                    drop(fresh);
                    std::thread::sleep(pause);
                }
            });
            std::thread::sleep(self.size.lasts);
            stop.store(true, Ordering::Relaxed);
            ensure!(prober.join().is_ok(), "the prober panicked");
            Ok(())
        })?;
        let fresh = std::mem::take(&mut *fresh.lock());
        Ok(fresh)
    }

    /// Queries a name and connects to its address. Returns how long the answer took.
    fn fresh_name(&self, number: u32) -> Result<Duration> {
        let name = zone::name(number);
        let reply = self.lab.b.ask(&Query::a(&name, SERVER4))?;
        let took = reply.took;
        reply.expect(zone::v4(number).into())?;
        let to = at(zone::v4(number).into(), 80);
        let connected = self.lab.b.connect(to, FIRST_SYN);
        connected.with_context(|| format!("{name} was answered after {took:?}"))?;
        Ok(took)
    }

    pub(super) fn next_name(&self) -> u32 {
        self.fresh.fetch_add(1, Ordering::Relaxed)
    }
}
