//! Rules for the start: from the endpoints' files, if `cilium_lxc` confirms them.
//!
//! A file is used only if the map has one of its addresses with the same endpoint number, interface
//! and identity, and none of its addresses with different ones, because numbers are reused. A file
//! that cannot be read affects only its own endpoint.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    net::IpAddr,
    path::{Path, PathBuf},
    time::SystemTime,
};

use dns_policy::{rule::RulesOf, stored_rules::by_address::SkippedRows};
use shared_maps::{
    EndpointId, IdentityId,
    lxc::{FLAG_HOST, LxcValue},
};

use crate::{maps::instances::Instances, regular_file, rules_journal::Content};

pub mod file;

use file::{EndpointFile, FileError};

/// Name of each endpoint's file.
pub(crate) const FILE_NAME: &str = "ep_config.json";
/// Maximum bytes of a file that are read. Only a small part of them is used.
pub(crate) const LARGEST: u64 = 64 << 20;

/// The rules and endpoints on disk.
#[derive(Debug, Default)]
pub struct Restored {
    /// Rules of the endpoints whose files can be used.
    pub rules: Vec<RulesOf>,
    /// Files that were not used, and why.
    pub skipped: Vec<Skipped>,
    /// Times at which the usable files were written, including files without rules.
    pub written: BTreeMap<EndpointId, SystemTime>,
    /// Rows of the files that were passed over.
    pub rows: SkippedRows,
}

/// A file that was not used.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Skipped {
    pub path: PathBuf,
    pub reason: String,
    /// Whether the file is damaged. If it is not, its endpoint is gone.
    pub damaged: bool,
}

/// Why a file was not used.
#[derive(Debug, thiserror::Error)]
enum SkipReason {
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("{0}")]
    File(#[from] FileError),
    #[error("it belongs to endpoint {0}, not to the endpoint in its directory's name")]
    OtherDirectory(EndpointId),
    #[error("none of its addresses is in cilium_lxc: the endpoint was removed")]
    Gone,
    #[error(
        "cilium_lxc has {address} as endpoint {id}, interface {ifindex}, identity {identity}: the file belongs to an earlier endpoint"
    )]
    Disagrees {
        address: IpAddr,
        id: u16,
        ifindex: u32,
        identity: u32,
    },
}

