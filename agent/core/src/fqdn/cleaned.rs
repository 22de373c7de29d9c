//! Names that `fqdn cache clean` forgot, kept across restarts: a proxy that was away meanwhile would
//! otherwise report them again to an agent that knows nothing of the cleaning.

use dns_policy::boot_time::BootTime;
use serde::{Deserialize, Serialize};
use shared_maps::EndpointId;

/// Version of the file that this program writes.
const VERSION: u32 = 1;

/// Names asked to be forgotten, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cleaning {
    /// The endpoint whose names are forgotten; `None` = those of all endpoints.
    pub endpoint: Option<EndpointId>,
    /// Names that this pattern matches; `None` = all.
    pub pattern: Option<String>,
    /// Answers that were seen until then are void.
    pub at: BootTime,
    /// The same time in nanoseconds of Unix time, for names that outlast a boot ([`super::pre_cache`]);
    /// 0 = unknown.
    pub at_unix: u64,
}

/// Content of `cleaned_names.json`: names that no answer from before their cleaning may open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CleanedNames {
    /// The boot to whose clock the times belong: proxies remember nothing of another boot.
    pub boot_id: String,
    /// In any order.
    pub cleanings: Vec<Cleaning>,
}

/// What is wrong with the file.
#[derive(Debug, thiserror::Error)]
pub enum CleanedError {
    /// Not JSON, or of another shape.
    #[error(
        "list of cleaned names: {0} (without the list, names that a proxy still stores open again)"
    )]
    Json(#[from] serde_json::Error),
    /// Written by a newer version.
    #[error(
        "list of cleaned names has version {0}; this program reads up to {VERSION}: upgrade holdfast-agent"
    )]
    Newer(u32),
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    boot_id: String,
    cleaned: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    /// When the names were cleaned, nanoseconds of CLOCK_BOOTTIME.
    at: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at_unix: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    endpoint: Option<u16>,
}

/// The version alone: the rest of a file of a later version may have any shape.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// The text of `cleaned_names.json` with these cleanings.
pub fn render<'a>(boot_id: &str, cleanings: impl Iterator<Item = &'a Cleaning>) -> String {
    let cleaned = cleanings.map(|cleaning| Entry {
        at: cleaning.at.nanos(),
        at_unix: Some(cleaning.at_unix).filter(|at| *at > 0),
        pattern: cleaning.pattern.clone(),
        endpoint: cleaning.endpoint.map(|id| id.0),
    });
    let document = Document {
        version: VERSION,
        boot_id: boot_id.to_owned(),
        cleaned: cleaned.collect(),
    };
    serde_json::to_string_pretty(&document).expect("strings and numbers render as JSON")
}

/// Reads `cleaned_names.json`; a newer version is refused.
pub fn parse(text: &str) -> Result<CleanedNames, CleanedError> {
    let Versioned { version } = serde_json::from_str(text)?;
    if version > VERSION {
        return Err(CleanedError::Newer(version));
    }
    let document: Document = serde_json::from_str(text)?;
    let cleaned = document.cleaned.into_iter().map(|entry| Cleaning {
        endpoint: entry.endpoint.map(EndpointId),
        pattern: entry.pattern,
        at: BootTime::from_nanos(entry.at),
        at_unix: entry.at_unix.unwrap_or_default(),
    });
    Ok(CleanedNames {
        boot_id: document.boot_id,
        cleanings: cleaned.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_files_are_read_back() {
        let cleanings = [
            Cleaning {
                endpoint: None,
                pattern: Some("*.cilium.io".to_owned()),
                at: BootTime::from_nanos(7),
                at_unix: 1_007,
            },
            Cleaning {
                endpoint: Some(EndpointId(3)),
                pattern: None,
                at: BootTime::from_nanos(9),
                at_unix: 0,
            },
        ];
        let text = render("a", cleanings.iter());
        let read = parse(&text).unwrap();
        assert_eq!(
            (read.boot_id.as_str(), &read.cleanings[..]),
            ("a", &cleanings[..])
        );
    }

    #[test]
    fn a_later_version_is_refused_by_name_and_nonsense_is_damage() {
        let later = parse(r#"{"version":2,"names":{}}"#);
        assert!(matches!(later, Err(CleanedError::Newer(2))));
        assert!(matches!(parse("{"), Err(CleanedError::Json(_))));
    }
}
