//! The file's fields, named as Cilium names them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dns_policy::{
    name::Fqdn,
    stored_rules::{
        self, StoredRules,
        by_address::{SkippedRows, by_address},
    },
    wall_time,
};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use shared_maps::{EndpointId, IdentityId};

use super::{
    EndpointFile, FileError, HistoryEntry, RulesInFile, ServerAddresses, ZombieEntry, rules,
};
use crate::{
    datapath::link::Link,
    endpoint::spec::PodInterface,
    identity::checkpoint::{LabelMap, spell, unspell},
    labels::{LabelSet, NAMESPACE_KEY},
};

/// `H` and `V` are learned names and Cilium's rules of a port, as they are read or as they are written
/// ([`HistoryOut`]).
#[derive(Serialize, Deserialize)]
struct File<H, V> {
    #[serde(rename = "ID")]
    id: u16,
    #[serde(rename = "ContainerNetnsPath", default)]
    netns: String,
    #[serde(rename = "IfName", default)]
    ifname: String,
    #[serde(rename = "IfIndex", default)]
    ifindex: u32,
    #[serde(rename = "OpLabels", default)]
    op_labels: OpLabels,
    #[serde(rename = "LXCMAC", default)]
    mac: String,
    #[serde(rename = "IPv6", default)]
    ipv6: String,
    #[serde(rename = "IPv4", default)]
    ipv4: String,
    #[serde(rename = "NodeMAC", default)]
    node_mac: String,
    #[serde(rename = "SecLabel")]
    identity: SecLabel,
    #[serde(
        rename = "DNSRulesV2",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    rules_v2: Option<BTreeMap<String, V>>,
    #[serde(rename = "K8sPodName", default)]
    pod: String,
    #[serde(rename = "K8sNamespace", default)]
    namespace: String,
    #[serde(
        rename = "HoldfastDNSRules",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    own_rules: Option<StoredRules>,
    #[serde(
        rename = "HoldfastOnBridge",
        default,
        skip_serializing_if = "std::ops::Not::not"
    )]
    on_bridge: bool,
    #[serde(
        rename = "HoldfastLink",
        default,
        skip_serializing_if = "Link::is_empty"
    )]
    link: Link,
    // Learned names come after this, and nothing else does: a proxy that starts reads no further.
    #[serde(rename = "HoldfastKey", default)]
    key: String,
    #[serde(rename = "DNSHistory", default)]
    history: Option<Vec<H>>,
    #[serde(rename = "DNSZombies", default)]
    zombies: Option<Zombies>,
}

#[derive(Default, Serialize, Deserialize)]
struct OpLabels {
    #[serde(rename = "OrchestrationIdentity", default)]
    identity: Option<LabelMap>,
}

#[derive(Serialize, Deserialize)]
struct SecLabel {
    id: u32,
    #[serde(default)]
    labels: Option<LabelMap>,
}

#[derive(Default, Deserialize)]
struct History {
    fqdn: String,
    #[serde(rename = "lookup-time", default)]
    lookup: String,
    #[serde(rename = "expiration-time", default)]
    expires: String,
    #[serde(default)]
    ttl: u32,
    #[serde(default)]
    ips: Vec<IpAddr>,
    #[serde(rename = "holdfast-trusted-until", default)]
    trusted_until: String,
}

/// [`History`] as it is written: nothing is copied, because there may be a hundred thousand names.
#[derive(Serialize)]
struct HistoryOut<'a> {
    fqdn: &'a str,
    #[serde(rename = "lookup-time", serialize_with = "instant_text")]
    lookup: u64,
    #[serde(rename = "expiration-time", serialize_with = "instant_text")]
    expires: u64,
    ttl: u32,
    ips: &'a [IpAddr],
    #[serde(
        rename = "holdfast-trusted-until",
        serialize_with = "instant_text",
        skip_serializing_if = "is_zero"
    )]
    trusted_until: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_zero(unix_ns: &u64) -> bool {
    *unix_ns == 0
}

