//! Settings from `--config` (one YAML file) and `--config-dir` (one file per key).

use std::{
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use daemon::{
    config_dir::{self, DirError, Entry},
    flags::{self, ValueError},
};
use limits::yaml;
use serde_json::Value;

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
    ("debug", "log-level"),
];

/// Why a configuration file was not taken.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("--config {path}: {source}", path = .path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The directory cannot be read.
    #[error("--config-dir {0}")]
    Dir(#[from] DirError),
    /// It is not a YAML mapping of settings to plain values.
    #[error("--config {path}: {reason}", path = .path.display())]
    Syntax { path: PathBuf, reason: String },
    /// A key is no setting.
    #[error("--config {path}: unknown key {key:?} (holdfast-sdp --help lists them all)", path = .0.path.display(), key = .0.key)]
    UnknownKey(Entry),
    #[error(transparent)]
    Value(#[from] ValueError),
    /// Cilium's switch for this proxy is off.
    #[error("{path} is false: this proxy is switched off (set it to true, or do not run the proxy)", path = .0.display())]
    SwitchedOff(PathBuf),
}

/// The settings in the file of `--config`.
pub(super) fn yaml(path: &Path) -> Result<Vec<Entry>, FileError> {
    let mut text = String::new();
    // One byte more than allowed shows that a file is too long. A device has no end.
    let most = u64::try_from(MAX_FILE + 1).unwrap_or(u64::MAX);
    let read = fs::File::open(path).and_then(|file| file.take(most).read_to_string(&mut text));
    read.map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    parse_yaml(path, &text)
}

fn parse_yaml(path: &Path, text: &str) -> Result<Vec<Entry>, FileError> {
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
        [] => return Ok(Vec::new()),
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
        Value::Null => return Ok(Vec::new()),
        Value::Object(mapping) => mapping,
        _ => return Err(syntax("expected a mapping of settings to values".into())),
    };
    let entry = |(key, value): (String, Value)| {
        let text = plain(&value);
        let mut entry = Entry {
            path: path.to_owned(),
            key,
            text: String::new(),
        };
        let reason = "expected a plain value or a list of plain values";
        entry.text = text.ok_or_else(|| ValueError::new(&entry, reason))?;
        Ok(entry)
    };
    mapping.into_iter().map(entry).collect()
}

/// A value as it stands on the command line.
fn plain(value: &Value) -> Option<String> {
    match value {
        Value::Array(items) => {
            let items: Option<Vec<_>> = items.iter().map(scalar).collect();
            Some(items?.join(","))
        }
        one => scalar(one),
    }
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        _ => None,
    }
}

/// The settings in the directory of `--config-dir`, a ConfigMap written for Go programs.
pub(super) fn directory(dir: &Path) -> Result<Vec<Entry>, FileError> {
    let mut found = Vec::new();
    for mut entry in config_dir::read(dir)? {
        let key = entry.key.as_str();
        if ACCEPTED.contains(&key) {
            continue;
        }
        if SWITCHES.contains(&key) {
            if flags::is_true(&entry)? {
                continue;
            }
            return Err(FileError::SwitchedOff(entry.path));
        }
        if key == "debug" {
            if !flags::is_true(&entry)? {
                continue;
            }
            entry.text = "debug".to_owned();
        }
        if let Some((_, ours)) = RENAMED.iter().find(|(theirs, _)| *theirs == key) {
            entry.key = (*ours).to_owned();
        }
        found.push(entry);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsString, time::Duration};

    use super::*;
    use dns_policy::reject_code::RejectCode;

    use crate::config::{AgentAddress, Config, ConfigError, MetricsAddress};

    fn resolve(flag: &str, path: &Path) -> Result<Config, ConfigError> {
        let flag = format!("--{flag}={}", path.display());
        Config::resolve([OsString::from("holdfast-sdp"), flag.into()])
    }

    fn resolve_yaml(text: &str) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        fs::write(&path, text).unwrap();
        resolve("config", &path)
    }

    #[test]
    fn yaml_accepts_plain_values_and_lists() {
        let text = "tofqdns-proxy-port: 5353\nenable-ipv6: false\nname: n1\nagent-address:\n  - unix:///a\n  - tcp://h:1\n";
        let found = resolve_yaml(text).unwrap();
        assert_eq!(found.flags.tofqdns_proxy_port, 5353);
        assert!(!found.flags.enable_ipv6);
        assert_eq!(found.agent.len(), 2);
    }

    #[test]
    fn yaml_names_what_is_wrong() {
        let error = |text| resolve_yaml(text).unwrap_err().to_string();
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
        let endless = yaml(Path::new("/dev/zero")).unwrap_err().to_string();
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
        let found = resolve("config-dir", dir.path()).unwrap();
        assert_eq!(
            found.agent[1],
            AgentAddress::Tcp("127.0.0.1:10195".to_owned())
        );
        assert_eq!(found.reject, RejectCode::NameError);
        let flags = &found.flags;
        assert_eq!(flags.tofqdns_proxy_port, 10194);
        assert!(flags.enable_ipv4 && !flags.enable_ipv6);
        assert_eq!(flags.log_level, "info");
        assert_eq!(flags.metrics_address, MetricsAddress::AnyHost(9971));
        let delay = flags.tofqdns_proxy_response_max_delay;
        assert_eq!(delay, Duration::from_millis(250));
        assert_eq!(flags.tofqdns_min_ttl, 3600);
        assert_eq!(flags.dnsproxy_concurrency_limit, 1000);
        let theirs = [
            "bpf-policy-map-max",
            "cluster-id",
            "cluster-name",
            "identity-allocation-mode",
            "kube-proxy-replacement",
        ];
        let ignored = format!("ignored: {}", theirs.join(", "));
        assert!(found.notes[0].ends_with(&ignored), "{:?}", found.notes);
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
            let error = resolve("config-dir", dir.path()).unwrap_err().to_string();
            let file = dir.path().join(key);
            assert!(error.contains(&file.display().to_string()), "{error}");
            assert!(error.contains(value), "{error}");
        }
    }

    #[test]
    fn either_switch_turns_it_off() {
        for key in SWITCHES {
            let dir = config_map(&[(key, "false")]);
            let off = directory(dir.path());
            assert!(matches!(off, Err(FileError::SwitchedOff(_))), "{off:?}");
        }
    }
}
