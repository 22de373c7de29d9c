//! Arguments of `holdfast-agent cluster`.
#![allow(rustdoc::bare_urls, reason = "texts of --help")]

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use daemon::command_line::{output::OutputArgs, values::whole};
use dns_policy::duration;

/// `cluster …`
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Show the agents of all nodes and the nodes without one, those with problems first. Exit 1 if a node has a problem or did not answer
    Status(ClusterStatusArgs),
}

/// `cluster status`
#[derive(Debug, Args)]
pub struct ClusterStatusArgs {
    /// Kubeconfig with the address of the API server and the account to use there. Without it kubectl finds
    /// one as usual: KUBECONFIG, then ~/.kube/config
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace of the agents
    #[arg(short, long, value_name = "NAME", default_value = "kube-system")]
    pub namespace: String,
    /// The longest time that the agent of a node may take to answer, for example 30s
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "10s")]
    pub timeout: Duration,
    /// Agents that are asked at the same time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = whole(1..=64u16))]
    pub parallel: u16,
    /// Program that talks to the API server: kubectl, or oc
    #[arg(long, value_name = "PROGRAM", default_value = "kubectl")]
    pub kubectl: PathBuf,
    #[command(flatten)]
    pub form: OutputArgs,
}