fn instant_text<S: Serializer>(unix_ns: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(wall_time::Text::of(*unix_ns).as_str())
}

#[derive(Default, Serialize, Deserialize)]
struct Zombies {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deletes: Option<BTreeMap<String, ZombieJson>>,
}

#[derive(Serialize, Deserialize)]
struct ZombieJson {
    #[serde(default)]
    names: Vec<String>,
    #[serde(
        rename = "holdfast-trusted",
        default,
        skip_serializing_if = "Vec::is_empty"
    )]
    trusted: Vec<String>,
    ip: IpAddr,
    #[serde(rename = "alive-at", default)]
    alive_at: String,
    #[serde(rename = "delete-pending-at", default)]
    delete_pending_at: String,
}

/// Renders the file. `servers` tells where the servers of DNS rules are, `limit` how many
/// addresses a rule may list.
pub fn render(file: &EndpointFile, servers: &ServerAddresses, limit: usize) -> String {
    let namespace = file
        .labels
        .iter()
        .find(|label| label.key() == NAMESPACE_KEY);
    let history = file.history.iter().map(|entry| HistoryOut {
        fqdn: entry.name.as_str(),
        lookup: entry.lookup,
        expires: entry.expires,
        ttl: entry.ttl,
        ips: &entry.addresses,
        trusted_until: entry.trusted_until,
    });
    let zombies: BTreeMap<_, _> = file.zombies.iter().map(zombie_json).collect();
    let rules_v2 = file
        .rules
        .as_ref()
        .map(|rules| rules::v2(&rules.rules, servers, limit));
    let json = File {
        id: file.id.0,
        netns: file.netns.clone(),
        ifname: file.interface.ifname.clone(),
        ifindex: file.interface.ifindex,
        op_labels: OpLabels {
            identity: Some(spell(&file.labels)),
        },
        mac: mac_text(file.interface.mac),
        ipv6: file.ipv6.map(|ip| ip.to_string()).unwrap_or_default(),
        ipv4: file.ipv4.map(|ip| ip.to_string()).unwrap_or_default(),
        node_mac: mac_text(file.interface.node_mac),
        identity: SecLabel {
            id: file.identity.0,
            labels: Some(spell(&file.labels)),
        },
        rules_v2: rules_v2.filter(|rules| !rules.is_empty()),
        pod: file
            .pod
            .as_deref()
            .unwrap_or(&file.key)
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .to_owned(),
        namespace: namespace
            .map(|label| label.value().to_owned())
            .unwrap_or_default(),
        own_rules: file
            .rules
            .as_ref()
            .map(|of| StoredRules::new(&of.rules, &of.boot_id, of.start, of.revision)),
        key: file.key.clone(),
        on_bridge: file.interface.on_bridge,
        link: file.interface.link.clone(),
        history: Some(history.collect()),
        zombies: Some(Zombies {
            deletes: (!zombies.is_empty()).then_some(zombies),
        }),
    };
    serde_json::to_string(&json).expect("maps with string keys render as JSON")
}

fn zombie_json(entry: &ZombieEntry) -> (String, ZombieJson) {
    let texts = |names: &[Fqdn]| names.iter().map(|name| name.as_str().to_owned()).collect();
    let json = ZombieJson {
        names: texts(&entry.names),
        trusted: texts(&entry.trusted),
        ip: entry.address,
        alive_at: if entry.alive_at == 0 {
            // Go's zero time: never.
            "0001-01-01T00:00:00Z".to_owned()
        } else {
            wall_time::render(entry.alive_at)
        },
        delete_pending_at: wall_time::render(entry.delete_pending_at),
    };
    (entry.address.to_string(), json)
}

