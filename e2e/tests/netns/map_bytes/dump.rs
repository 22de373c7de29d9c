//! The output of bpftool for the lab's pinned maps.
use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::{Lab, Netns, shell};
use serde_json::Value;

/// The bytes of a key or a value.
pub(crate) type Bytes = Vec<u8>;

/// Fails unless the kernel's map has this kind and these sizes.
pub(crate) fn shape(
    lab: &Lab,
    map: &str,
    kind: &str,
    key: u64,
    value: u64,
    entries: u64,
    flags: u64,
) -> Result<()> {
    let pin = lab.pin(map).display().to_string();
    let text = shell::run("bpftool", &["-j", "map", "show", "pinned", &pin])?;
    let found: Value = serde_json::from_str(&text)?;
    let number = |field: &str| found.get(field).and_then(Value::as_u64);
    ensure!(
        found.get("type").is_some_and(|found| found == kind)
            && number("bytes_key") == Some(key)
            && number("bytes_value") == Some(value)
            && number("max_entries") == Some(entries)
            && number("flags") == Some(flags),
        "{map}: expected {kind} key {key} value {value} entries {entries} flags {flags:#x}: {text}"
    );
    Ok(())
}

/// Keys and values of a map.
pub(crate) fn dump(lab: &Lab, map: &str) -> Result<BTreeMap<Bytes, Bytes>> {
    entries(lab, map)?
        .iter()
        .map(|entry| Ok((bytes(entry.get("key"))?, bytes(entry.get("value"))?)))
        .collect()
}

/// Keys of a per-CPU map, with the sums of its values (packets, bytes) over all CPUs.
pub(crate) fn dump_sums(lab: &Lab, map: &str) -> Result<BTreeMap<Bytes, (u64, u64)>> {
    let mut sums = BTreeMap::new();
    for entry in entries(lab, map)? {
        let (packets, length): &mut (u64, u64) = sums.entry(bytes(entry.get("key"))?).or_default();
        let values = entry.get("values").and_then(Value::as_array);
        for value in values.context("no values per CPU")? {
            let value = bytes(value.get("value"))?;
            ensure!(value.len() == 16, "not two counters: {value:02x?}");
            *packets += long(&value, 0);
            *length += long(&value, 8);
        }
    }
    Ok(sums)
}

/// Bpftool's output for each entry.
fn entries(lab: &Lab, map: &str) -> Result<Vec<Value>> {
    let pin = lab.pin(map).display().to_string();
    let text = shell::run("bpftool", &["-j", "map", "dump", "pinned", &pin])?;
    serde_json::from_str(&text).with_context(|| format!("dump of {map}: {text}"))
}

/// Bytes of a list as bpftool prints it: `["0x0a", …]`.
fn bytes(list: Option<&Value>) -> Result<Bytes> {
    let list = list.and_then(Value::as_array).context("no list of bytes")?;
    list.iter()
        .map(|byte| {
            let text = byte.as_str().context("no text")?;
            Ok(u8::from_str_radix(text.trim_start_matches("0x"), 16)?)
        })
        .collect()
}

/// Number of 32 bits at `offset`, in host order.
pub(crate) fn number(bytes: &[u8], offset: usize) -> u32 {
    let four = bytes
        .get(offset..offset + 4)
        .and_then(|bytes| bytes.try_into().ok());
    four.map_or(u32::MAX, u32::from_ne_bytes)
}

/// Number of 64 bits at `offset`, in host order.
pub(crate) fn long(bytes: &[u8], offset: usize) -> u64 {
    let eight = bytes
        .get(offset..offset + 8)
        .and_then(|bytes| bytes.try_into().ok());
    eight.map_or(u64::MAX, u64::from_ne_bytes)
}

pub(crate) fn joined(parts: &[&[u8]]) -> Bytes {
    parts.concat()
}

/// Number and MAC address of an interface.
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) mac: [u8; 6],
}

/// An interface of a namespace.
pub(crate) fn link(netns: &Netns, name: &str) -> Result<Link> {
    let text = netns.run("ip", &["-j", "link", "show", "dev", name])?;
    let links: Vec<Value> = serde_json::from_str(&text)?;
    let link = links.first().context("no link")?;
    let index = link.get("ifindex").and_then(Value::as_u64);
    let address = link.get("address").and_then(Value::as_str);
    let mut mac = [0; 6];
    let parts = address.context("address")?.split(':');
    for (byte, part) in mac.iter_mut().zip(parts) {
        *byte = u8::from_str_radix(part, 16)?;
    }
    Ok(Link {
        index: u32::try_from(index.context("ifindex")?)?,
        mac,
    })
}
