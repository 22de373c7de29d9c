//! Settings from the directory of `--config-dir`, which may be a ConfigMap of Cilium.

use std::path::{Path, PathBuf};

use daemon::{
    config_dir::Entry,
    flags,
    settings_file::{self, SettingsError},
};

/// Keys of Cilium that have no effect here: for example, answers pass unchanged, and this proxy has
/// no locks by name and no compiled expressions of rules.
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
/// Keys of Cilium, each with our name of the setting.
const RENAMED: &[(&str, &str)] = &[
    ("sdp-prometheus-serve-addr", "metrics-address"),
    // A chart from before the first release has this key.
    ("tofqdns-server-port", "standalone-dns-proxy-server-port"),
    ("debug", "log-level"),
];

/// Why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Cilium's switch for this proxy is off.
    #[error("{path} is false: this proxy is switched off (set it to true, or do not run the proxy)", path = .0.display())]
    SwitchedOff(PathBuf),
}

/// The settings in the directory of `--config-dir`, a ConfigMap written for Go programs.
pub(super) fn directory(dir: &Path) -> Result<Vec<Entry>, FileError> {
    let mut found = Vec::new();
    for mut entry in settings_file::directory(dir)? {
        let key = entry.key.as_str();
        if ACCEPTED.contains(&key) {
            continue;
        }
        if SWITCHES.contains(&key) {
            if flags::is_true(&entry).map_err(SettingsError::from)? {
                continue;
            }
            return Err(FileError::SwitchedOff(entry.path));
        }
        if key == "debug" {
            if !flags::is_true(&entry).map_err(SettingsError::from)? {
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
    use std::{ffi::OsString, fs, time::Duration};

    use super::*;
    use dns_policy::reject_code::RejectCode;

    use daemon::command_line::metrics_address::MetricsAddress;

    use crate::config::{AgentAddress, Config, ConfigError};

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

    fn config_map(keys: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (key, value) in keys {
            fs::write(dir.path().join(key), value).unwrap();
        }
        dir
    }

    /// Settings of Cilium's chart, and others that clusters add to them.
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
        assert_eq!(flags.log.log_level, "info");
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
        let note = format!(
            "--config-dir {}: keys of other programs, ignored: {}",
            dir.path().display(),
            theirs.join(", ")
        );
        assert_eq!(found.notes[0], note);
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
