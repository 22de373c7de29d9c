//! Arguments of `holdfast-agent why`.

use std::{net::IpAddr, str::FromStr};

use clap::Args;

use super::args::ClientArgs;
use crate::policy::trace::{Port, PortError};

/// `why`
#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Number, key, pod (namespace/name), name or address of the endpoint
    pub endpoint: String,
    /// Name (also of a Service: db.shop.svc.cluster.local:80), pod, Service or address, with or without a port: www.example.com:443,
    /// shop/web:80 (namespace/name of a pod or Service), 203.0.113.7:53/UDP; put an IPv6 address with a port in brackets: `[2001:db8::1]:443`
    pub target: WhyTarget,
    /// Judge the other direction: packets from the target to this port of the endpoint
    #[arg(long)]
    pub ingress: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Target of `why`: the peer of the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WhyTarget {
    /// DNS name or IP address, without brackets.
    pub host: String,
    /// Port of the target, or of the endpoint with `--ingress`.
    pub port: Option<Port>,
}

impl FromStr for WhyTarget {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let bare = |host: &str| Self {
            host: host.to_owned(),
            port: None,
        };
        if text.parse::<IpAddr>().is_ok() {
            return Ok(bare(text));
        }
        match text.rsplit_once(':') {
            Some((host, port)) => Ok(Self {
                host: host
                    .trim_start_matches('[')
                    .trim_end_matches(']')
                    .to_owned(),
                port: Some(port.parse()?),
            }),
            None => Ok(bare(text.trim_start_matches('[').trim_end_matches(']'))),
        }
    }
}
