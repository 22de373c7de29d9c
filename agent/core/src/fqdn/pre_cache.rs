//! Names that are open before a pod looks them up (`--tofqdns-pre-cache`): a JSON array in the
//! format of Cilium's DNS cache, like `DNSHistory` of an `ep_config.json`.

use std::{collections::HashSet, net::IpAddr};

use dns_policy::{name::Fqdn, wall_time};
use serde::Deserialize;
use serde_json::Value;

/// Maximum number of entries that an error names.
const NAMED: usize = 3;

/// Pre-cached names use at most 1/16 of the ipcache: addresses from answers need the rest, and
/// without free entries there are no leases.
const SHARE: usize = 16;

/// Addresses of a name. Instants are nanoseconds of Unix time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreCached {
    pub name: Fqdn,
    /// When it was looked up; 0 = unknown.
    pub lookup: u64,
    pub expires: u64,
    pub addresses: Vec<IpAddr>,
}

/// Entries of a file that cannot be used. The other entries are used.
#[derive(Debug, thiserror::Error)]
pub enum PreCacheError {
    /// Not JSON, or no array.
    #[error(
        "is not a JSON array ({0}); no entry of it is used: write [{{\"fqdn\": …, \"expiration-time\": …, \"ips\": […]}}, …]"
    )]
    Json(#[from] serde_json::Error),
    /// Some entries cannot be used.
    #[error("has entries that cannot be used: {}; the other {used} entries are used; correct these and restart the agent", .faults.join("; "))]
    Entries {
        /// The first few of these entries, by number and name, with what is wrong.
        faults: Vec<String>,
        /// Number of entries that are used.
        used: usize,
    },
}

#[derive(Deserialize)]
struct Entry {
    fqdn: String,
    #[serde(rename = "lookup-time", default)]
    lookup: Option<String>,
    #[serde(rename = "expiration-time")]
    expires: String,
    #[serde(default)]
    ips: Option<Vec<IpAddr>>,
}

/// What can be used of a file's text, and what is wrong with the rest.
pub fn parse(text: &[u8]) -> (Vec<PreCached>, Option<PreCacheError>) {
    let entries: Vec<Value> = match serde_json::from_slice(text) {
        Ok(entries) => entries,
        Err(error) => return (Vec::new(), Some(error.into())),
    };
    let (mut found, mut faults, mut wrong) = (Vec::new(), Vec::new(), 0);
    for (number, entry) in (1..).zip(entries) {
        match parse_entry(&entry) {
            Ok(entry) => found.push(entry),
            Err(fault) => {
                wrong += 1;
                if faults.len() < NAMED {
                    let name = entry.get("fqdn").and_then(Value::as_str);
                    let name = name.map_or(String::new(), |name| format!(" ({name:?})"));
                    faults.push(format!("entry {number}{name}: {fault}"));
                }
            }
        }
    }
    if wrong > faults.len() {
        faults.push(format!("and {} more", wrong - faults.len()));
    }
    let used = found.len();
    let error = (wrong > 0).then_some(PreCacheError::Entries { faults, used });
    (found, error)
}

/// Keeps what expires after `now` (nanoseconds of Unix time), as many pairs of name and address as an
/// ipcache of `ipcache_max` entries leaves to them. Returns this number of pairs, and how many pairs
/// are left out.
pub fn bound(known: &mut Vec<PreCached>, now: u64, ipcache_max: usize) -> (usize, usize) {
    let most = ipcache_max / SHARE;
    let (mut taken, mut left_out) = (HashSet::new(), HashSet::new());
    known.retain(|entry| entry.expires > now);
    known.retain_mut(|entry| {
        let name = &entry.name;
        entry.addresses.retain(|address| {
            let pair = (name.clone(), *address);
            if taken.len() < most || taken.contains(&pair) {
                taken.insert(pair);
                true
            } else {
                left_out.insert(pair);
                false
            }
        });
        !entry.addresses.is_empty()
    });
    (most, left_out.len())
}

