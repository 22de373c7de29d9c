//! `bpftool map dump pinned …` of each map shows the documented bytes
//! (layouts of Cilium's `pkg/maps` and `bpf/lib/eps.h`).
use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Lab, Netns, Query, shell, with_lab};
use serde_json::Value;

type Bytes = Vec<u8>;

#[test]
fn pinned_maps_show_the_documented_bytes() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        let _programs = lab.start(&good_names())?;
        let id = u16::try_from(lab.endpoint_id(&lab.a)?)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a
            .ask(&Query::aaaa("www.good.test", DNS6))?
            .expect(web6(10))?;
        let _stream = lab.a.stream(at(web4(10), 80))?;
        let _stream6 = lab.a.stream(at(web6(10), 80))?;

        // cilium_lxc: address, family, zero; ifindex, 0, id, flags, 0, MACs, identity.
        shape(lab, "cilium_lxc", "hash", 20, 48, 65_535, 0x81)?;
        let lxc = dump(lab, "cilium_lxc")?;
        let v4 = joined(&[&lab.a.v4.octets(), &[0; 12], &[1, 0, 0, 0]]);
        let v6 = joined(&[&lab.a.v6.octets(), &[2, 0, 0, 0]]);
        let ends = [
            link(&lab.a.netns, "eth0")?,
            link(&lab.node, &lab.a.host_side)?,
        ];
        let ifindex = ends[1].index;
        let macs = joined(&[&ends[0].mac, &[0; 2], &ends[1].mac, &[0; 2]]);
        let identity = number(lxc.get(&v4).context("no IPv4 entry in cilium_lxc")?, 32);
        let known = lab.identities()?;
        let labels = known.get(&u64::from(identity));
        ensure!(
            (256..65_536).contains(&identity) && labels.is_some_and(|l| l.contains("app=web")),
            "identity {identity} is not the pod's: {known:?}"
        );
        for key in [&v4, &v6] {
            let value = lxc
                .get(key)
                .with_context(|| format!("{key:02x?} not in cilium_lxc"))?;
            ensure!(number(value, 0) == ifindex, "ifindex in {value:02x?}");
            ensure!(value.get(4..8) == Some(&joined(&[&[0, 0], &id.to_ne_bytes()])[..]));
            ensure!(number(value, 8) == 0, "flags in {value:02x?}");
            ensure!(
                value.get(16..32) == Some(&macs[..]),
                "MACs in {value:02x?}, not {macs:02x?}"
            );
            ensure!(number(value, 32) == identity, "identity in {value:02x?}");
            ensure!(
                value.get(40..) == Some(&[0; 8][..]),
                "padding in {value:02x?}"
            );
        }

        // cilium_ipcache_v2: prefix length, 0, 0, family, address; identity, tunnel, …
        shape(lab, "cilium_ipcache_v2", "lpm_trie", 24, 24, 512_000, 0x81)?;
        let ipcache = dump(lab, "cilium_ipcache_v2")?;
        let key4 = joined(&[
            &64_u32.to_ne_bytes(),
            &[0, 0, 0, 1],
            &[203, 0, 113, 10],
            &[0; 12],
        ]);
        let std::net::IpAddr::V6(web) = web6(10) else {
            unreachable!()
        };
        let key6 = joined(&[&160_u32.to_ne_bytes(), &[0, 0, 0, 2], &web.octets()]);
        let name = number(ipcache.get(&key4).context("learned IPv4 address")?, 0);
        ensure!(
            name >> 24 == 1,
            "identity {name} of a name is not node-local"
        );
        for key in [&key4, &key6] {
            let value = ipcache.get(key).with_context(|| format!("{key:02x?}"))?;
            // On a dual-stack node the families differ in their world label.
            ensure!(
                number(value, 0) >> 24 == 1,
                "{value:02x?}: not a node-local identity"
            );
            ensure!(
                value.get(4..) == Some(&[0; 20][..]),
                "tunnel, key, flags in {value:02x?}"
            );
        }

        // Policy map: prefix length, identity, direction, protocol, port;
        // proxy port, flags, auth, precedence, cookie.
        let map = format!("cilium_policy_v2_{id:05}");
        shape(lab, &map, "lpm_trie", 12, 12, 16_384, 0x81)?;
        let policy = dump(lab, &map)?;
        let entry = |identity: u32, protocol: u8, port: u16| {
            let key = joined(&[
                &64_u32.to_ne_bytes(),
                &identity.to_ne_bytes(),
                &[1, protocol],
                &port.to_be_bytes(),
            ]);
            policy
                .get(&key)
                .with_context(|| format!("{key:02x?} not in {map}: {policy:02x?}"))
        };
        let full = 24 << 3;
        let allow = joined(&[&[0, 0, full, 0], &0xffff_ff01_u32.to_ne_bytes(), &[0; 4]]);
        ensure!(
            *entry(name, 6, 80)? == allow,
            "allow: {:02x?}",
            entry(name, 6, 80)?
        );
        let server = number(
            ipcache
                .get(&joined(&[
                    &64_u32.to_ne_bytes(),
                    &[0, 0, 0, 1],
                    &[192, 0, 2, 53],
                    &[0; 12],
                ]))
                .context("the DNS server's prefix")?,
            0,
        );
        for protocol in [6, 17] {
            let value = entry(server, protocol, 53)?;
            let redirect = joined(&[
                &10_094_u16.to_be_bytes(),
                &[full, 0],
                &0xffff_ff86_u32.to_ne_bytes(),
                &[0; 4],
            ]);
            ensure!(*value == redirect, "redirect: {value:02x?}");
        }

        // Conntrack: addresses turned around, ports as they were.
        shape(lab, "cilium_ct4_global", "lru_hash", 14, 56, 131_072, 0)?;
        shape(lab, "cilium_ct_any4_global", "lru_hash", 14, 56, 131_072, 0)?;
        shape(lab, "cilium_ct6_global", "lru_hash", 38, 56, 131_072, 0)?;
        shape(lab, "cilium_ct_any6_global", "lru_hash", 38, 56, 131_072, 0)?;
        let connections = dump(lab, "cilium_ct4_global")?;
        let head = joined(&[
            &lab.a.v4.octets(),
            &[203, 0, 113, 10],
            &80_u16.to_be_bytes(),
        ]);
        let found = connections
            .iter()
            .any(|(key, _)| key.starts_with(&head) && key.get(12..) == Some(&[6, 0][..]));
        ensure!(
            found,
            "the open connection is not in cilium_ct4_global: {connections:02x?}"
        );
        Ok(())
    });
}

