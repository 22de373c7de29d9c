//! `policy render`: what NetworkPolicies mean in addresses, without a running agent.

mod cluster;
mod packet;
mod text;

use anyhow::{Result, bail};
use daemon::command_line::{failure, output::Output};
use holdfast_agent::config::render_args::{Format, RenderArgs};
use netpol::{
    node::Node,
    pod::PodId,
    render::vpp::{acl, sessions},
};
use serde_json::Value;

use self::cluster::Cluster;
use super::show::print;

/// Renders, or judges a packet by every rendering.
pub(crate) fn run(args: &RenderArgs) -> Result<()> {
    let cluster = Cluster::read(args)?;
    match (args.format, &args.pod, &args.to, args.port) {
        (Some(format), ..) => render(args, &cluster, format),
        (None, Some(from), Some(to), Some(port)) => {
            packet::judge(&cluster, (from, to, port), args.form.output)
        }
        _ => bail!("add --format, or --pod, --to and --port for a packet"),
    }
}

/// Refuses flags that the format does not use.
fn check(args: &RenderArgs, format: Format) -> Result<()> {
    if args.form.output != Output::Table && !matches!(format, Format::Acl | Format::Sessions) {
        bail!(
            "-o json and -o yaml need --format acl, --format sessions or --to: remove -o, or change --format"
        );
    }
    if !args.vswitch.node_interfaces.is_empty() && format != Format::Acl {
        bail!(
            "--node-output-interface needs --format acl: remove the interface, or change --format"
        );
    }
    if args.vswitch.nat_loopback.is_some() && format == Format::Nft {
        bail!("--nat-loopback has no effect with --format nft: remove --nat-loopback");
    }
    Ok(())
}

fn render(args: &RenderArgs, cluster: &Cluster, format: Format) -> Result<()> {
    check(args, format)?;
    let pod = args
        .pod
        .as_deref()
        .map(|pod| cluster.pod(pod, "--pod"))
        .transpose()?;
    let of_pod = pod.as_ref().map(|pod| cluster.node_of(pod)).transpose()?;
    let nodes = match (of_pod, format) {
        (Some(node), _) => vec![node],
        (None, Format::Rules | Format::Tables) => cluster.nodes(),
        // Another program reads this output, and it needs one node's rules only.
        (None, Format::Nft | Format::Acl | Format::Sessions) => vec![cluster.only_node()?],
    };
    let mut all = String::new();
    for name in nodes {
        let node = match (format, &pod) {
            (Format::Nft, Some(pod)) => cluster.render_only(&name, pod)?,
            _ => cluster.render(&name)?,
        };
        if matches!(format, Format::Rules | Format::Tables) {
            all.push_str(&format!("node {}\n", text::name(&name)));
        }
        let pod = pod.as_ref();
        match format {
            Format::Rules => all.push_str(&text::rules(&node, pod)),
            Format::Tables => all.push_str(&text::tables(&node, pod)),
            Format::Nft => all.push_str(&node.nft.to_string()),
            Format::Acl => return acls(args.form.output, &node, pod),
            Format::Sessions => return session_rules(args.form.output, node, pod),
        }
    }
    print(Output::Table, &all, String::clone)
}

fn acls(output: Output, node: &Node, pod: Option<&PodId>) -> Result<()> {
    let mut acls = node.acls.clone();
    if let Some(pod) = pod {
        let is_its = |interface: &acl::Interface| *interface == acl::Interface::Pod(pod.clone());
        for acl in &mut acls {
            acl.input.retain(is_its);
            acl.output.retain(is_its);
        }
        acls.retain(|acl| !acl.input.is_empty() || !acl.output.is_empty());
        failure::note(
            "holdfast-agent",
            &"with --pod these are the lists of one pod: the one for other nodes is left out. \
             An export for a vswitch has no --pod",
        );
    }
    export(output, acls.is_empty(), pod, &acl::to_json(&acls), || {
        acl::cli(&acls)
    })
}

/// Prints an export. An export without rows prints no text, or an empty list as JSON.
fn export(
    output: Output,
    is_empty: bool,
    pod: Option<&PodId>,
    json: &Value,
    text: impl FnOnce() -> String,
) -> Result<()> {
    if is_empty {
        let of = match pod {
            Some(pod) => format!("pod {pod}"),
            None => "a pod of the node".to_owned(),
        };
        let nothing = format!("nothing to export: no policy restricts {of}");
        failure::note("holdfast-agent", &nothing);
    }
    match (is_empty, output) {
        (true, Output::Table) => Ok(()),
        _ => print(output, json, |_| text()),
    }
}

fn session_rules(output: Output, node: Node, pod: Option<&PodId>) -> Result<()> {
    let mut rules = node.sessions?;
    rules.retain(|rule| match (&rule.scope, pod) {
        (_, None) => true,
        (sessions::Scope::Local(of), Some(pod)) => of == pod,
        (sessions::Scope::Global, Some(pod)) => {
            let own = node
                .pods
                .get(pod)
                .into_iter()
                .flat_map(|pod| &pod.addresses);
            let mut own = own.map(|address| ipnet::IpNet::from(*address));
            own.any(|own| rule.local.map(ipnet::IpNet::V4) == Some(own))
        }
    });
    let json = sessions::to_json(&rules);
    export(output, rules.is_empty(), pod, &json, || {
        rules.iter().map(|rule| format!("{rule}\n")).collect()
    })
}
