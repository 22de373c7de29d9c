//! `bpf world list` and `bpf sources list`: the maps of the tunnel between nodes.

use std::net::Ipv4Addr;

use anyhow::{Result, anyhow};
use daemon::command_line::table::table;
use holdfast_agent::config::args::BpfArgs;
use ipnet::Ipv4Net;
use serde::Serialize;
use shared_maps::{
    sources::{self, SourceKey, SourceValue},
    user::{Access, Globals, Map, MapError, MapKind, Record, monotonic_ns},
    world::{self, WorldKey},
};

use crate::cli::show::print;

/// Blocks outside of the cluster.
pub(super) fn world(args: &BpfArgs) -> Result<()> {
    let map = open::<WorldKey, u8>(args, world::NAME, MapKind::LpmTrie)?;
    let found = map.entries()?.found.into_iter();
    let mut blocks: Vec<Ipv4Net> = found.filter_map(|(key, _)| block(key)).collect();
    blocks.sort_unstable();
    print(args.form.output, &blocks, |blocks| {
        table(blocks, [("BLOCK", |block: &Ipv4Net| block.to_string())])
    })
}

fn block(key: WorldKey) -> Option<Ipv4Net> {
    let len = u8::try_from(key.prefix_len).ok()?;
    Ipv4Net::new(Ipv4Addr::from(key.ip), len).ok()
}

#[derive(Serialize)]
struct SourceLine {
    address: Ipv4Addr,
    identity: u32,
    age_ms: u64,
    counts: bool,
}

/// Senders of packets that came by the tunnel.
pub(super) fn sources(args: &BpfArgs) -> Result<()> {
    let map = open::<SourceKey, SourceValue>(args, sources::NAME, MapKind::LruHash)?;
    let now = sources::tick(monotonic_ns());
    let found = map.entries()?.found.into_iter();
    let mut lines: Vec<SourceLine> = found
        .map(|(key, value)| SourceLine {
            address: Ipv4Addr::from(key.ip),
            identity: value.identity,
            age_ms: value.age_ms(now),
            counts: value.is_fresh(now),
        })
        .collect();
    lines.sort_by_key(|line| line.address);
    print(args.form.output, &lines, |lines| {
        table(
            lines,
            [
                ("ADDRESS", |l| l.address.to_string()),
                ("IDENTITY", |l| l.identity.to_string()),
                ("AGE", |l| format!("{} ms", l.age_ms)),
                ("COUNTS", |l| if l.counts { "yes" } else { "no" }.to_owned()),
            ],
        )
    })
}

fn open<K: Record, V: Record>(args: &BpfArgs, name: &str, kind: MapKind) -> Result<Map<K, V>> {
    let path = Globals::new(&args.bpf_root).path(name);
    Map::open(&path, kind, Access::ReadOnly).map_err(|error| match error {
        MapError::NotPinned(path) => anyhow!(
            "map {} is not pinned: the agent of this node runs without --high-scale-ipcache, or not at all",
            path.display()
        ),
        other => other.into(),
    })
}