/// Reads every endpoint's file below `<state_dir>/state`. `lxc` looks up an address in
/// `cilium_lxc`.
pub fn load(state_dir: &Path, lxc: impl Fn(IpAddr) -> Option<LxcValue>) -> Restored {
    let boot_id = shared_maps::user::boot_id().unwrap_or_default();
    let state = state_dir.join("state");
    let directories = match directories(&state) {
        Ok(directories) => directories,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Restored::default(),
        Err(error) => {
            let reason = SkipReason::Read(error).to_string();
            let skipped = Skipped {
                path: state,
                reason,
                damaged: true,
            };
            return Restored {
                skipped: vec![skipped],
                ..Restored::default()
            };
        }
    };
    let mut restored = Restored::default();
    for (id, candidates) in directories {
        // The finished directory comes first. Directories of an interrupted build are used only
        // without it.
        for directory in candidates {
            let path = directory.join(FILE_NAME);
            match read(&path, id, &boot_id, &lxc) {
                Ok((endpoint, written)) => {
                    restored.take(endpoint, written);
                    break;
                }
                Err(SkipReason::Read(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Err(reason) => restored.skipped.push(Skipped {
                    damaged: !matches!(reason, SkipReason::Gone | SkipReason::Disagrees { .. }),
                    reason: reason.to_string(),
                    path,
                }),
            }
        }
    }
    restored
}

/// Directories of the endpoints by number, each list in order of preference.
pub(crate) fn directories(state: &Path) -> io::Result<BTreeMap<u16, Vec<PathBuf>>> {
    let mut found: BTreeMap<u16, Vec<PathBuf>> = BTreeMap::new();
    for entry in fs::read_dir(state)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let (number, build) = name
            .split_once('_')
            .map_or((name, false), |(n, _)| (n, true));
        let Ok(id) = number.parse::<u16>() else {
            continue;
        };
        let candidates = found.entry(id).or_default();
        if build {
            candidates.push(path);
        } else {
            candidates.insert(0, path);
        }
    }
    Ok(found)
}

fn read(
    path: &Path,
    directory: u16,
    boot_id: &str,
    lxc: &impl Fn(IpAddr) -> Option<LxcValue>,
) -> Result<(EndpointFile, SystemTime), SkipReason> {
    let file = regular_file::open(path, fs::OpenOptions::new().read(true))?;
    let written = file.metadata()?.modified()?;
    let endpoint = file::parse(file.take(LARGEST), boot_id)?;
    if endpoint.id.0 != directory {
        return Err(SkipReason::OtherDirectory(endpoint.id));
    }
    // Cilium keeps a directory for the node itself, which has no addresses and sends no queries to
    // the proxy.
    if endpoint.identity == IdentityId::HOST && endpoint.addresses.is_empty() {
        let rules = None;
        return Ok((EndpointFile { rules, ..endpoint }, written));
    }
    confirm(&endpoint, lxc)?;
    Ok((endpoint, written))
}

impl Restored {
    fn take(&mut self, endpoint: EndpointFile, written: SystemTime) {
        self.written.insert(endpoint.id, written);
        self.rows.other_transport += endpoint.skipped.other_transport;
        self.rows.odd.extend(endpoint.skipped.odd);
        self.rules.extend(endpoint.rules.map(|rules| RulesOf {
            endpoint: endpoint.id,
            rules,
        }));
    }

    /// Prefers the rules that the agent's stream sent last to files that are older. `until` is when
    /// the stream ended. Returns the entries that count.
    pub fn prefer(&mut self, said: Content, until: SystemTime, now: &Instances) -> Content {
        let mut counts = said;
        counts.entries.retain(|id, entry| {
            let older = self.written.get(id).is_none_or(|written| *written <= until);
            older && now.get(id).is_some_and(|now| entry.instance.is_same(now))
        });
        self.rules
            .retain(|of| !counts.entries.contains_key(&of.endpoint));
        let said = counts.entries.values().map(|entry| entry.rules.clone());
        self.rules.extend(said);
        counts
    }
}

fn confirm(
    endpoint: &EndpointFile,
    lxc: &impl Fn(IpAddr) -> Option<LxcValue>,
) -> Result<(), SkipReason> {
    let mut confirmed = false;
    for address in &endpoint.addresses {
        let Some(entry) = lxc(*address) else { continue };
        let agrees = entry.flags & FLAG_HOST == 0
            && entry.lxc_id == endpoint.id.0
            && entry.ifindex == endpoint.ifindex
            && entry.sec_id == endpoint.identity.0;
        if !agrees {
            return Err(SkipReason::Disagrees {
                address: *address,
                id: entry.lxc_id,
                ifindex: entry.ifindex,
                identity: entry.sec_id,
            });
        }
        confirmed = true;
    }
    if confirmed {
        Ok(())
    } else {
        Err(SkipReason::Gone)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{maps::instances::Instance, rules_journal::Entry};
    use dns_policy::rule::EndpointRules;

    fn lxc(ip: IpAddr) -> Option<LxcValue> {
        (ip == IpAddr::from([10, 0, 0, 7])).then(|| LxcValue {
            ifindex: 12,
            lxc_id: 7,
            sec_id: 300,
            ..LxcValue::default()
        })
    }

    fn put(state_dir: &Path, directory: &str, text: &str) {
        let dir = state_dir.join("state").join(directory);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(FILE_NAME), text).unwrap();
    }

    fn endpoint(id: u16, ip: &str, ifindex: u32, identity: u32) -> String {
        let rules = r#"{"17891381":[{"Re":"^a[.]com[.]$","IPs":null}]}"#;
        format!(
            r#"{{"ID":{id},"IPv4":"{ip}","IPv6":"","IfIndex":{ifindex},"SecLabel":{{"id":{identity}}},"DNSRulesV2":{rules}}}"#
        )
    }

    #[test]
    fn a_damaged_file_affects_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "7", &endpoint(7, "10.0.0.7", 12, 300));
        put(dir.path(), "8", "{\"ID\":8,");
        put(dir.path(), "9", &endpoint(10, "10.0.0.7", 12, 300));
        fs::write(dir.path().join("state/local_allocator_state.json"), "{}").unwrap();
        let restored = load(dir.path(), lxc);
        assert_eq!(restored.rules.len(), 1);
        assert_eq!(restored.rules[0].endpoint, EndpointId(7));
        assert_eq!(restored.skipped.len(), 2);
        assert!(restored.skipped.iter().all(|skipped| skipped.damaged));
        assert!(restored.skipped[0].path.ends_with("state/8/ep_config.json"));
    }

    #[test]
    fn the_file_of_the_node_itself_is_not_listed_as_skipped() {
        // A file of a Cilium 1.20 agent, without the fields that are not read.
        let host = r#"{"ID":3079,"IfName":"cilium_host","IfIndex":5,"IPv6":"","IPv4":"",
            "SecLabel":{"id":1,"labels":{"host":{"key":"host","source":"reserved"}}},
            "Options":{"map":{"Debug":0}},"DNSHistory":[],"DNSZombies":{}}"#;
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "3079", host);
        // An endpoint without addresses that is not the node.
        put(dir.path(), "9", &endpoint(9, "", 12, 300));
        let restored = load(dir.path(), lxc);
        let skipped: Vec<_> = restored.skipped.iter().map(|s| &s.path).collect();
        assert_eq!(skipped, [&dir.path().join("state/9").join(FILE_NAME)]);
        assert!(restored.rules.is_empty());
    }

    #[test]
    fn a_file_counts_only_if_the_map_agrees() {
        for (ip, ifindex, identity, why) in [
            ("10.0.0.8", 12, 300, "removed"),
            ("10.0.0.7", 13, 300, "interface 12"),
            ("10.0.0.7", 12, 301, "identity 300"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            put(dir.path(), "7", &endpoint(7, ip, ifindex, identity));
            let restored = load(dir.path(), lxc);
            assert!(restored.rules.is_empty());
            assert!(
                restored.skipped[0].reason.contains(why),
                "{:?}",
                restored.skipped
            );
            assert!(!restored.skipped[0].damaged);
        }
    }

    #[test]
    fn a_build_directory_serves_only_without_the_finished_one() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "7_next", &endpoint(7, "10.0.0.7", 12, 300));
        assert_eq!(load(dir.path(), lxc).rules.len(), 1);
        put(
            dir.path(),
            "7",
            r#"{"ID":7,"IPv4":"10.0.0.7","IfIndex":12,"SecLabel":{"id":300}}"#,
        );
        let restored = load(dir.path(), lxc);
        assert!(restored.rules.is_empty() && restored.skipped.is_empty());
    }

    #[test]
    fn the_last_rules_of_the_stream_override_an_older_file_of_the_same_instance() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "7", &endpoint(7, "10.0.0.7", 12, 300));
        let mut instance = Instance::new(12, IdentityId(300));
        instance.addresses.insert([10, 0, 0, 7].into());
        let now = Instances::from([(EndpointId(7), instance.clone())]);
        let mut other = instance.clone();
        other.ifindex = 13;
        let written = load(dir.path(), lxc).written[&EndpointId(7)];
        let (before, after) = (
            written - Duration::from_secs(1),
            written + Duration::from_secs(1),
        );
        for (instance, until, is_said) in [
            (&instance, after, true),
            (&instance, before, false),
            (&other, after, false),
        ] {
            let rules = RulesOf {
                endpoint: EndpointId(7),
                rules: EndpointRules::default(),
            };
            let instance = instance.clone();
            let entry = Entry { instance, rules };
            let said = Content {
                entries: [(EndpointId(7), entry)].into(),
                ..Content::default()
            };
            let mut restored = load(dir.path(), lxc);
            let counts = restored.prefer(said, until, &now);
            assert_eq!(counts.entries.len() == 1, is_said);
            assert_eq!(restored.rules.len(), 1);
            assert_eq!(restored.rules[0].rules.ports.is_empty(), is_said);
        }
    }

    #[test]
    fn no_state_directory_is_nothing_to_restore() {
        let restored = load(Path::new("/nowhere"), lxc);
        assert!(restored.rules.is_empty() && restored.skipped.is_empty());
    }
}
