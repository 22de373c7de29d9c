//! One line and one JSON object per figure.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// One measured value, with its unit, counts and promise.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: String,
    pub(crate) value: f64,
    pub(crate) identities: Option<u64>,
    pub(crate) ipcache_writes: Option<u64>,
    pub(crate) policy_map_writes: Option<u64>,
    /// Value of another implementation in the same unit on this kind of machine.
    pub(crate) peer: Option<f64>,
    /// The value in units of the calibration of the same run.
    #[serde(default)]
    pub(crate) calibrated: Option<f64>,
    /// The promise, and whether it holds.
    pub(crate) promise: Option<(String, bool)>,
}

impl Figure {
    pub(crate) fn new(name: &str, unit: &str, value: f64) -> Self {
        Self {
            name: name.to_owned(),
            unit: unit.to_owned(),
            value,
            ..Self::default()
        }
    }

    /// Adds the counts of identities and of map writes during the measurement.
    pub(crate) fn counted(mut self, identities: u64, ipcache: u64, policy: u64) -> Self {
        self.identities = Some(identities);
        self.ipcache_writes = Some(ipcache);
        self.policy_map_writes = Some(policy);
        self
    }

    pub(crate) fn promised(mut self, promise: String, holds: bool) -> Self {
        self.promise = Some((promise, holds));
        self
    }

    fn line(&self) -> String {
        let count = |count: Option<u64>| count.map_or(String::new(), |count| count.to_string());
        let mut line = format!(
            "{:<34} {:>12} {:<14} {:>10} {:>10} {:>10}",
            self.name,
            rounded(self.value),
            self.unit,
            count(self.identities),
            count(self.ipcache_writes),
            count(self.policy_map_writes),
        );
        if let Some(ratio) = self.calibrated {
            line += &format!("  {} calibration units", rounded(ratio));
        }
        if let Some(peer) = self.peer {
            line += &format!("  1/{:.0} of Cilium's name manager", peer / self.value);
        }
        if let Some((promise, holds)) = &self.promise {
            line += &format!("  {}: {promise}", if *holds { "holds" } else { "BROKEN" });
        }
        line.trim_end().to_owned()
    }

    fn json(&self) -> Value {
        let mut value = json!({"name": self.name, "unit": self.unit, "value": self.value});
        if let Some(fields) = value.as_object_mut() {
            let counts = [
                ("identities", self.identities),
                ("ipcache_writes", self.ipcache_writes),
                ("policy_map_writes", self.policy_map_writes),
            ];
            for (name, count) in counts {
                fields.extend(count.map(|count| (name.to_owned(), count.into())));
            }
            let ratio = self.peer.map(|peer| self.value / peer);
            fields.extend(ratio.map(|ratio| ("ratio_to_cilium".to_owned(), ratio.into())));
            let calibrated = self.calibrated.map(f64::into);
            fields.extend(calibrated.map(|ratio| ("ratio_to_calibration".to_owned(), ratio)));
            if let Some((promise, holds)) = &self.promise {
                fields.insert("promise".to_owned(), promise.as_str().into());
                fields.insert("holds".to_owned(), (*holds).into());
            }
        }
        value
    }
}

/// Formats a value with three significant digits.
fn rounded(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// All figures of one run.
#[derive(Debug, Default)]
pub(crate) struct Report(Vec<Figure>);

impl Report {
    /// Adds figures, and prints them.
    pub(crate) fn add(&mut self, figures: Vec<Figure>) {
        if self.0.is_empty() {
            println!(
                "{:<34} {:>12} {:<14} {:>10} {:>10} {:>10}",
                "workload", "value", "unit", "identities", "ipcache", "policy"
            );
        }
        for figure in figures {
            println!("{}", figure.line());
            self.0.push(figure);
        }
    }

    /// Names of figures whose promise is broken.
    pub(crate) fn broken(&self) -> Vec<&str> {
        let broken = self
            .0
            .iter()
            .filter(|figure| figure.promise.as_ref().is_some_and(|(_, holds)| !holds));
        broken.map(|figure| figure.name.as_str()).collect()
    }

    /// Writes the figures as JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let entries: Vec<Value> = self.0.iter().map(Figure::json).collect();
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let text = serde_json::to_string_pretty(&json!({"workloads": entries}))?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }
}
