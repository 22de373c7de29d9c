//! One `ep_config.json`, ours or Cilium's.
//!
//! Cilium's `DNSRulesV2` maps a packed protocol and port to regular expressions with server
//! addresses. Our files also have `HoldfastDNSRules`, the rules by server identity and selector,
//! which stay right when a server moves.
//!
//! Learned names come last in our files, and after all used parts of Cilium's files. They are not
//! read, because reading one pod's names would keep every pod waiting for its first answer.

mod members;

use std::{
    collections::BTreeMap,
    io::{self, Read},
    net::IpAddr,
};

use dns_policy::{
    pattern,
    rule::{EndpointRules, NameRules},
    stored_rules::{
        StoredRules, UnknownProtocol, VERSION,
        by_address::{SkippedRows, by_address},
    },
};
use serde::Deserialize;
use shared_maps::{EndpointId, IdentityId};

use self::members::{ByteRange, Members, MembersError};

/// The used parts of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct EndpointFile {
    pub id: EndpointId,
    pub addresses: Vec<IpAddr>,
    /// Number of the host-side interface.
    pub ifindex: u32,
    pub identity: IdentityId,
    /// DNS rules, if the file has any.
    pub rules: Option<EndpointRules>,
    /// Rows of `DNSRulesV2` that were passed over: they allow nothing.
    pub skipped: SkippedRows,
}

/// Why the file of an endpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot be read: {0}")]
    Read(io::Error),
    /// The file is no JSON object, or ends too early.
    #[error("damaged: {0}")]
    Syntax(String),
    /// A key occurs twice in the object.
    #[error("damaged: it has {0} twice")]
    Twice(String),
    /// A value is not JSON, or a field has an unexpected type.
    #[error("damaged: {0}")]
    Json(#[from] serde_json::Error),
    /// A field's text cannot be read.
    #[error("damaged: {field} is {value:?}")]
    Field { field: &'static str, value: String },
    #[error("damaged: {0}")]
    Protocol(#[from] UnknownProtocol),
    /// Written by a newer version.
    #[error(
        "HoldfastDNSRules has version {0}; this program reads up to {VERSION}: upgrade holdfast-sdp"
    )]
    Newer(u64),
    /// A name or pattern that is not valid.
    #[error("HoldfastDNSRules, selector {selector:?}: {reason}")]
    Name { selector: String, reason: String },
}

/// A member of a file that is used or that identifies the file's writer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Member {
    Id,
    Ipv4,
    Ipv6,
    IfIndex,
    Identity,
    /// `DNSRulesV2`.
    ByAddress,
    /// `HoldfastDNSRules`.
    ByIdentity,
    /// `HoldfastKey`: the last field of holdfast-agent's files before the learned names.
    OurEnd,
    /// `Options`, which only Cilium writes, before the rules.
    Ciliums,
}

impl Member {
    fn of(key: &[u8]) -> Option<Self> {
        Some(match key {
            b"\"ID\"" => Self::Id,
            b"\"IPv4\"" => Self::Ipv4,
            b"\"IPv6\"" => Self::Ipv6,
            b"\"IfIndex\"" => Self::IfIndex,
            b"\"SecLabel\"" => Self::Identity,
            b"\"DNSRulesV2\"" => Self::ByAddress,
            b"\"HoldfastDNSRules\"" => Self::ByIdentity,
            b"\"HoldfastKey\"" => Self::OurEnd,
            b"\"Options\"" => Self::Ciliums,
            _ => return None,
        })
    }
}

/// The members of a file that are used.
struct Raw<R> {
    members: Members<R>,
    found: BTreeMap<Member, ByteRange>,
}

