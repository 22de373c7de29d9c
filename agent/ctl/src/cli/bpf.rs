//! `bpf … list`: the pinned maps themselves, read without an agent.

mod tunnel;

use std::{
    hash::Hash,
    net::{IpAddr, SocketAddr},
};

use agent_core::policy::trace::{port_range, protocol_name};
use anyhow::Result;
use daemon::command_line::table::table;
use holdfast_agent::{
    admin::client::Client,
    config::args::{BpfArgs, BpfCommand, BpfList, BpfPolicy, SocketArgs},
};
use serde::Serialize;
use shared_maps::{
    EndpointId,
    conntrack::{CtKey, CtValue, DIR_IN, NAME_ANY4, NAME_ANY6, NAME_TCP4, NAME_TCP6, RELATED},
    policy::EGRESS,
    user::{Access, Globals, Map, MapError, MapKind, Record, address_of, lxc_key, monotonic_ns},
};

use super::show::print;

/// Carries out a `bpf` command.
pub(crate) async fn run(command: &BpfCommand) -> Result<()> {
    match command {
        BpfCommand::Ipcache(BpfList::List(args)) => ipcache(args),
        BpfCommand::Lxc(BpfList::List(args)) => lxc(args),
        BpfCommand::Policy(BpfPolicy::List {
            endpoint,
            socket,
            bpf,
        }) => policy(number(&endpoint.endpoint, socket, bpf).await?, bpf),
        BpfCommand::Ct(BpfList::List(args)) => conntrack(args),
        BpfCommand::World(BpfList::List(args)) => tunnel::world(args),
        BpfCommand::Sources(BpfList::List(args)) => tunnel::sources(args),
    }
}

/// The number of an endpoint. An endpoint given by number or address needs no running agent.
async fn number(endpoint: &str, socket: &SocketArgs, args: &BpfArgs) -> Result<u16> {
    if let Ok(address) = endpoint.parse::<IpAddr>() {
        let lxc = Globals::new(&args.bpf_root).lxc(Access::ReadOnly)?;
        if let Some(value) = lxc.get(&lxc_key(address))? {
            return Ok(value.lxc_id);
        }
    }
    super::number_of(&Client::new(&socket.admin_socket), endpoint).await
}

#[derive(Serialize)]
struct IpcacheLine {
    prefix: String,
    identity: u32,
}

fn ipcache(args: &BpfArgs) -> Result<()> {
    let entries = Globals::new(&args.bpf_root)
        .ipcache(Access::ReadOnly)?
        .entries()?;
    let mut lines: Vec<(IpAddr, u32, u32)> = entries
        .found
        .iter()
        .map(|(key, value)| {
            let len = key
                .prefix_len
                .saturating_sub(shared_maps::ipcache::STATIC_PREFIX_BITS);
            (address(key.family, key.ip), len, value.sec_identity)
        })
        .collect();
    lines.sort_unstable();
    let lines: Vec<IpcacheLine> = lines
        .into_iter()
        .map(|(ip, len, identity)| IpcacheLine {
            prefix: format!("{ip}/{len}"),
            identity,
        })
        .collect();
    print(args.form.output, &lines, |lines| {
        table(
            lines,
            [
                ("PREFIX", |l| l.prefix.clone()),
                ("IDENTITY", |l| l.identity.to_string()),
            ],
        )
    })
}

#[derive(Serialize)]
struct LxcLine {
    address: IpAddr,
    endpoint: u16,
    identity: u32,
    ifindex: u32,
    flags: u32,
    mac: String,
    node_mac: String,
}

fn lxc(args: &BpfArgs) -> Result<()> {
    let entries = Globals::new(&args.bpf_root)
        .lxc(Access::ReadOnly)?
        .entries()?;
    let mut lines: Vec<LxcLine> = entries
        .found
        .iter()
        .map(|(key, value)| LxcLine {
            address: address(key.family, key.ip),
            endpoint: value.lxc_id,
            identity: value.sec_id,
            ifindex: value.ifindex,
            flags: value.flags,
            mac: mac(value.mac),
            node_mac: mac(value.node_mac),
        })
        .collect();
    lines.sort_by_key(|line| line.address);
    print(args.form.output, &lines, |lines| {
        table(
            lines,
            [
                ("ADDRESS", |l| l.address.to_string()),
                ("ENDPOINT", |l| l.endpoint.to_string()),
                ("IDENTITY", |l| l.identity.to_string()),
                ("IFINDEX", |l| l.ifindex.to_string()),
                ("FLAGS", |l| format!("{:#x}", l.flags)),
                ("MAC", |l| l.mac.clone()),
                ("NODE-MAC", |l| l.node_mac.clone()),
            ],
        )
    })
}

