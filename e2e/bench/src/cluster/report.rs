//! One line and one JSON object for each figure.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// All figures so far, and the names of figures whose promise is broken.
#[derive(Debug, Default)]
pub(crate) struct Report {
    figures: Vec<Value>,
    broken: Vec<String>,
}

impl Report {
    /// Prints a figure and stores it.
    pub(crate) fn add(&mut self, name: &str, unit: &str, value: f64) {
        println!("{name:<28} {value:>12.2} {unit}");
        self.figures
            .push(json!({"name": name, "unit": unit, "value": value}));
    }

    /// Adds a figure with a promise.
    pub(crate) fn promise(
        &mut self,
        name: &str,
        unit: &str,
        value: f64,
        promise: &str,
        holds: bool,
    ) {
        let word = if holds { "holds" } else { "BROKEN" };
        println!("{name:<28} {value:>12.2} {unit}  {word}: {promise}");
        self.figures.push(json!({
            "name": name, "unit": unit, "value": value, "promise": promise, "holds": holds,
        }));
        if !holds {
            self.broken.push(name.to_owned());
        }
    }

    /// Names of figures whose promise is broken.
    pub(crate) fn broken(&self) -> &[String] {
        &self.broken
    }

    /// Writes the figures as JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let text = serde_json::to_string_pretty(&json!({"figures": self.figures}))?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }
}