/// Reads an `ep_config.json`, this program's or Cilium's.
pub fn parse(text: &str) -> Result<EndpointFile, FileError> {
    let json: File<History, Value> = serde_json::from_str(text)?;
    let labels = json
        .identity
        .labels
        .as_ref()
        .or(json.op_labels.identity.as_ref());
    let rules = match json.own_rules {
        Some(own) if own.version > stored_rules::VERSION => {
            return Err(FileError::Newer(own.version));
        }
        Some(own) => Some(RulesInFile {
            boot_id: own.boot_id.clone(),
            start: own.start,
            revision: own.revision,
            rules: own.into_rules()?,
        }),
        None => json.rules_v2.map(|v2| RulesInFile {
            boot_id: String::new(),
            start: 0,
            revision: 0,
            rules: by_address(v2, &mut SkippedRows::default()),
        }),
    };
    Ok(EndpointFile {
        id: EndpointId(json.id),
        key: json.key,
        identity: IdentityId(json.identity.id),
        labels: labels.map_or_else(|| LabelSet::new(Vec::new()), unspell),
        ipv4: address("IPv4", &json.ipv4)?,
        ipv6: address("IPv6", &json.ipv6)?,
        interface: PodInterface {
            ifindex: json.ifindex,
            ifname: json.ifname,
            mac: mac("LXCMAC", &json.mac)?,
            node_mac: mac("NodeMAC", &json.node_mac)?,
            on_bridge: json.on_bridge,
            link: json.link,
        },
        netns: json.netns,
        pod: None,
        history: read_history(json.history.unwrap_or_default())?,
        zombies: read_zombies(json.zombies)?,
        rules,
    })
}

fn read_history(entries: Vec<History>) -> Result<Vec<HistoryEntry>, FileError> {
    let read = |entry: History| {
        Ok(HistoryEntry {
            name: Fqdn::normalise(&entry.fqdn),
            lookup: instant("DNSHistory.lookup-time", &entry.lookup)?,
            expires: instant("DNSHistory.expiration-time", &entry.expires)?,
            ttl: entry.ttl,
            addresses: entry.ips,
            trusted_until: instant("DNSHistory.holdfast-trusted-until", &entry.trusted_until)?,
        })
    };
    entries.into_iter().map(read).collect()
}

fn read_zombies(zombies: Option<Zombies>) -> Result<Vec<ZombieEntry>, FileError> {
    let names = |texts: &[String]| -> Vec<Fqdn> {
        let names: BTreeSet<Fqdn> = texts.iter().map(|text| Fqdn::normalise(text)).collect();
        names.into_iter().collect()
    };
    let read = |entry: ZombieJson| {
        Ok(ZombieEntry {
            address: entry.ip,
            names: names(&entry.names),
            trusted: names(&entry.trusted),
            alive_at: instant("DNSZombies.alive-at", &entry.alive_at)?,
            delete_pending_at: instant("DNSZombies.delete-pending-at", &entry.delete_pending_at)?,
        })
    };
    let deletes = zombies
        .and_then(|zombies| zombies.deletes)
        .unwrap_or_default();
    deletes.into_values().map(read).collect()
}

fn instant(field: &'static str, text: &str) -> Result<u64, FileError> {
    if text.is_empty() {
        return Ok(0);
    }
    wall_time::parse(text).ok_or_else(|| FileError::Field {
        field,
        value: text.to_owned(),
    })
}

fn address<T: std::str::FromStr>(field: &'static str, text: &str) -> Result<Option<T>, FileError> {
    if text.is_empty() {
        return Ok(None);
    }
    let fault = |_| FileError::Field {
        field,
        value: text.to_owned(),
    };
    text.parse().map(Some).map_err(fault)
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn mac(field: &'static str, text: &str) -> Result<[u8; 6], FileError> {
    if text.is_empty() {
        return Ok([0; 6]);
    }
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok())
        .collect();
    let mac = bytes.and_then(|bytes| bytes.try_into().ok());
    mac.ok_or_else(|| FileError::Field {
        field,
        value: text.to_owned(),
    })
}