fn shape(
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

fn dump(lab: &Lab, map: &str) -> Result<BTreeMap<Bytes, Bytes>> {
    let pin = lab.pin(map).display().to_string();
    let text = shell::run("bpftool", &["-j", "map", "dump", "pinned", &pin])?;
    let entries: Vec<Value> = serde_json::from_str(&text)?;
    entries
        .iter()
        .map(|entry| Ok((bytes(entry.get("key"))?, bytes(entry.get("value"))?)))
        .collect()
}

/// `["0x0a", …]`
fn bytes(list: Option<&Value>) -> Result<Bytes> {
    let list = list.and_then(Value::as_array).context("no list of bytes")?;
    list.iter()
        .map(|byte| {
            let text = byte.as_str().context("no text")?;
            Ok(u8::from_str_radix(text.trim_start_matches("0x"), 16)?)
        })
        .collect()
}

/// Host-order number at `offset`.
fn number(bytes: &[u8], offset: usize) -> u32 {
    let four = bytes
        .get(offset..offset + 4)
        .and_then(|bytes| bytes.try_into().ok());
    four.map_or(u32::MAX, u32::from_ne_bytes)
}

fn joined(parts: &[&[u8]]) -> Bytes {
    parts.concat()
}

struct Link {
    index: u32,
    mac: [u8; 6],
}

fn link(netns: &Netns, name: &str) -> Result<Link> {
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
