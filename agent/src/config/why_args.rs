//! Arguments of `holdfast-agent why`.
#![allow(rustdoc::bare_urls, reason = "texts of --help")]

use clap::Args;
use daemon::command_line::endpoint_args::EndpointArg;

use super::{args::ClientArgs, destination::Destination};

/// `why`
#[derive(Debug, Args)]
pub struct WhyArgs {
    #[command(flatten)]
    pub endpoint: EndpointArg,
    /// Name (also of a Service: db.shop.svc.cluster.local:80), pod, Service or address, with or without a port, or a URL:
    /// www.example.com:443, https://www.example.com, shop/web:80 (namespace/name of a pod or Service), 203.0.113.7:53/UDP; put an IPv6 address with a port in brackets: `[2001:db8::1]:443`
    pub target: Destination,
    /// Judge the other direction: packets from the target to this port of the endpoint
    #[arg(long)]
    pub ingress: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}
