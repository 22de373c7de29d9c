//! Settings from `--config` (one YAML file) and `--config-dir` (one file per key).
//!
//! Both are turned into the arguments they stand for, so that a value is
//! written and checked the same way wherever it comes from.

use std::{
    ffi::OsString,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use clap::{CommandFactory, Parser};
use daemon::config_dir::{self, DirError, Entry, go_bool};
use limits::yaml;
use serde_json::Value;

use super::args::{Cli, Settings};

/// Bytes of a settings file.
const MAX_FILE: usize = 1 << 20;

/// Keys of Cilium that need nothing done here: answers pass as they are, nothing of this
/// proxy is locked by name or compiled per rule, sockets are not lingered on.
const ACCEPTED: &[&str] = &[
    "tofqdns-enable-dns-compression",
    "dns-max-ips-per-restored-rule",
    "dnsproxy-lock-count",
    "dnsproxy-lock-timeout",
    "dnsproxy-socket-linger-timeout",
    "dnsproxy-insecure-skip-transparent-mode-check",
    "fqdn-regex-compile-lru-size",
    "metrics-sampling-interval",
    "shell-sock-path",
];
/// Keys without which Cilium's own proxy does not start.
const SWITCHES: &[&str] = &["enable-standalone-dns-proxy", "enable-l7-proxy"];
/// Keys that Cilium calls otherwise.
const RENAMED: &[(&str, &str)] = &[
    ("sdp-prometheus-serve-addr", "metrics-address"),
    // Of a chart before the first release.
    ("tofqdns-server-port", "standalone-dns-proxy-server-port"),
];

/// Why a configuration file was not taken.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{flag} {path}: {source}", path = .path.display())]
    Read {
        /// Flag that named it: `--config` or `--config-dir`.
        flag: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// It is not a YAML mapping of settings to plain values.
    #[error("--config {path}: {reason}", path = .path.display())]
    Syntax { path: PathBuf, reason: String },
    /// A key is no setting.
    #[error("--config {path}: unknown key {key:?} (holdfast-sdp --help lists them all)", path = .path.display())]
    UnknownKey { path: PathBuf, key: String },
    /// A value is not valid for its key.
    #[error("{path}, key {key:?}: {reason}", path = .path.display())]
    Value {
        path: PathBuf,
        key: String,
        reason: String,
    },
    /// Cilium's switch for this proxy is off.
    #[error("{path} is false: this proxy is switched off (set it to true, or do not run the proxy)", path = .0.display())]
    SwitchedOff(PathBuf),
}

/// Settings of a file or directory, with what was odd about them.
#[derive(Debug, Default)]
pub(crate) struct FromFile {
    pub settings: Settings,
    /// Keys that are not settings of this program. A ConfigMap may have keys of other programs.
    pub ignored: Vec<String>,
}

/// Reads the file of `--config`. An unknown key is an error.
pub(crate) fn read_yaml(path: &Path) -> Result<FromFile, FileError> {
    let mut text = String::new();
    // One byte more than allowed shows that a file is too long. A device has no end.
    let most = u64::try_from(MAX_FILE + 1).unwrap_or(u64::MAX);
    let read = fs::File::open(path).and_then(|file| file.take(most).read_to_string(&mut text));
    read.map_err(|source| FileError::Read {
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
    if text.len() > MAX_FILE {
        return Err(syntax(format!(
            "has more than {MAX_FILE} bytes; is it a file of settings?"
        )));
    }
    let documents = yaml::documents(text);
    let document = match documents.as_slice() {
        [] => return Ok(FromFile::default()),
        [one] => one.value(),
        [_, _, ..] => {
            return Err(syntax(
                "has several documents; write all settings in one, without a line `---` between \
                 them"
                    .into(),
            ));
        }
    };
    let mapping = match document.map_err(|e| syntax(format!("{e}; {}", e.remedy())))? {
        Value::Null => return Ok(FromFile::default()),
        Value::Object(mapping) => mapping,
        _ => return Err(syntax("expected a mapping of settings to values".into())),
    };
    let mut settings = Settings::default();
    for (key, value) in mapping {
        if !is_setting(&key) {
            return Err(FileError::UnknownKey {
                path: path.to_owned(),
                key,
            });
        }
        let text = match &value {
            Value::Array(items) => items
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
        ignored: Vec::new(),
    })
}

/// Reads the directory of `--config-dir`. Unknown keys are ignored and returned.
pub(crate) fn read_dir(dir: &Path) -> Result<FromFile, FileError> {
    let entries = config_dir::read(dir).map_err(|DirError { path, source }| FileError::Read {
        flag: "--config-dir",
        path,
        source,
    })?;
    let mut found = FromFile::default();
    for Entry { path, key, text } in entries {
        take_key(&mut found, &path, &key, &text)?;
    }
    Ok(found)
}

/// `key` of a ConfigMap, written for Go programs.
fn take_key(found: &mut FromFile, path: &Path, key: &str, text: &str) -> Result<(), FileError> {
    if ACCEPTED.contains(&key) {
        return Ok(());
    }
    if SWITCHES.contains(&key) {
        return match is_true(path, key, text)? {
            true => Ok(()),
            false => Err(FileError::SwitchedOff(path.to_owned())),
        };
    }
    let renamed = RENAMED.iter().find(|(theirs, _)| *theirs == key);
    let (key, text) = match key {
        "debug" if is_true(path, key, text)? => ("log-level", "debug"),
        "debug" => return Ok(()),
        key => (renamed.map_or(key, |(_, ours)| ours), text),
    };
    if !is_setting(key) {
        found.ignored.push(key.to_owned());
        return Ok(());
    }
    let text = match go_bool(text) {
        Some(value) if takes_bool(key) => value.to_string(),
        _ => text.to_owned(),
    };
    let one = one_setting(path, key, &text)?;
    found.settings = std::mem::take(&mut found.settings).or(one);
    Ok(())
}

fn is_true(path: &Path, key: &str, text: &str) -> Result<bool, FileError> {
    go_bool(text).ok_or_else(|| FileError::Value {
        path: path.to_owned(),
        key: key.to_owned(),
        reason: format!("{text:?} is neither true nor false"),
    })
}

fn takes_bool(key: &str) -> bool {
    Cli::command()
        .get_arguments()
        .find(|arg| arg.get_long() == Some(key))
        .is_some_and(|arg| {
            let values = arg.get_possible_values();
            values.iter().any(|value| value.get_name() == "true")
        })
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
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
    use std::time::Duration;

    use super::*;
    use dns_policy::reject_code::RejectCode;

    use crate::config::args::MetricsAddress;

    #[test]
    fn yaml_accepts_plain_values_and_lists() {
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
    fn yaml_is_read_within_limits() {
        let error = |text: &str| {
            let error = parse_yaml(Path::new("c.yaml"), text).unwrap_err();
            error.to_string()
        };
        let deep = error(&"[".repeat(200_000));
        assert!(deep.contains("levels deep"), "{deep}");
        let aliases = format!(
            "name: &a {}\nagent-address: [{}]\n",
            "x".repeat(400_000),
            "*a, ".repeat(10)
        );
        let aliases = error(&aliases);
        assert!(aliases.contains("aliases"), "{aliases}");
        let long = error(&"#".repeat(MAX_FILE + 1));
        assert!(long.contains("bytes"), "{long}");
        let several = error("name: a\n---\nname: b\n");
        assert!(several.contains("several documents"), "{several}");
        let twice = error("name: a\nname: b\n");
        assert!(twice.contains("duplicate"), "{twice}");
        // An endless file is not read to its end.
        let endless = read_yaml(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(endless.contains("/dev/zero"), "{endless}");
        for empty in ["", "# nothing\n", "---\n"] {
            assert!(parse_yaml(Path::new("c.yaml"), empty).is_ok(), "{empty:?}");
        }
    }

    fn config_map(keys: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (key, value) in keys {
            fs::write(dir.path().join(key), value).unwrap();
        }
        dir
    }

    /// Settings of the chart, and others that clusters add to it.
    const CILIUMS: &[(&str, &str)] = &[
        ("debug", "False"),
        ("enable-ipv4", "true"),
        ("enable-ipv6", "0"),
        ("enable-l7-proxy", "true"),
        ("enable-standalone-dns-proxy", "True"),
        ("standalone-dns-proxy-server-port", "10195"),
        ("tofqdns-proxy-port", "10194\n"),
        ("tofqdns-enable-dns-compression", "true"),
        ("tofqdns-dns-reject-response-code", "nameerror"),
        ("tofqdns-proxy-response-max-delay", "0.25s"),
        ("tofqdns-min-ttl", "3600"),
        ("dnsproxy-concurrency-limit", "1000"),
        ("dnsproxy-concurrency-processing-grace-period", "0s"),
        ("dnsproxy-lock-count", "131"),
        ("dnsproxy-lock-timeout", "500ms"),
        ("dnsproxy-socket-linger-timeout", "10"),
        ("dns-max-ips-per-restored-rule", "1000"),
        ("fqdn-regex-compile-lru-size", "1024"),
        ("metrics-sampling-interval", "5m"),
        ("sdp-prometheus-serve-addr", ":9971"),
        ("cluster-name", "default"),
        ("cluster-id", "0"),
        ("bpf-policy-map-max", "16384"),
        ("custom-cni-conf", ""),
        ("identity-allocation-mode", "crd"),
        ("kube-proxy-replacement", "true"),
    ];

    #[test]
    fn a_cilium_config_map_is_accepted_unchanged() {
        let dir = config_map(CILIUMS);
        fs::create_dir(dir.path().join("..data")).unwrap();
        let found = read_dir(dir.path()).unwrap();
        let settings = found.settings;
        assert_eq!(settings.standalone_dns_proxy_server_port, Some(10195));
        assert_eq!(settings.tofqdns_proxy_port, Some(10194));
        assert_eq!(settings.enable_ipv4, Some(true));
        assert_eq!(settings.enable_ipv6, Some(false));
        assert_eq!(settings.log_level, None);
        assert_eq!(
            settings.metrics_address,
            Some(MetricsAddress::AnyHost(9971))
        );
        assert_eq!(
            settings.tofqdns_dns_reject_response_code,
            Some(RejectCode::NameError)
        );
        let delay = settings.tofqdns_proxy_response_max_delay.unwrap();
        assert_eq!(delay, Duration::from_millis(250));
        assert_eq!(settings.tofqdns_min_ttl.unwrap().as_secs(), 3600);
        assert_eq!(settings.dnsproxy_concurrency_limit, Some(1000));
        let theirs = [
            "bpf-policy-map-max",
            "cluster-id",
            "cluster-name",
            "identity-allocation-mode",
            "kube-proxy-replacement",
        ];
        assert_eq!(found.ignored, theirs);
    }

    #[test]
    fn a_bad_value_is_named_by_its_file() {
        for (key, value) in [
            ("tofqdns-proxy-port", "many"),
            ("tofqdns-proxy-port", "0"),
            ("enable-ipv6", "yes"),
            ("enable-l7-proxy", "on"),
            ("debug", "2"),
            ("tofqdns-dns-reject-response-code", "drop"),
            ("sdp-prometheus-serve-addr", "9961"),
        ] {
            let dir = config_map(&[(key, value)]);
            let error = read_dir(dir.path()).unwrap_err().to_string();
            let file = dir.path().join(key);
            assert!(error.contains(&file.display().to_string()), "{error}");
            assert!(error.contains(value), "{error}");
        }
    }

    #[test]
    fn either_switch_turns_it_off() {
        for key in SWITCHES {
            let dir = config_map(&[(key, "false")]);
            let off = read_dir(dir.path());
            assert!(matches!(off, Err(FileError::SwitchedOff(_))), "{off:?}");
        }
    }
}