impl<R: Read> Raw<R> {
    /// Reads a file as far as needed.
    fn read(reader: R) -> Result<Self, FileError> {
        let mut raw = Self {
            members: Members::new(reader),
            found: BTreeMap::new(),
        };
        while let Some(key) = raw.members.key()? {
            let key = raw.members.bytes(key);
            let member = Member::of(key);
            if key == b"\"DNSHistory\"" && raw.has_all() {
                break;
            }
            let value = raw.members.value()?;
            if let Some(member) = member
                && let Some(first) = raw.found.insert(member, value)
            {
                let twice = String::from_utf8_lossy(raw.members.bytes(first)).into_owned();
                return Err(FileError::Twice(twice));
            }
        }
        Ok(raw)
    }

    /// Whether no used member can come after the learned names. Files of our earlier releases have
    /// used members there.
    fn has_all(&self) -> bool {
        let has = |member| self.found.contains_key(&member);
        has(Member::Id)
            && has(Member::Identity)
            && (has(Member::OurEnd) || (has(Member::Ciliums) && has(Member::ByAddress)))
    }

    /// A member; `None` if it is absent or null.
    fn get<'a, T: Deserialize<'a>>(&'a self, member: Member) -> Result<Option<T>, FileError> {
        let Some(place) = self.found.get(&member) else {
            return Ok(None);
        };
        Ok(serde_json::from_slice(self.members.bytes(place.clone()))?)
    }
}

impl From<MembersError> for FileError {
    fn from(error: MembersError) -> Self {
        match error {
            MembersError::Read(error) => Self::Read(error),
            syntax => Self::Syntax(syntax.to_string()),
        }
    }
}

#[derive(Deserialize)]
struct RawIdentity {
    id: u32,
}

#[derive(Deserialize)]
struct RawVersion {
    version: u64,
}

/// Reads a file. Rules by identity count only for the boot `boot_id`: identity numbers of another
/// boot mean nothing.
pub fn parse(reader: impl Read, boot_id: &str) -> Result<EndpointFile, FileError> {
    let raw = Raw::read(reader)?;
    let id = raw.get(Member::Id)?.ok_or_else(|| FileError::Field {
        field: "ID",
        value: String::new(),
    })?;
    let mut addresses = Vec::new();
    for (field, member) in [("IPv4", Member::Ipv4), ("IPv6", Member::Ipv6)] {
        let text: Option<String> = raw.get(member)?;
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            let bad = |_| FileError::Field {
                field,
                value: text.clone(),
            };
            addresses.push(text.parse().map_err(bad)?);
        }
    }
    let ifindex: i64 = raw.get(Member::IfIndex)?.unwrap_or(0);
    let ifindex = u32::try_from(ifindex).map_err(|_| FileError::Field {
        field: "IfIndex",
        value: ifindex.to_string(),
    })?;
    let identity: Option<RawIdentity> = raw.get(Member::Identity)?;
    let version: Option<RawVersion> = raw.get(Member::ByIdentity)?;
    let ours = match version {
        Some(RawVersion { version }) if version > VERSION => {
            return Err(FileError::Newer(version));
        }
        Some(_) => raw.get(Member::ByIdentity)?,
        None => None,
    };
    let mut skipped = SkippedRows::default();
    let rules = match ours.filter(|rules: &StoredRules| rules.boot_id == boot_id) {
        Some(rules) => {
            let rules = rules.into_rules()?;
            check(&rules)?;
            Some(rules)
        }
        None => raw
            .get(Member::ByAddress)?
            .map(|rows| by_address(rows, &mut skipped)),
    };
    Ok(EndpointFile {
        id: EndpointId(id),
        addresses,
        ifindex,
        identity: IdentityId(identity.map_or(0, |identity| identity.id)),
        rules,
        skipped,
    })
}

