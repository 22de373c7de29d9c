//! Arguments of `holdfast-agent policy render`.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf};

use agent_core::policy::trace::Port;
use clap::{ArgGroup, Args, ValueEnum};
use daemon::command_line::{output::OutputArgs, values::address};

/// Interface of the vswitch that leads to other nodes, if none is given.
const NODE_INTERFACE: &str = "node-output";

/// The interfaces of the vswitch that lead to other nodes.
pub fn node_interfaces(given: &[String]) -> BTreeSet<String> {
    match given {
        [] => BTreeSet::from([NODE_INTERFACE.to_owned()]),
        given => given.iter().cloned().collect(),
    }
}

/// `policy render`
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("form").required(true).args(["format", "to"])))]
pub struct RenderArgs {
    /// YAML or JSON files with NetworkPolicies, pods and namespaces, or directories of them
    #[arg(short = 'f', long = "file", value_name = "FILE", required = true, num_args = 1..)]
    pub files: Vec<PathBuf>,
    /// Form of the output. This or --to is required
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub format: Option<Format>,
    /// Only pods of this node (spec.nodeName)
    #[arg(long, value_name = "NAME", conflicts_with = "to")]
    pub node: Option<String>,
    /// Only this pod; with --to: the sender, a pod or an address
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub pod: Option<String>,
    /// Judge a packet to this pod or address by every rendering. Exit 1 if they disagree
    #[arg(long, value_name = "DESTINATION", requires = "pod", requires = "port")]
    pub to: Option<String>,
    /// Destination port: 443, 443/TCP, 53/UDP, 8/ICMP (the type)
    #[arg(long, value_name = "PORT", requires = "to")]
    pub port: Option<Port>,
    /// With --format acl: interface of the vswitch that leads to other nodes; may be repeated
    /// [default: node-output]
    #[arg(
        long = "node-output-interface",
        value_name = "NAME",
        conflicts_with = "to"
    )]
    pub node_interfaces: Vec<String>,
    /// Source of packets that a pod sends to itself through a Service, which pods always receive: in
    /// all forms except nft
    #[arg(long, value_name = "ADDRESS", value_parser = address, conflicts_with = "to")]
    pub nat_loopback: Option<IpAddr>,
    #[command(flatten)]
    pub form: OutputArgs,
}

/// A form of policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Rules of each pod: addresses, protocol, ports and action.
    Rules,
    /// One list of rules for each pod in which both sides of connections are combined, and one for the node.
    Tables,
    /// The table that `netpol run` writes, in the language of nft.
    Nft,
    /// Commands of VPP's ACL plugin.
    Acl,
    /// Session rules of VPP's TCP stack.
    Sessions,
}
