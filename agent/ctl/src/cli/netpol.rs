//! `netpol status`, `pods` and `why`.

use anyhow::{Result, bail};
use holdfast_agent::{
    admin::{client::Client, query::encode},
    config::netpol_args::{NetpolClientArgs, NetpolCommand, NetpolWhyArgs},
    netpol::model::{IpSide, NetpolPod, NetpolStatus, NetpolWhy, SideView},
};

use super::{
    show::print,
    table::{list, table},
};

/// Carries out every command except `netpol run`.
pub(crate) async fn run(command: NetpolCommand) -> Result<()> {
    match command {
        NetpolCommand::Run(_) => Ok(()),
        NetpolCommand::Status(args) => {
            let answer: NetpolStatus = client(&args).get("/v1/netpol/status").await?;
            print(args.output, &answer, status)
        }
        NetpolCommand::Pods(args) => {
            let answer: Vec<NetpolPod> = client(&args).get("/v1/netpol/pods").await?;
            print(args.output, &answer, |answer| pods(answer))
        }
        NetpolCommand::Why(args) => ask(&args).await,
    }
}

fn client(args: &NetpolClientArgs) -> Client {
    Client::of_netpol(&args.admin_socket)
}

async fn ask(args: &NetpolWhyArgs) -> Result<()> {
    let (from, to) = (encode(&args.from), encode(&args.to));
    let mut path = format!("/v1/netpol/why?from={from}&to={to}");
    if let Some(port) = args.port {
        path.push_str(&format!("&port={}", encode(&port.to_string())));
    }
    let answer: NetpolWhy = client(&args.client).get(&path).await?;
    print(args.client.output, &answer, why)?;
    match answer.allowed {
        true => Ok(()),
        false => bail!("{} may not connect to {}", args.from, args.to),
    }
}

fn status(status: &NetpolStatus) -> String {
    let table = &status.table;
    let ready = match status.ready {
        true => "yes",
        false => "no: see PROBLEM",
    };
    let changed = match table.changed_seconds {
        Some(seconds) => format!(
            "last change {seconds} s ago, {} elements",
            table.changed_elements
        ),
        None if table.is_begun => "as the last run left it".to_owned(),
        None => "not compared yet".to_owned(),
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
                "{} in force, {} documents refused; {} of {} pods restricted",
                status.policies,
                status.refused.len(),
                status.restricted,
                status.pods
            ),
        ),
        (
            "nftables",
            format!(
                "{} chains, {} groups, {} addresses; {changed}; repaired {} times",
                table.chains, table.groups, table.addresses, status.repairs
            ),
        ),
    ];
    if let Some(dropped) = &status.dropped {
        let of = |counter: &str| dropped.get(counter).copied().unwrap_or(0);
        let (ingress, egress, spoofed) = (of("dropped_in"), of("dropped_out"), of("spoofed"));
        let text = format!(
            "{ingress} by ingress policy, {egress} by egress policy, {spoofed} with a false source"
        );
        rows.push(("Dropped packets", text));
    }
    let kinds = status.not_enforced.iter().filter(|(_, count)| **count > 0);
    let kinds: Vec<String> = kinds
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    if !kinds.is_empty() {
        rows.push(("Not enforced here", kinds.join(", ")));
    }
    if let Some(cluster) = &status.cluster {
        rows.push(("Cluster", super::show::cluster_source(cluster)));
    }
    let refused = status
        .refused
        .iter()
        .map(|refused| ("Refused", refused.clone()));
    rows.extend(refused);
    rows.extend(
        status
            .problems
            .iter()
            .map(|problem| ("PROBLEM", problem.clone())),
    );
    rows.extend(
        status
            .warnings
            .iter()
            .map(|warning| ("WARNING", warning.clone())),
    );
    super::show::aligned(&rows)
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

fn why(why: &NetpolWhy) -> String {
    let port = why.port.as_deref().unwrap_or("any protocol without ports");
    let verdict = match why.allowed {
        true => "allowed",
        false => "denied",
    };
    let mut text = format!(
        "{verdict}: {} to {}, {port}\n",
        end(&why.from),
        end(&why.to)
    );
    if why.is_of_node {
        text.push_str("  the node itself is one end: its packets from and to its own pods pass\n");
    } else if why.sides.is_empty() {
        text.push_str("  no policy of a pod of this node is about it\n");
    }
    for SideView {
        pod,
        direction,
        policies,
        set_aside,
        allowed_by,
    } in &why.sides
    {
        let rule = match allowed_by {
            Some(rule) => format!("allowed by {rule}"),
            None => format!("no rule of {} allows it", policies.join(", ")),
        };
        text.push_str(&format!("  {direction} of {pod}: {rule}\n"));
        for policy in set_aside {
            text.push_str(&format!(
                "    {policy} is set aside, and allows nothing: it does not fit into the table; see `netpol status`\n"
            ));
        }
    }
    let elsewhere = [(&why.from, "egress"), (&why.to, "ingress")];
    for (end, direction) in elsewhere {
        if let IpSide {
            pod: Some(pod),
            is_here: false,
            ..
        } = end
        {
            text.push_str(&format!("  {direction} of {pod}: its own node judges it\n"));
        }
    }
    if let Some(reason) = &why.not_in_force {
        text.push_str(&format!("  the kernel may judge otherwise: {reason}\n"));
    }
    text
}

fn end(end: &IpSide) -> String {
    match &end.pod {
        Some(pod) => format!("{pod} ({})", end.address),
        None => end.address.clone(),
    }
}
