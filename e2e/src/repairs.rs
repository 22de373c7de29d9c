//! Checks that the agent's reconciler finds nothing to repair. The repairs are read before each
//! agent of a lab ends, so that every scenario checks them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use parking_lot::Mutex;

use crate::http;
use crate::netns::Netns;
use crate::wait::eventually;

/// Longest wait for the metrics of a running agent.
const ANSWERS: Duration = Duration::from_secs(10);
/// Longest wait for the end of a reconciler run. With the lab's interval, a run takes a fraction of
/// this time.
const RUN: Duration = Duration::from_secs(5);

/// Repairs that agents made although no other program wrote to the maps.
#[derive(Clone, Debug, Default)]
pub struct Repairs {
    found: Arc<Mutex<Vec<String>>>,
    expected: Arc<AtomicBool>,
}

impl Repairs {
    /// After this call, repairs are expected, because the test itself writes the maps.
    pub fn expect(&self) {
        self.expected.store(true, Ordering::Relaxed);
    }

    /// Fails if an agent made a repair that should not have been necessary.
    pub fn check(&self) -> Result<()> {
        let found = self.found.lock();
        ensure!(found.is_empty(), "the reconciler: {}", found.join("; "));
        Ok(())
    }
}

/// Reads the repairs of an agent that is about to end.
#[derive(Debug)]
pub struct RepairCheck {
    node: Netns,
    port: u16,
    repairs: Repairs,
}

impl RepairCheck {
    /// Checks by the metrics of an agent on `node`.
    pub fn new(node: &Netns, port: u16, repairs: &Repairs) -> Self {
        Self {
            node: Netns::existing(node.name()),
            port,
            repairs: repairs.clone(),
        }
    }

    /// Reads the findings so far of a running agent.
    pub fn now(self) {
        if let Some(page) = self.answer() {
            self.note(&page);
        }
    }

    /// Reads the findings after one more complete run.
    pub fn whole(self) {
        let Some(first) = self.answer() else {
            return;
        };
        // The current run may already be past an entry that is wrong now.
        let wanted = passes(&first) + 2.0;
        let mut page = first;
        let run = eventually("another whole run", RUN, || {
            let Some(next) = self.answer() else {
                return Ok(());
            };
            page = next;
            ensure!(
                passes(&page) >= wanted,
                "{} of {wanted} runs",
                passes(&page)
            );
            Ok(())
        });
        if let Err(late) = run {
            self.add(format!("{late:#}"));
        }
        self.note(&page);
    }

    fn note(&self, page: &str) {
        let differences = sum(page, "holdfast_reconcile_differences_total");
        let failures = sum(page, "holdfast_reconcile_failures_total");
        if differences + failures > 0.0 {
            let lines = page.lines().filter(|l| l.starts_with("holdfast_reconcile"));
            self.add(lines.collect::<Vec<_>>().join(", "));
        }
    }

    fn add(&self, text: String) {
        if !self.repairs.expected.load(Ordering::Relaxed) {
            self.repairs.found.lock().push(text);
        }
    }

    /// The metrics page. A missing page is also a finding, because the repairs are then unknown.
    fn answer(&self) -> Option<String> {
        let page = eventually("its metrics", ANSWERS, || self.page());
        if let Err(error) = &page {
            self.add(format!("the agent runs and shows no metrics: {error:#}"));
        }
        page.ok()
    }

    fn page(&self) -> Result<String> {
        let (code, body) = http::get(&self.node, self.port, "/metrics")?;
        ensure!(code == 200, "{code}: {body}");
        Ok(body)
    }
}

fn passes(page: &str) -> f64 {
    sum(page, "holdfast_reconcile_passes_total")
}

fn sum(page: &str, name: &str) -> f64 {
    let lines = page.lines().filter(|line| line.starts_with(name));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}
