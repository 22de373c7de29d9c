//! The other side of a rule: pods by labels, and addresses by blocks.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{only, selectors::selector};
use crate::{
    field::{Checked, Field},
    policy::{Block, Namespaces, NotAPart, Peer, Peers, Warning},
};

/// A list of peers. If it is absent or empty, it means everyone.
pub(super) fn peers(field: &Field<'_>, warnings: &mut Vec<Warning>) -> Checked<Peers> {
    let peers = field.items()?.map(|item| peer(&item, warnings));
    let peers = peers.collect::<Checked<Vec<Peer>>>()?;
    Ok(if peers.is_empty() {
        Peers::Any
    } else {
        Peers::Of(peers)
    })
}

fn peer(field: &Field<'_>, warnings: &mut Vec<Warning>) -> Checked<Peer> {
    only(field, &["podSelector", "namespaceSelector", "ipBlock"])?;
    let select = |name: &str| {
        let selected = field.get(name).present();
        selected.map(|selected| selector(&selected)).transpose()
    };
    let (pods, namespaces) = (select("podSelector")?, select("namespaceSelector")?);
    match (field.get("ipBlock").present(), pods, namespaces) {
        (None, None, None) => {
            let remedy = "add podSelector, namespaceSelector or ipBlock; `podSelector: {}` means \
                          every pod of the namespace";
            field.refuse("names no peer", remedy)
        }
        (None, pods, namespaces) => Ok(Peer::Pods {
            namespaces: namespaces.map_or(Namespaces::Own, Namespaces::Selected),
            pods: pods.unwrap_or_default(),
        }),
        (Some(written), None, None) => block(&written, warnings).map(Peer::Block),
        (Some(written), pods, _) => {
            let other = match pods {
                Some(_) => "podSelector",
                None => "namespaceSelector",
            };
            let remedy = "put each into an element of its own: either one then allows";
            written.refuse(format!("stands beside {other}"), remedy)
        }
    }
}

fn block(field: &Field<'_>, warnings: &mut Vec<Warning>) -> Checked<Block> {
    only(field, &["cidr", "except"])?;
    let cidr = field.get("cidr");
    let cidr = cidr.required("add it, for example `cidr: 192.0.2.0/24`")?;
    let cidr = prefix(&cidr, warnings)?;
    let except = field.get("except");
    let parts = except.items()?.map(|part| prefix(&part, warnings));
    let parts = parts.collect::<Checked<Vec<IpNet>>>()?;
    Block::new(&field.path, cidr, &parts).map_err(|NotAPart(at)| {
        let part = parts.get(at).map_or(String::new(), IpNet::to_string);
        let (reason, remedy) = if parts.get(at) == Some(&cidr) {
            (
                format!("{part} is the whole block"),
                "name a smaller part of the block, or remove the peer",
            )
        } else {
            (
                format!("{part} is not inside {cidr}"),
                "name a part of the block, or remove it",
            )
        };
        except.nth(at).fault(reason, remedy)
    })
}

/// A block in CIDR notation, without its host bits.
fn prefix(field: &Field<'_>, warnings: &mut Vec<Warning>) -> Checked<IpNet> {
    let written = field.text()?;
    let Ok(prefix) = written.parse::<IpNet>() else {
        let reason = format!("`{written}` is not a block of addresses");
        let remedy = match written.parse() {
            Ok(IpAddr::V4(address)) => format!("write {address}/32 for this address"),
            Ok(IpAddr::V6(address)) => format!("write {address}/128 for this address"),
            Err(_) => "write for example 10.0.0.0/8 or 2001:db8::/32".to_owned(),
        };
        return field.refuse(reason, remedy);
    };
    let truncated = prefix.trunc();
    if truncated != prefix {
        warnings.push(Warning {
            field: field.path.clone(),
            text: format!("{written} has host bits and is read as {truncated}; write {truncated}"),
        });
    }
    Ok(truncated)
}
