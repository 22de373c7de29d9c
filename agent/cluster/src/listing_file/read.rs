//! Reads the file at the agent's start.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Lines},
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use agent_core::{
    checksum::Sum,
    policy::{
        parse::parse_object,
        source::cluster::{Read, uid_of_cluster},
    },
};
use daemon::regular_file::{self, FileError};
use serde::Deserialize;
use serde_json::Value;

use super::{
    ListingError, Origin, VERSION,
    merge::{Tail, entry},
};

/// A listing that nothing has confirmed for this long is no longer used.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// A listing that an earlier run of the agent stored.
#[derive(Debug)]
pub struct Stored {
    pub documents: Vec<(String, Read)>,
    /// How long ago the listing was last known to be right.
    pub age: Duration,
}

#[derive(Deserialize)]
struct Head {
    version: u64,
    server: Option<String>,
    cluster: Option<String>,
    authorities: Vec<String>,
}

/// Reads the file. `None` if there is no file. `uid` is the uid of the cluster, if a watch has seen it.
pub fn read(
    path: &Path,
    origin: &Origin,
    uid: Option<&Arc<str>>,
    now: SystemTime,
) -> Result<Option<Stored>, ListingError> {
    let failed = |source| ListingError::Io {
        path: path.to_owned(),
        source,
    };
    let damaged = |reason: &str| ListingError::Damaged {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    let file = match regular_file::open(path) {
        Ok(file) => file,
        Err(FileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(FileError::Io(error)) => return Err(failed(error)),
        Err(error) => return Err(damaged(&error.to_string())),
    };
    let confirmed = file.metadata().and_then(|of| of.modified());
    let age = now.duration_since(confirmed.map_err(failed)?);
    let age = age.unwrap_or_default();
    let mut lines = BufReader::new(file).lines();
    let head = head(next(&mut lines).map_err(failed)?.as_deref());
    let head = head.ok_or_else(|| damaged("the first line is odd"))?;
    let authorities = check(path, origin, head)?;
    if age > LONGEST {
        return Err(ListingError::Old {
            path: path.to_owned(),
            hours: age.as_secs() / 3600,
        });
    }
    let mut stored = Stored {
        documents: Vec::new(),
        age,
    };
    let mut sum = Sum::default();
    loop {
        let line = next(&mut lines).map_err(failed)?;
        let line = line.ok_or_else(|| damaged("the end is missing"))?;
        if let Some(tail) = line.strip_prefix("},") {
            let tail = serde_json::from_str::<Tail>(&format!("{{{tail}"));
            let tail = tail.map_err(|_| damaged("the last line is odd"))?;
            if tail.count != stored.documents.len() || tail.sum != sum.hex() {
                return Err(damaged("its sum differs"));
            }
            identify(path, origin, uid, &authorities, &stored.documents)?;
            return Ok(Some(stored));
        }
        let line = line.strip_suffix(',').unwrap_or(&line);
        sum.add(line.as_bytes());
        let (key, json) = entry(line).ok_or_else(|| damaged("a line is no object"))?;
        let object: Value = serde_json::from_str(json).map_err(|e| damaged(&e.to_string()))?;
        stored
            .documents
            .push((key.clone(), parse_object(&object, &key)));
    }
}

/// The head, from the first line.
fn head(line: Option<&str>) -> Option<Head> {
    let begin = line?.strip_suffix('{')?;
    serde_json::from_str(&format!("{begin}null}}")).ok()
}

fn next(lines: &mut Lines<BufReader<File>>) -> io::Result<Option<String>> {
    match lines.next().transpose() {
        // Bytes that are not UTF-8 are damage, too.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(Some(String::new())),
        line => line,
    }
}

/// Whether the objects are of this cluster: by its uid or, while that is unknown, by the
/// certificates of its authorities. A file that names no authority is accepted.
fn identify(
    path: &Path,
    origin: &Origin,
    uid: Option<&Arc<str>>,
    authorities: &[String],
    documents: &[(String, Read)],
) -> Result<(), ListingError> {
    let foreign = |field, found: &str, wanted: &str| ListingError::Foreign {
        path: path.to_owned(),
        field,
        found: found.to_owned(),
        wanted: wanted.to_owned(),
    };
    if let (Some(wanted), Some(found)) = (uid, uid_of_cluster(documents)) {
        return match found == *wanted {
            true => Ok(()),
            false => Err(foreign("uid of namespace kube-system", &found, wanted)),
        };
    }
    // While an authority is replaced, a cluster has the former one and the new one.
    let shares = authorities
        .iter()
        .any(|one| origin.authorities.contains(one));
    if shares || authorities.is_empty() || origin.authorities.is_empty() {
        return Ok(());
    }
    let (found, wanted) = (authorities.join(", "), origin.authorities.join(", "));
    Err(foreign("CA (fingerprint)", &found, &wanted))
}

/// Checks the head of a file. Returns the fingerprints of the authorities in it.
fn check(path: &Path, origin: &Origin, head: Head) -> Result<Vec<String>, ListingError> {
    if head.version != u64::from(VERSION) {
        return Err(ListingError::Version {
            path: path.to_owned(),
            found: head.version,
        });
    }
    let pairs = [
        ("API server", head.server, &origin.server),
        ("cluster name", head.cluster, &origin.cluster),
    ];
    for (field, found, wanted) in pairs {
        let found = found.unwrap_or_default();
        if found != *wanted {
            return Err(ListingError::Foreign {
                path: path.to_owned(),
                field,
                found,
                wanted: wanted.clone(),
            });
        }
    }
    Ok(head.authorities)
}
