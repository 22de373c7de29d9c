//! `why`: the agent's answer, for people and programs.

use anyhow::{Result, bail};

use super::{client::Client, show::print};
use crate::{
    admin::{
        model::{Hop, HopState, Why},
        server::encode,
    },
    config::args::WhyArgs,
};

/// Asks and prints; fails if packets do not pass.
pub async fn run(args: &WhyArgs) -> Result<()> {
    let mut path = format!(
        "/v1/why?endpoint={}&target={}",
        encode(&args.endpoint),
        encode(&args.target.host)
    );
    if let Some(port) = args.target.port {
        path.push_str(&format!("&port={}", encode(&port.to_string())));
    }
    if args.ingress {
        path.push_str("&direction=ingress");
    }
    let why: Why = Client::new(&args.client.admin_socket).get(&path).await?;
    print(args.client.output, &why, text)?;
    if why.allowed {
        Ok(())
    } else {
        bail!("not allowed")
    }
}

/// As people read it.
pub fn text(why: &Why) -> String {
    let port = why
        .port
        .as_ref()
        .map_or(String::new(), |port| format!(", {port}"));
    let way = if why.direction == "ingress" {
        "from"
    } else {
        "to"
    };
    let mut text = format!(
        "endpoint {} ({}) {way} {}{port}\n",
        why.endpoint, why.key, why.target
    );
    let mut at = None;
    for hop in &why.hops {
        if hop.address != at {
            at.clone_from(&hop.address);
            text.extend(at.iter().map(|address| format!("{address}\n")));
        }
        line(&mut text, hop);
    }
    let verdict = if why.allowed {
        "allowed"
    } else {
        "not allowed"
    };
    text.push_str(&format!("{verdict}: {}\n", why.verdict));
    text
}

fn line(text: &mut String, hop: &Hop) {
    let state = match hop.state {
        HopState::Found => "ok",
        HopState::Absent => "-",
        HopState::Missing => "MISSING",
        HopState::Unknown => "unknown",
    };
    text.push_str(&format!("  {state:7}  {:10}  {}\n", hop.hop, hop.text));
    if let Some(remedy) = &hop.remedy {
        text.push_str(&format!("{:23}do: {remedy}\n", ""));
    }
}
