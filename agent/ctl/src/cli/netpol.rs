//! `netpol status`, `pods` and `why`.

mod why;

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use holdfast_agent::{
    admin::{client::Client, query::encode},
    config::netpol_args::{NetpolClientArgs, NetpolCommand, NetpolWhyArgs},
    netpol::model::{NetpolPod, NetpolStatus, NetpolWhy},
};

use daemon::command_line::{
    health::Health,
    table::{list, table},
};

use super::show::{counted, print};

/// Carries out every command except `netpol run`.
pub(crate) async fn run(command: NetpolCommand) -> Result<()> {
    match command {
        NetpolCommand::Run(_) => Ok(()),
        NetpolCommand::Status(args) => {
            let answer: NetpolStatus = client(&args).get("/v1/netpol/status").await?;
            print(args.form.output, &answer, status)
        }
        NetpolCommand::Health { what, client: args } => {
            let status: NetpolStatus = client(&args).get("/v1/netpol/status").await?;
            let healthy = what.live || status.ready;
            let in_force = "the policies are not in force".to_owned();
            let missing = match healthy {
                true => Vec::new(),
                false => [vec![in_force], status.problems].concat(),
            };
            super::show_health(args.form.output, &Health { healthy, missing })
        }
        NetpolCommand::Pods(args) => {
            let answer: Vec<NetpolPod> = client(&args).get("/v1/netpol/pods").await?;
            print(args.form.output, &answer, |answer| pods(answer))
        }
        NetpolCommand::Why(args) => ask(&args).await,
    }
}

fn client(args: &NetpolClientArgs) -> Client {
    Client::of_netpol(&args.admin_socket)
}

async fn ask(args: &NetpolWhyArgs) -> Result<()> {
    let (from, to) = (&args.from, &args.to.host);
    let port = match (args.port, args.to.port) {
        (Some(port), Some(of_to)) if port != of_to => {
            bail!("--port {port} is not the port of {to}, {of_to}: leave one of them out")
        }
        (port, of_to) => port.or(of_to),
    };
    let mut path = format!("/v1/netpol/why?from={}&to={}", encode(from), encode(to));
    if let Some(port) = port {
        path.push_str(&format!("&port={}", encode(&port.to_string())));
    }
    let answer: NetpolWhy = client(&args.client).get(&path).await?;
    print(args.client.form.output, &answer, why::text)?;
    match (answer.allowed, answer.is_denied) {
        (true, _) => Ok(()),
        (false, true) => bail!("{from} may not connect to {to}"),
        (false, false) => {
            bail!("whether {from} may connect to {to} is not known: the policies are not in force")
        }
    }
}

fn status(status: &NetpolStatus) -> String {
    let ready = match status.ready {
        true => "yes",
        false => "no: see PROBLEM",
    };
    let mut rows = vec![
        (
            "Process",
            format!(
                "holdfast-agent {} netpol run, pid {}",
                status.version, status.pid
            ),
        ),
        ("Node", status.node.clone()),
        ("Ready", ready.to_owned()),
        (
            "NetworkPolicies",
            format!(
                "{} in force, {} refused; {} of {} restricted",
                status.policies,
                counted(status.refused.len(), "document", "documents"),
                status.restricted,
                counted(status.pods, "pod", "pods")
            ),
        ),
        ("nftables", kernel_table(status)),
    ];
    if let Some(dropped) = &status.dropped {
        rows.push(("Dropped packets", drops(dropped)));
    }
    let kinds = status.not_enforced.iter().filter(|(_, count)| **count > 0);
    let kinds: Vec<String> = kinds
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    if !kinds.is_empty() {
        rows.push(("Not enforced here", kinds.join(", ")));
    }
    if let Some(exports) = &status.exports {
        let written = match exports.written_seconds {
            Some(seconds) => format!("as of {seconds} s ago"),
            None => "not written yet".to_owned(),
        };
        rows.push(("Exports", format!("{}, {written}", exports.directory)));
    }
    if let Some(cluster) = &status.cluster {
        rows.push(("Cluster", super::show::cluster_source(cluster)));
    }
    let lines = [
        ("Refused", &status.refused),
        ("PROBLEM", &status.problems),
        ("WARNING", &status.warnings),
    ];
    for (name, texts) in lines {
        rows.extend(texts.iter().map(|text| (name, text.clone())));
    }
    super::show::aligned(&rows)
}

/// Size of the kernel's table, its last change, and its repairs.
fn kernel_table(status: &NetpolStatus) -> String {
    let table = &status.table;
    let changed = match table.changed_seconds {
        Some(seconds) => format!(
            "last change {seconds} s ago, {}",
            counted(table.changed_elements, "element", "elements")
        ),
        None if table.is_begun => "as the last run left it".to_owned(),
        None => "not compared yet".to_owned(),
    };
    let repairs = usize::try_from(status.repairs).unwrap_or(usize::MAX);
    format!(
        "{}, {}, {}; {changed}; repaired {}",
        counted(table.chains, "chain", "chains"),
        counted(table.groups, "group", "groups"),
        counted(table.addresses, "address", "addresses"),
        counted(repairs, "time", "times")
    )
}

/// Counts of dropped packets in words, by the names of their counters.
fn drops(dropped: &BTreeMap<String, u64>) -> String {
    let of = |counter: &str| dropped.get(counter).copied().unwrap_or(0);
    let (ingress, egress, spoofed) = (of("dropped_in"), of("dropped_out"), of("spoofed"));
    format!(
        "{ingress} by ingress policy, {egress} by egress policy, {spoofed} with a false source, \
         {} in frames that rules do not see, {} of TCP connections that conntrack does not know, \
         {} to tunnels of the node, {} to groups and broadcast addresses",
        of("frames"),
        of("tcp_middle"),
        of("tunnels"),
        of("to_all")
    )
}

fn pods(pods: &[NetpolPod]) -> String {
    let addresses = |pod: &NetpolPod| {
        let addresses = pod.addresses.iter();
        let addresses: Vec<String> = addresses
            .map(|(address, way)| format!("{address} ({way})"))
            .collect();
        list(&addresses)
    };
    table(
        pods,
        [
            ("POD", |pod| pod.pod.clone()),
            ("ADDRESSES", addresses),
            ("INGRESS", |pod| list(&pod.ingress)),
            ("EGRESS", |pod| list(&pod.egress)),
        ],
    )
}
