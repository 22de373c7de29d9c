//! Judges one packet by every rendering.

use std::{collections::BTreeSet, net::IpAddr};

use agent_core::policy::trace::Port;
use anyhow::{Result, bail};
use daemon::command_line::{failure, output::Output};
use netpol::{
    packet::{Packet, PacketPorts},
    policy::Protocol,
    verdict::Verdict,
};
use serde::Serialize;

use super::{
    super::show::print,
    cluster::{Cluster, Side},
    text,
};

/// Source port of the packet. Renderings do not look at it.
const SENDER_PORT: u16 = 40_000;

#[derive(Serialize)]
struct Judged {
    from: String,
    to: String,
    port: String,
    passes: bool,
    agree: bool,
    verdicts: Vec<OnNode>,
}

/// Verdict of a node's rendering. A node judges the sides that are its own pods.
#[derive(Serialize)]
struct OnNode {
    node: String,
    rendering: &'static str,
    passes: bool,
    by: Vec<String>,
}

/// Prints the verdicts; fails if the renderings disagree.
pub(super) fn judge(
    cluster: &Cluster,
    (from, to, port): (&str, &str, Port),
    output: Output,
) -> Result<()> {
    let (source, destination) = (cluster.side(from, "--pod")?, cluster.side(to, "--to")?);
    let mut judged = Vec::new();
    for one in &source.addresses {
        let others = destination.addresses.iter();
        for other in others.filter(|other| other.is_ipv4() == one.is_ipv4()) {
            judged.push(one_pair(
                cluster,
                (&source, *one),
                (&destination, *other),
                port,
            )?);
        }
    }
    if judged.is_empty() {
        bail!("{from} and {to} have no addresses of one family");
    }
    print(output, &judged, |judged| judged.iter().map(lines).collect())?;
    match judged.iter().all(|judged| judged.agree) {
        true => Ok(()),
        false => bail!("the renderings disagree"),
    }
}

fn one_pair(
    cluster: &Cluster,
    (source, from): (&Side, IpAddr),
    (destination, to): (&Side, IpAddr),
    port: Port,
) -> Result<Judged> {
    let packet = packet(from, to, port);
    let mut world = cluster.world();
    let nodes: BTreeSet<&String> = [&source.node, &destination.node]
        .into_iter()
        .flatten()
        .collect();
    if nodes.is_empty() {
        bail!("neither {from} nor {to} is the address of a pod");
    }
    let (mut verdicts, mut passes, mut agree) = (Vec::new(), true, true);
    for name in nodes {
        let node = cluster.render(name)?;
        world.set_aside = node.set_aside.keys().cloned().collect();
        let read = world.judge(&packet, |pod| pod.node.as_deref() == Some(name));
        passes &= read.passes;
        let row = |rendering, verdict: &Verdict<'_>| OnNode {
            node: text::name(name).to_owned(),
            rendering,
            passes: verdict.passes,
            by: verdict.by.iter().map(ToString::to_string).collect(),
        };
        verdicts.push(row("reading", &read));
        for (rendering, verdict) in node.judge(&packet) {
            agree &= verdict.passes == read.passes;
            verdicts.push(row(rendering, &verdict));
        }
        if let Err(refused) = &node.sessions {
            let note = format!("no session rules: {refused}");
            failure::note("holdfast-agent", &note);
        }
    }
    let shown = |side: &Side, address| match &side.name {
        Some(name) => format!("{name} ({address})"),
        None => format!("{address}"),
    };
    Ok(Judged {
        from: shown(source, from),
        to: shown(destination, to),
        port: port.to_string(),
        passes,
        agree,
        verdicts,
    })
}

/// The first packet of a connection to `port`.
fn packet(source: IpAddr, destination: IpAddr, port: Port) -> Packet {
    let protocol = Protocol::ALL
        .into_iter()
        .find(|known| known.number() == port.protocol);
    Packet {
        source,
        destination,
        ports: protocol.map(|protocol| PacketPorts {
            protocol,
            source: SENDER_PORT,
            destination: port.number,
        }),
    }
}

fn lines(judged: &Judged) -> String {
    let verdict = match (judged.agree, judged.passes) {
        (false, _) => "the renderings disagree",
        (true, true) => "passes",
        (true, false) => "is dropped",
    };
    let mut text = format!(
        "{} to {}, {}: {verdict}\n",
        judged.from, judged.to, judged.port
    );
    for row in &judged.verdicts {
        let state = if row.passes { "passes" } else { "DROPPED" };
        let by = row.by.join("; ");
        text.push_str(&format!(
            "  {state:7}  {:8}  on {}: {by}\n",
            row.rendering, row.node
        ));
    }
    text
}