fn parse_entry(entry: &Value) -> Result<PreCached, String> {
    let entry = Entry::deserialize(entry).map_err(|error| error.to_string())?;
    let instant = |field: &str, text: &str| {
        wall_time::parse(text)
            .ok_or_else(|| format!("{field} {text:?} is not a time like 2026-01-31T12:00:00Z"))
    };
    let bare = entry.fqdn.trim_end_matches('.');
    if bare.is_empty() || bare.len() > 253 {
        return Err("fqdn is no DNS name".to_owned());
    }
    Ok(PreCached {
        name: Fqdn::normalise(&entry.fqdn),
        lookup: match entry.lookup.as_deref() {
            None | Some("") => 0,
            Some(text) => instant("lookup-time", text)?,
        },
        expires: instant("expiration-time", &entry.expires)?,
        addresses: entry.ips.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dumps_of_cilium_are_read() {
        let text = br#"[
            {"fqdn":"WWW.cilium.io.","lookup-time":"2026-11-22T01:00:00.5Z",
             "expiration-time":"2026-11-22T02:00:00+01:00","ttl":3600,
             "ips":["192.0.2.1","2001:db8::1"],"endpoint-id":7,"source":"lookup"},
            {"fqdn":"ebpf.io","expiration-time":"1970-01-01T00:00:07Z","ips":null}
        ]"#;
        let (found, error) = parse(text);
        assert!(error.is_none(), "{error:?}");
        let [www, ebpf] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(www.name.as_str(), "www.cilium.io.");
        assert_eq!(
            www.expires,
            wall_time::parse("2026-11-22T01:00:00Z").unwrap()
        );
        assert_eq!(www.lookup - www.expires, 500_000_000);
        assert_eq!(www.addresses.len(), 2);
        assert_eq!((ebpf.lookup, ebpf.expires), (0, 7_000_000_000));
        assert!(ebpf.addresses.is_empty());
    }

    #[test]
    fn pairs_over_its_share_of_the_ipcache_are_skipped() {
        let entry = |name: &str, expires, addresses: &[u8]| PreCached {
            name: Fqdn::normalise(name),
            lookup: 0,
            expires,
            addresses: addresses.iter().map(|n| [192, 0, 2, *n].into()).collect(),
        };
        let mut known = vec![
            entry("over.test", 5, &[1, 2]),
            entry("a.test", 6, &[1, 2]),
            entry("a.test", 7, &[2, 1]),
            entry("b.test", 6, &[1, 2, 2]),
            entry("c.test", 6, &[3]),
            entry("a.test", 8, &[3, 2]),
        ];
        assert_eq!(bound(&mut known, 5, 50), (3, 3));
        let taken = [
            entry("a.test", 6, &[1, 2]),
            entry("a.test", 7, &[2, 1]),
            entry("b.test", 6, &[1]),
            entry("a.test", 8, &[2]),
        ];
        assert_eq!(known, taken);
        assert_eq!(bound(&mut known, 5, 50), (3, 0));
    }

    #[test]
    fn wrong_entries_are_named_and_the_rest_is_used() {
        let good = r#"{"fqdn":"a.test","expiration-time":"2026-01-01T00:00:00Z","ips":[]}"#;
        let text = format!(
            r#"[{good},{{"fqdn":"b.test","expiration-time":"soon"}},{{"ips":["192.0.2.1"]}},
               {{"fqdn":".","expiration-time":"2026-01-01T00:00:00Z"}},7,
               {{"fqdn":"c.test","expiration-time":"2026-01-01T00:00:00Z","ips":["192.0.2"]}}]"#
        );
        let (found, error) = parse(text.as_bytes());
        assert_eq!(found.len(), 1);
        let error = error.unwrap().to_string();
        for part in [
            "entry 2 (\"b.test\"): expiration-time \"soon\"",
            "entry 3: missing field `fqdn`",
            "entry 4 (\".\"): fqdn is no DNS name",
            "and 2 more",
            "the other 1 entries are used",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        for none in ["", "{}", "[", "\u{0}"] {
            let (found, error) = parse(none.as_bytes());
            assert!(found.is_empty());
            assert!(matches!(error, Some(PreCacheError::Json(_))), "{none:?}");
        }
    }
}
