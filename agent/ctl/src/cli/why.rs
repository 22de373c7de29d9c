//! `why`: the agent's answer, for people and programs.

use anyhow::{Result, bail};
use holdfast_agent::{
    admin::{
        client::Client,
        model::Why,
        query::encode,
        why::text::{text, verdict},
    },
    config::why_args::WhyArgs,
};

use super::show::print;

/// Asks the agent and prints its answer. Fails if packets do not pass, or pass at some of the backends only.
pub(crate) async fn run(args: &WhyArgs) -> Result<()> {
    let mut path = format!(
        "/v1/why?endpoint={}&target={}",
        encode(&args.endpoint.endpoint),
        encode(&args.target.host)
    );
    if let Some(port) = args.target.port {
        path.push_str(&format!("&port={}", encode(&port.to_string())));
    }
    if args.ingress {
        path.push_str("&direction=ingress");
    }
    let why: Why = Client::new(args.client.admin_socket()).get(&path).await?;
    print(args.client.output(), &why, text)?;
    if why.allowed {
        Ok(())
    } else {
        bail!("{}", verdict(&why))
    }
}
