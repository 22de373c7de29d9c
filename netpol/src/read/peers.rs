//! The other side of a rule: pods by labels, addresses by blocks.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::{
    Checked, Refusal,
    fields::{Fields, list, text},
    selectors::selector,
};
use crate::policy::{Block, Namespaces, NotAPart, Peer, Peers, Warning};

/// The list at `path`; absent or empty, it means everyone.
pub(super) fn peers(
    path: &str,
    value: Option<&Value>,
    warnings: &mut Vec<Warning>,
) -> Checked<Peers> {
    let mut peers = Vec::new();
    for (n, value) in list(path, value)?.iter().enumerate() {
        peers.push(peer(&format!("{path}[{n}]"), value, warnings)?);
    }
    Ok(if peers.is_empty() {
        Peers::Any
    } else {
        Peers::Of(peers)
    })
}

fn peer(path: &str, value: &Value, warnings: &mut Vec<Warning>) -> Checked<Peer> {
    let known = ["podSelector", "namespaceSelector", "ipBlock"];
    let fields = Fields::of(path, value, &known)?;
    let select = |field: &str| {
        let value = fields.get(field);
        let selector = value.map(|value| selector(&format!("{path}.{field}"), value));
        selector.transpose()
    };
    let (pods, namespaces) = (select("podSelector")?, select("namespaceSelector")?);
    let block_path = format!("{path}.ipBlock");
    match (fields.get("ipBlock"), pods, namespaces) {
        (None, None, None) => {
            let remedy = "add podSelector, namespaceSelector or ipBlock; `podSelector: {}` means \
                          every pod of the namespace";
            Err(Refusal::new(path, "names no peer", remedy))
        }
        (None, pods, namespaces) => Ok(Peer::Pods {
            namespaces: namespaces.map_or(Namespaces::Own, Namespaces::Selected),
            pods: pods.unwrap_or_default(),
        }),
        (Some(value), None, None) => block(&block_path, value, warnings).map(Peer::Block),
        (Some(_), pods, _) => {
            let other = if pods.is_some() {
                "podSelector"
            } else {
                "namespaceSelector"
            };
            let reason = format!("stands beside {other}");
            let remedy = "put each into an element of its own: either one then allows";
            Err(Refusal::new(&block_path, &reason, remedy))
        }
    }
}

fn block(path: &str, value: &Value, warnings: &mut Vec<Warning>) -> Checked<Block> {
    let fields = Fields::of(path, value, &["cidr", "except"])?;
    let cidr_path = format!("{path}.cidr");
    let Some(cidr) = fields.get("cidr") else {
        let remedy = "add it, for example `cidr: 192.0.2.0/24`";
        return Err(Refusal::new(&cidr_path, "is missing", remedy));
    };
    let cidr = prefix(&cidr_path, cidr, warnings)?;
    let except_path = format!("{path}.except");
    let mut except = Vec::new();
    for (n, value) in list(&except_path, fields.get("except"))?.iter().enumerate() {
        except.push(prefix(&format!("{except_path}[{n}]"), value, warnings)?);
    }
    Block::new(path, cidr, &except).map_err(|NotAPart(at)| {
        let part = except.get(at).map_or(String::new(), IpNet::to_string);
        let (reason, remedy) = if except.get(at) == Some(&cidr) {
            let reason = format!("{part} is the whole block");
            (
                reason,
                "name a smaller part of the block, or remove the peer",
            )
        } else {
            let reason = format!("{part} is not inside {cidr}");
            (reason, "name a part of the block, or remove it")
        };
        Refusal::new(&format!("{except_path}[{at}]"), &reason, remedy)
    })
}

/// A block in CIDR notation, without its host bits.
fn prefix(path: &str, value: &Value, warnings: &mut Vec<Warning>) -> Checked<IpNet> {
    let written = text(path, value)?;
    let Ok(prefix) = written.parse::<IpNet>() else {
        let reason = format!("`{written}` is not a block of addresses");
        let remedy = match written.parse() {
            Ok(IpAddr::V4(address)) => format!("write {address}/32 for this address"),
            Ok(IpAddr::V6(address)) => format!("write {address}/128 for this address"),
            Err(_) => "write for example 10.0.0.0/8 or 2001:db8::/32".to_owned(),
        };
        return Err(Refusal::new(path, &reason, &remedy));
    };
    let truncated = prefix.trunc();
    if truncated != prefix {
        warnings.push(Warning {
            field: path.to_owned(),
            text: format!("{written} has host bits and is read as {truncated}; write {truncated}"),
        });
    }
    Ok(truncated)
}
