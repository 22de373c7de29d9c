//! The file's text: one line with format, boot and checksum, then JSON.

use std::{collections::BTreeSet, io, net::IpAddr};

use dns_policy::rule::{
    EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use shared_maps::{EndpointId, IdentityId};

use super::{Content, Entry};
use crate::{journal::record::crc32, maps::instances::Instance};

const MAGIC: &str = "holdfast-cilium-rules";
/// Version of the format that this release writes.
const VERSION: u32 = 1;

/// Why a file cannot be used or written.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error(transparent)]
    File(#[from] io::Error),
    /// The file's content differs from what was written.
    #[error("damaged: {0}")]
    Damaged(&'static str),
    /// Its JSON cannot be read or written.
    #[error("damaged: {0}")]
    Json(#[from] serde_json::Error),
    /// The file is of a later release.
    #[error("it has version {0}; this release reads up to {VERSION}: upgrade holdfast-sdp")]
    Newer(u32),
    /// The rules take this many bytes, more than a file may have.
    #[error("{0} bytes of rules are too many to be stored")]
    TooLarge(usize),
}

/// The JSON form of the file's content.
#[derive(Serialize, Deserialize)]
pub(crate) struct Saved {
    endpoints: Vec<SavedEndpoint>,
    prefixes: Vec<(IpNet, u32)>,
}

#[derive(Serialize, Deserialize)]
struct SavedEndpoint {
    id: u16,
    ifindex: u32,
    identity: u32,
    addresses: BTreeSet<IpAddr>,
    ports: Vec<SavedPort>,
}

#[derive(Serialize, Deserialize)]
struct SavedPort {
    port: u16,
    protocol: u8,
    rules: Vec<SavedRule>,
}

#[derive(Serialize, Deserialize)]
struct SavedRule {
    servers: BTreeSet<u32>,
    /// `None` stands for every name.
    patterns: Option<Vec<String>>,
}

/// Bytes of a file with this content, valid for the boot `boot_id`.
pub(super) fn write(content: &Content, boot_id: &str) -> Result<Vec<u8>, ImageError> {
    let endpoints = content.entries.iter().map(|(id, entry)| SavedEndpoint {
        id: id.0,
        ifindex: entry.instance.ifindex,
        identity: entry.instance.identity.0,
        addresses: entry.instance.addresses.clone(),
        ports: entry.rules.rules.ports.iter().map(saved_port).collect(),
    });
    let saved = Saved {
        endpoints: endpoints.collect(),
        prefixes: content.prefixes.iter().map(|(p, id)| (*p, id.0)).collect(),
    };
    let body = serde_json::to_vec(&saved)?;
    let mut out = format!("{MAGIC} {VERSION} {boot_id} {:08x}\n", crc32(&body)).into_bytes();
    out.extend_from_slice(&body);
    Ok(out)
}

fn saved_port(port: &PortRules) -> SavedPort {
    SavedPort {
        port: port.port,
        protocol: port.transport.number(),
        rules: port.rules.iter().filter_map(saved_rule).collect(),
    }
}

/// The JSON form of a rule. `None` if the rule has a form that no agent sends.
fn saved_rule(rule: &SelectorRule) -> Option<SavedRule> {
    let Servers::Identities(servers) = &rule.servers else {
        return None;
    };
    let patterns = match &rule.names {
        NameRules::All => None,
        NameRules::Names(names) => Some(names.iter().map(|name| name.text().to_owned()).collect()),
        NameRules::Regex(_) => return None,
    };
    Some(SavedRule {
        servers: servers.iter().map(|identity| identity.0).collect(),
        patterns,
    })
}

/// Content of the file. `None` if it is of another boot.
pub(super) fn read(bytes: &[u8], boot_id: &str) -> Result<Option<Content>, ImageError> {
    let line = bytes.iter().position(|byte| *byte == b'\n');
    let (head, body) = line
        .and_then(|at| Some((bytes.get(..at)?, bytes.get(at + 1..)?)))
        .ok_or(ImageError::Damaged("it has no first line"))?;
    let head = std::str::from_utf8(head).map_err(|_| ImageError::Damaged("its first line"))?;
    let mut words = head.split(' ');
    if words.next() != Some(MAGIC) {
        return Err(ImageError::Damaged("it does not begin as such a file does"));
    }
    let version = words.next().and_then(|word| word.parse().ok());
    match version {
        Some(VERSION) => {}
        Some(version) if version > VERSION => return Err(ImageError::Newer(version)),
        _ => {
            return Err(ImageError::Damaged(
                "its version is none that was ever written",
            ));
        }
    }
    let (boot, sum) = (words.next(), words.next());
    if sum.and_then(|sum| u32::from_str_radix(sum, 16).ok()) != Some(crc32(body)) {
        return Err(ImageError::Damaged("its checksum is wrong"));
    }
    if boot != Some(boot_id) {
        return Ok(None);
    }
    let saved: Saved = serde_json::from_slice(body)?;
    let prefixes = saved.prefixes.into_iter();
    Ok(Some(Content {
        entries: saved.endpoints.into_iter().map(entry).collect(),
        prefixes: prefixes.map(|(p, id)| (p, IdentityId(id))).collect(),
    }))
}

fn entry(saved: SavedEndpoint) -> (EndpointId, Entry) {
    let endpoint = EndpointId(saved.id);
    let ports = saved.ports.into_iter().filter_map(|port| {
        Some(PortRules {
            port: port.port,
            transport: Transport::from_number(port.protocol)?,
            rules: port.rules.into_iter().map(rule).collect(),
        })
    });
    let entry = Entry {
        instance: Instance {
            ifindex: saved.ifindex,
            identity: IdentityId(saved.identity),
            addresses: saved.addresses,
        },
        rules: RulesOf {
            endpoint,
            rules: EndpointRules {
                ports: ports.collect(),
            },
        },
    };
    (endpoint, entry)
}

fn rule(saved: SavedRule) -> SelectorRule {
    let servers = saved.servers.into_iter().map(IdentityId).collect();
    SelectorRule {
        selector: "FQDNData, kept".to_owned(),
        servers: Servers::Identities(servers),
        names: match saved.patterns {
            None => NameRules::All,
            Some(patterns) => {
                NameRules::Names(patterns.into_iter().map(NameRule::Pattern).collect())
            }
        },
    }
}
