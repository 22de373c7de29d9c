//! Criterion's figures for parts of the core (`agent/core/benches/core.rs`).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::report::Figure;

#[derive(Deserialize)]
struct Benchmark {
    full_id: String,
}

#[derive(Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    /// Nanoseconds.
    point_estimate: f64,
}

/// The last run's medians below criterion's directory.
pub(super) fn figures(dir: &Path) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let entries = fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))?;
    for entry in entries {
        let new = entry?.path().join("new");
        if new.is_dir() {
            let benchmark: Benchmark = read(&new.join("benchmark.json"))?;
            let estimates: Estimates = read(&new.join("estimates.json"))?;
            let value = estimates.median.point_estimate;
            figures.push(Figure::new(&benchmark.full_id, "ns", value));
        }
    }
    ensure!(!figures.is_empty(), "{}: no figures", dir.display());
    figures.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(figures)
}

fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let text = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}
