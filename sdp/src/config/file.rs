//! Settings from `--config` (one YAML file) and `--config-dir` (one file per key).
//!
//! Both are turned into the arguments they stand for, so that a value is
//! written and checked the same way wherever it comes from.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use clap::{CommandFactory, Parser};
use serde_yaml_ng::Value;

use super::args::{Cli, Settings};

/// Keys of Cilium's `standalone-dns-proxy-config` that need nothing done here.
const ACCEPTED: &[&str] = &[
    "enable-l7-proxy",
    "tofqdns-enable-dns-compression",
    "dns-max-ips-per-restored-rule",
    "dnsproxy-concurrency-processing-grace-period",
    "metrics-sampling-interval",
];

/// Why a configuration file was not taken.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{flag} {path}: {source}", path = .path.display())]
    Read {
        /// Flag that named it.
        flag: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not a YAML mapping of settings to plain values.
    #[error("--config {path}: {reason}", path = .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A key is no setting.
    #[error("--config {path}: unknown key {key:?} (holdfast-sdp --help lists them all)", path = .path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A value is not valid for its key.
    #[error("{path}, key {key:?}: {reason}", path = .path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// Cilium's switch for this proxy is off.
    #[error("{path} says false: this proxy is switched off (set enable-standalone-dns-proxy to true, or do not run it)", path = .0.display())]
    SwitchedOff(PathBuf),
}

/// Settings of a file or directory, with what was odd about them.
#[derive(Debug, Default)]
pub struct FromFile {
    /// The settings.
    pub settings: Settings,
    /// For the log, once there is one.
    pub warnings: Vec<String>,
}

/// Reads `--config`.
pub fn read_yaml(path: &Path) -> Result<FromFile, FileError> {
    let text = fs::read_to_string(path).map_err(|source| FileError::Read {
        flag: "--config",
        path: path.to_owned(),
        source,
    })?;
    parse_yaml(path, &text)
}

fn parse_yaml(path: &Path, text: &str) -> Result<FromFile, FileError> {
    let syntax = |reason: String| FileError::Syntax {
        path: path.to_owned(),
        reason,
    };
    let document: Value = serde_yaml_ng::from_str(text).map_err(|e| syntax(e.to_string()))?;
    let mapping = match document {
        Value::Null => return Ok(FromFile::default()),
        Value::Mapping(mapping) => mapping,
        _ => return Err(syntax("expected a mapping of settings to values".into())),
    };
    let mut settings = Settings::default();
    for (key, value) in mapping {
        let Value::String(key) = key else {
            return Err(syntax(
                "keys are names of settings, without the dashes in front".into(),
            ));
        };
        if !is_setting(&key) {
            return Err(FileError::UnknownKey {
                path: path.to_owned(),
                key,
            });
        }
        let text = match &value {
            Value::Sequence(items) => items
                .iter()
                .map(scalar)
                .collect::<Option<Vec<_>>>()
                .map(|items| items.join(",")),
            one => scalar(one),
        };
        let text = text.ok_or_else(|| FileError::Value {
            path: path.to_owned(),
            key: key.clone(),
            reason: "expected a plain value or a list of plain values".into(),
        })?;
        settings = settings.or(one_setting(path, &key, &text)?);
    }
    Ok(FromFile {
        settings,
        warnings: Vec::new(),
    })
}

/// Reads `--config-dir`.
pub fn read_dir(dir: &Path) -> Result<FromFile, FileError> {
    let failed = |path: &Path, source| FileError::Read {
        flag: "--config-dir",
        path: path.to_owned(),
        source,
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| failed(dir, e))? {
        paths.push(entry.map_err(|e| failed(dir, e))?.path());
    }
    paths.sort();
    let mut found = FromFile::default();
    for path in paths {
        let Some(key) = path.file_name().and_then(|n| n.to_str()) else {
            continue;
        };
        // A mounted ConfigMap keeps its data in `..data` and a dated directory.
        if key.starts_with("..") || path.is_dir() {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|e| failed(&path, e))?;
        take_key(&mut found, &path, key, text.trim())?;
    }
    Ok(found)
}

