//! Arguments of `holdfast-agent policy render`.

use std::{net::IpAddr, path::PathBuf};

use agent_core::policy::trace::Port;
use clap::{Args, ValueEnum};

use super::args::Output;

/// `policy render`
#[derive(Debug, Args)]
pub struct RenderArgs {
    /// YAML or JSON files with NetworkPolicies, pods and namespaces, or directories of them
    #[arg(short = 'f', long = "file", value_name = "FILE", required = true, num_args = 1..)]
    pub files: Vec<PathBuf>,
    /// Form of the output
    #[arg(
        long,
        value_enum,
        required_unless_present = "to",
        conflicts_with = "to"
    )]
    pub format: Option<Format>,
    /// Only pods of this node (spec.nodeName)
    #[arg(long)]
    pub node: Option<String>,
    /// Only this pod; with --to: the sender, a pod or an address
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub pod: Option<String>,
    /// Judge a packet to this pod or address by every rendering. Exit 1 if they disagree
    #[arg(long, requires = "pod", requires = "port")]
    pub to: Option<String>,
    /// Port of the packet: 443, 443/TCP, 53/UDP, 8/ICMP
    #[arg(long, requires = "to")]
    pub port: Option<Port>,
    /// Interface of the vswitch that leads to other nodes, for ACLs; may be repeated
    #[arg(
        long = "node-output-interface",
        value_name = "NAME",
        default_value = "node-output"
    )]
    pub node_interfaces: Vec<String>,
    /// Source of packets that a pod sends to itself through a Service, which pods always receive
    #[arg(long, value_name = "ADDRESS")]
    pub nat_loopback: Option<IpAddr>,
    /// Text, or JSON: of ACLs, session rules and verdicts
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
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