/// Checks the names of the rules.
fn check(rules: &EndpointRules) -> Result<(), FileError> {
    for rule in rules.ports.iter().flat_map(|port| &port.rules) {
        let NameRules::Names(names) = &rule.names else {
            continue;
        };
        for name in names {
            pattern::validate_rule(name).map_err(|error| FileError::Name {
                selector: rule.selector.clone(),
                reason: error.to_string(),
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dns_policy::rule::{Servers, Transport};

    use super::*;

    const CILIUM: &str = r#"{
        "ID": 7, "IPv4": "10.0.0.7", "IPv6": "fd00::7", "IfName": "lxc1", "IfIndex": 12,
        "SecLabel": {"id": 300, "labels": {}}, "DNSHistory": [], "DNSZombies": {},
        "DNSRulesV2": {
            "17891381": [{"Re": "(?:)", "IPs": null},
                         {"Re": "^(?:sub[.]ubuntu[.]com[.])$", "IPs": {"10.0.0.53": {}, "10.1.0.0/16@0": {}, "10.2.0.1@3": {}}}],
            "17170485": [{"Re": "^-$", "IPs": {"10.2.0.1@3": {}}}]
        }
    }"#;

    #[test]
    fn ciliums_own_file_is_read() {
        let file = parse(CILIUM.as_bytes(), "boot").unwrap();
        assert_eq!(
            (file.id, file.ifindex, file.identity),
            (EndpointId(7), 12, IdentityId(300))
        );
        assert_eq!(file.addresses.len(), 2);
        let rules = file.rules.unwrap();
        let udp = rules
            .ports
            .iter()
            .find(|port| port.transport == Transport::Udp)
            .unwrap();
        assert_eq!(udp.port, 53);
        assert_eq!(
            (&udp.rules[0].servers, &udp.rules[0].names),
            (&Servers::Any, &NameRules::every_name())
        );
        let Servers::Prefixes(prefixes) = &udp.rules[1].servers else {
            panic!("no prefixes")
        };
        assert_eq!(prefixes.len(), 2);
        assert!(matches!(&udp.rules[1].names, NameRules::Names(names) if names.len() == 1));
        let tcp = rules
            .ports
            .iter()
            .find(|port| port.transport == Transport::Tcp)
            .unwrap();
        assert!(
            tcp.rules.is_empty(),
            "servers of another cluster are not any server"
        );
    }

    fn ours(version: u64, boot_id: &str, name: &str) -> String {
        format!(
            r#"{{"ID": 7, "IPv4": "10.0.0.7", "IfIndex": 12, "SecLabel": {{"id": 300}},
            "DNSRulesV2": {{"17891381": [{{"Re": "(?:)", "IPs": null}}]}},
            "HoldfastDNSRules": {{"version": {version}, "boot_id": "{boot_id}", "start": 3, "revision": 9,
              "ports": [{{"port": 53, "protocol": 17, "rules": [
                {{"selector": "dns", "any_server": false, "servers": [200], "names": [{name}]}}]}}]}}}}"#
        )
    }

    /// Reads a file with 26 MB of long names, and counts the bytes that were read.
    struct Counted<R>(R, usize);

    impl<R: Read> Read for Counted<R> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let read = self.0.read(into)?;
            self.1 += read;
            Ok(read)
        }
    }

    fn names() -> String {
        let label = "x".repeat(63);
        let entry = |n: u32| {
            format!(
                r#"{{"fqdn":"n{n}.{label}.{label}.{label}.test.","lookup-time":"2026-11-22T10:00:00Z",
                "expiration-time":"2026-11-22T11:00:00Z","ttl":60,"ips":["192.0.2.1"]}}"#
            )
        };
        let entries: Vec<_> = (0..50_000).map(entry).collect();
        format!("[{}]", entries.join(","))
    }

    #[test]
    fn fifty_thousand_learned_names_are_not_read() {
        let rules = ours(1, "boot", r#"{"match_name": "a.com"}"#);
        let rules = rules.trim_end().strip_suffix('}').unwrap();
        let names = names();
        let own =
            format!(r#"{rules}, "HoldfastKey":"cli/a", "DNSHistory":{names}, "DNSZombies":{{}}}}"#);
        let earlier = format!(
            r#"{{"DNSHistory":{names}, {}, "HoldfastKey":"cli/a"}}"#,
            rules.trim_start().strip_prefix('{').unwrap()
        );
        let ciliums = CILIUM.replace(r#""DNSHistory": [], "DNSZombies": {},"#, r#""Options":{},"#);
        let ciliums = ciliums.trim_end().strip_suffix('}').unwrap();
        let ciliums = format!(r#"{ciliums}, "DNSHistory":{names}, "K8sPodName":"a"}}"#);
        for (text, most) in [
            (&own, 128 << 10),
            (&ciliums, 128 << 10),
            (&earlier, earlier.len()),
        ] {
            let mut reader = Counted(text.as_bytes(), 0);
            let file = parse(&mut reader, "boot").unwrap();
            assert!(reader.1 <= most, "{} of {} bytes", reader.1, text.len());
            let rules = file.rules.unwrap();
            let rule = &rules.ports.last().unwrap().rules[0];
            let by_identity = matches!(rule.servers, Servers::Identities(_));
            assert_eq!(by_identity, text != &ciliums);
        }
    }

    #[test]
    fn a_repeated_key_is_damage() {
        let error = parse(&br#"{"ID": 7, "ID": 8}"#[..], "boot").unwrap_err();
        assert!(error.to_string().contains("twice"), "{error}");
    }

    #[test]
    fn rules_by_identity_are_preferred() {
        let text = ours(
            1,
            "boot",
            r#"{"match_name": "a.com"}, {"match_pattern": "*.b.com"}"#,
        );
        let rules = parse(text.as_bytes(), "boot").unwrap().rules.unwrap();
        let rule = &rules.ports[0].rules[0];
        assert_eq!(rule.servers, Servers::Identities([IdentityId(200)].into()));
        assert!(matches!(&rule.names, NameRules::Names(names) if names.len() == 2));
    }

    #[test]
    fn rules_by_identity_of_another_boot_do_not_count() {
        let text = ours(1, "earlier", "");
        let rules = parse(text.as_bytes(), "boot").unwrap().rules.unwrap();
        assert_eq!(rules.ports[0].rules[0].servers, Servers::Any);
    }

    #[test]
    fn a_newer_version_is_refused_by_name() {
        let error = parse(ours(2, "boot", "").as_bytes(), "boot").unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }

    #[test]
    fn a_malformed_row_affects_no_other_row() {
        let text = r#"{"ID": 7, "IPv4": "10.0.0.7", "IfIndex": 12, "SecLabel": {"id": 300},
            "DNSRulesV2": {"53": [], "25428021": [{"Re": "(?:)", "IPs": null}], "17170485": 5,
              "17891381": [{"Re": 7}, {"Re": "(?:)", "IPs": {"10.0.0": {}}},
                           {"Re": "^a[.]com[.]$", "IPs": null}]}}"#;
        let file = parse(text.as_bytes(), "boot").unwrap();
        let skipped = file.skipped;
        assert_eq!(
            (skipped.other_transport, skipped.count()),
            (1, 5),
            "{skipped:?}"
        );
        let rules = file.rules.unwrap();
        let udp = rules.ports.iter().find(|p| p.transport == Transport::Udp);
        assert_eq!(udp.unwrap().rules.len(), 1);
        let tcp = rules.ports.iter().find(|p| p.transport == Transport::Tcp);
        assert!(tcp.unwrap().rules.is_empty());
    }

    #[test]
    fn damage_is_named() {
        let error = |text: &str| parse(text.as_bytes(), "boot").unwrap_err().to_string();
        assert!(error("{").contains("damaged"));
        assert!(error(r#"{"ID": 7, "IPv4": "10.0.0"}"#).contains("IPv4"));
        let both = ours(1, "boot", r#"{"match_name": "a", "match_pattern": "b"}"#);
        assert!(error(&both).contains("damaged"));
    }
}
