//! Arguments of `holdfast-agent identity`.

use std::path::PathBuf;

use agent_core::{identity::cluster::IdentityRange, kubernetes::labels::LabelRule};
use clap::{Args, Subcommand};
use daemon::command_line::values::whole;

use super::{args::ClientArgs, source_args::cluster_name};

/// `identity …`
#[derive(Debug, Subcommand)]
pub enum IdentityCommand {
    /// List all identities: the number, where it comes from and since when, and the labels
    List(ClientArgs),
    /// Show one identity
    Get {
        /// Identity number
        #[arg(value_parser = whole(0..=u32::MAX))]
        id: u32,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Print CiliumIdentity objects for the pods of documents, without a running agent: the numbers that
    /// agents with --identity-allocation=cluster would create. For hosts without an API server: put them
    /// into the --policy-dir of each host
    Assign(AssignArgs),
}

/// `identity assign`
#[derive(Debug, Args)]
pub struct AssignArgs {
    /// YAML or JSON files with pods and namespaces, or directories of them. CiliumIdentities in them count as
    /// those of --known
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub from: Vec<PathBuf>,
    /// Directory or file with the CiliumIdentities that exist. Their labels keep their numbers, and no other
    /// labels get them; they are not printed again
    #[arg(long, value_name = "DIR")]
    pub known: Option<PathBuf>,
    /// Numbers of new CiliumIdentities, as the agents' --identity-range
    #[arg(long, value_name = "FIRST-LAST", default_value_t = IdentityRange::default())]
    pub identity_range: IdentityRange,
    /// Which labels of a Pod document make the pod's identity, as the agents' --labels
    #[arg(long, value_name = "RULE", value_delimiter = ' ')]
    pub labels: Vec<LabelRule>,
    /// Name of this node's cluster, as the agents' --cluster-name
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = cluster_name)]
    pub cluster_name: String,
}