fn take_key(found: &mut FromFile, path: &Path, key: &str, text: &str) -> Result<(), FileError> {
    let (key, text) = match key {
        "enable-standalone-dns-proxy" if text == "false" => {
            return Err(FileError::SwitchedOff(path.to_owned()));
        }
        "enable-standalone-dns-proxy" => return Ok(()),
        "debug" if text == "true" => ("log-level", "debug"),
        "debug" => return Ok(()),
        "sdp-prometheus-serve-addr" => ("metrics-address", text),
        key if ACCEPTED.contains(&key) => return Ok(()),
        key => (key, text),
    };
    if !is_setting(key) {
        found
            .warnings
            .push(format!("{}: unknown key, ignored", path.display()));
        return Ok(());
    }
    let one = one_setting(path, key, text)?;
    found.settings = std::mem::take(&mut found.settings).or(one);
    Ok(())
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => serde_yaml_ng::to_string(value)
            .ok()
            .map(|text| text.trim().to_owned()),
        _ => None,
    }
}

fn is_setting(key: &str) -> bool {
    !matches!(key, "config" | "config-dir" | "help" | "version")
        && Cli::command()
            .get_arguments()
            .any(|arg| arg.get_long() == Some(key))
}

fn one_setting(path: &Path, key: &str, text: &str) -> Result<Settings, FileError> {
    let argument = OsString::from(format!("--{key}={text}"));
    match Cli::try_parse_from([OsString::from("holdfast-sdp"), argument]) {
        Ok(cli) => Ok(cli.settings),
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            Err(FileError::Value {
                path: path.to_owned(),
                key: key.to_owned(),
                reason: first.strip_prefix("error: ").unwrap_or(first).to_owned(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yaml_takes_plain_values_and_lists() {
        let text = "tofqdns-proxy-port: 5353\nenable-ipv6: false\nname: n1\nagent-address:\n  - unix:///a\n  - tcp://h:1\n";
        let found = parse_yaml(Path::new("c.yaml"), text).unwrap().settings;
        assert_eq!(found.tofqdns_proxy_port, Some(5353));
        assert_eq!(found.enable_ipv6, Some(false));
        assert_eq!(found.agent_address.unwrap().len(), 2);
    }

    #[test]
    fn yaml_names_what_is_wrong() {
        let error = |text| {
            parse_yaml(Path::new("c.yaml"), text)
                .unwrap_err()
                .to_string()
        };
        let unknown = error("tofqdns-proxy-prot: 1\n");
        assert!(
            unknown.contains("tofqdns-proxy-prot") && unknown.contains("c.yaml"),
            "{unknown}"
        );
        let value = error("drain-timeout: soon\n");
        assert!(
            value.contains("drain-timeout") && value.contains("soon"),
            "{value}"
        );
        assert!(error("- a\n").contains("mapping"));
        assert!(error("config: x\n").contains("unknown key"));
    }

    #[test]
    fn a_cilium_config_map_is_taken_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        for (key, value) in [
            ("enable-l7-proxy", "true"),
            ("debug", "false"),
            ("enable-standalone-dns-proxy", "true"),
            ("enable-ipv4", "true"),
            ("enable-ipv6", "false"),
            ("standalone-dns-proxy-server-port", "10095"),
            ("tofqdns-proxy-port", "10094"),
            ("tofqdns-enable-dns-compression", "true"),
            ("never-heard-of", "1"),
        ] {
            fs::write(dir.path().join(key), value).unwrap();
        }
        fs::create_dir(dir.path().join("..data")).unwrap();
        let found = read_dir(dir.path()).unwrap();
        assert_eq!(found.settings.standalone_dns_proxy_server_port, Some(10095));
        assert_eq!(found.settings.enable_ipv6, Some(false));
        assert_eq!(found.warnings.len(), 1, "{:?}", found.warnings);
        assert!(found.warnings[0].contains("never-heard-of"));
        fs::write(dir.path().join("enable-standalone-dns-proxy"), "false").unwrap();
        assert!(matches!(
            read_dir(dir.path()),
            Err(FileError::SwitchedOff(_))
        ));
    }
}