#[derive(Serialize)]
struct PolicyLine {
    direction: &'static str,
    identity: u32,
    protocol: String,
    port: String,
    verdict: &'static str,
    proxy_port: u16,
    precedence: u32,
}

fn policy(endpoint: u16, args: &BpfArgs) -> Result<()> {
    let map = Globals::new(&args.bpf_root).policy(EndpointId(endpoint), Access::ReadOnly)?;
    let mut entries = map.entries()?.found;
    entries.sort_by_key(|(key, value)| (key.egress, std::cmp::Reverse(value.precedence), *key));
    let lines: Vec<PolicyLine> = entries
        .iter()
        .map(|(key, value)| PolicyLine {
            direction: if key.egress == EGRESS {
                "egress"
            } else {
                "ingress"
            },
            identity: key.sec_label,
            protocol: protocol_name(key.protocol),
            port: port_range(key.dport.get(), key.lpm_len()),
            verdict: match (value.is_deny(), value.proxy_port.get()) {
                (true, _) => "deny",
                (false, 0) => "allow",
                (false, _) => "redirect",
            },
            proxy_port: value.proxy_port.get(),
            precedence: value.precedence,
        })
        .collect();
    print(args.form.output, &lines, |lines| {
        table(
            lines,
            [
                ("DIRECTION", |l| l.direction.to_owned()),
                ("IDENTITY", |l| match l.identity {
                    0 => "any".to_owned(),
                    identity => identity.to_string(),
                }),
                ("PROTOCOL", |l| l.protocol.clone()),
                ("PORT", |l| l.port.clone()),
                ("VERDICT", |l| l.verdict.to_owned()),
                ("PROXY-PORT", |l| l.proxy_port.to_string()),
                ("PRECEDENCE", |l| format!("{:#x}", l.precedence)),
            ],
        )
    })
}

#[derive(Serialize)]
struct CtLine {
    protocol: String,
    direction: &'static str,
    from: String,
    to: String,
    expires_in_seconds: u64,
    packets: u64,
    bytes: u64,
    source_identity: u32,
}

fn conntrack(args: &BpfArgs) -> Result<()> {
    let maps = Globals::new(&args.bpf_root);
    let mut lines = Vec::new();
    let all = [
        read::<[u8; 4]>(&maps, NAME_TCP4, &mut lines),
        read::<[u8; 4]>(&maps, NAME_ANY4, &mut lines),
        read::<[u8; 16]>(&maps, NAME_TCP6, &mut lines),
        read::<[u8; 16]>(&maps, NAME_ANY6, &mut lines),
    ];
    // An agent of one address family pins the maps of that family only.
    let is_missing = |read: &Result<(), MapError>| matches!(read, Err(MapError::NotPinned(_)));
    let all_missing = all.iter().all(is_missing);
    for read in all {
        if all_missing || !is_missing(&read) {
            read?;
        }
    }
    print(args.form.output, &lines, |lines| {
        table(
            lines,
            [
                ("PROTOCOL", |l| l.protocol.clone()),
                ("DIRECTION", |l| l.direction.to_owned()),
                ("FROM", |l| l.from.clone()),
                ("TO", |l| l.to.clone()),
                ("EXPIRES", |l| format!("{} s", l.expires_in_seconds)),
                ("PACKETS", |l| l.packets.to_string()),
                ("BYTES", |l| l.bytes.to_string()),
                ("IDENTITY", |l| l.source_identity.to_string()),
            ],
        )
    })
}

fn read<A>(maps: &Globals, name: &str, lines: &mut Vec<CtLine>) -> Result<(), MapError>
where
    A: Copy + Eq + Hash + Into<IpAddr>,
    CtKey<A>: Record,
{
    let now = monotonic_ns() / 1_000_000_000;
    let path = maps.path(name);
    let map: Map<CtKey<A>, CtValue> = Map::open(&path, MapKind::LruHash, Access::ReadOnly)?;
    for (key, value) in map.entries()?.found {
        let (from, to) = (key.daddr, key.saddr);
        lines.push(CtLine {
            protocol: protocol_name(key.nexthdr),
            direction: match key.flags {
                f if f & RELATED != 0 => "related",
                f if f & DIR_IN != 0 => "in",
                _ => "out",
            },
            from: SocketAddr::new(from.into(), key.sport.get()).to_string(),
            to: SocketAddr::new(to.into(), key.dport.get()).to_string(),
            expires_in_seconds: u64::from(value.lifetime).saturating_sub(now),
            packets: value.packets,
            bytes: value.bytes,
            source_identity: value.src_sec_id,
        });
    }
    Ok(())
}

fn address(family: u8, ip: [u8; 16]) -> IpAddr {
    address_of(family, ip).unwrap_or(ip.into())
}

fn mac(word: u64) -> String {
    let [a, b, c, d, e, f, ..] = word.to_le_bytes();
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}
