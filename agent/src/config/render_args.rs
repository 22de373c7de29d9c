//! Arguments of `holdfast-agent policy render`.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf};

use agent_core::policy::trace::Port;
use clap::{Arg, ArgGroup, Args, ValueEnum};
use daemon::command_line::{output::OutputArgs, values::address};

/// Interface of the vswitch that leads to other nodes, if none is given.
const NODE_INTERFACE: &str = "node-output";

/// `policy render`
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("form").required(true).args(["format", "to"])), mut_args = without_to)]
pub struct RenderArgs {
    /// YAML or JSON files with NetworkPolicies, pods and namespaces, or directories of them; - is standard input
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
    #[command(flatten)]
    pub vswitch: VswitchArgs,
    #[command(flatten)]
    pub form: OutputArgs,
}

/// A packet is judged for no vswitch.
fn without_to(arg: Arg) -> Arg {
    match arg.get_long() {
        Some("node-output-interface" | "nat-loopback") => arg.conflicts_with("to"),
        _ => arg,
    }
}

/// The vswitch that carries out exported policies.
#[derive(Clone, Debug, Args)]
pub struct VswitchArgs {
    /// In access lists: interface of the vswitch that leads to other nodes; may be repeated
    /// [default: node-output]
    #[arg(long = "node-output-interface", value_name = "NAME")]
    pub node_interfaces: Vec<String>,
    /// Source of packets that a pod sends to itself through a Service, which pods always receive: in
    /// all forms except nft
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub nat_loopback: Option<IpAddr>,
}

impl VswitchArgs {
    /// The interfaces of the vswitch that lead to other nodes.
    pub fn interfaces(&self) -> BTreeSet<String> {
        match self.node_interfaces.as_slice() {
            [] => BTreeSet::from([NODE_INTERFACE.to_owned()]),
            given => given.iter().cloned().collect(),
        }
    }
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
