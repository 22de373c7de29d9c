//! The answer to `why` as text.

use agent_core::core::why::outcome::Outcome;

use crate::admin::model::{Hop, HopState, Why};

/// Formats the answer as the command line prints it.
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
        why.endpoint,
        why.pod.as_ref().unwrap_or(&why.key),
        why.target
    );
    let mut at = None;
    for hop in &why.hops {
        if hop.address != at {
            at.clone_from(&hop.address);
            text.extend(at.iter().map(|address| format!("{address}\n")));
        }
        line(&mut text, hop);
    }
    let verdict = verdict(why);
    text.push_str(&format!("{verdict}: {}\n", why.verdict));
    text
}

/// The outcome in a few words.
pub fn verdict(why: &Why) -> &'static str {
    match why.outcome {
        Outcome::Allowed => "allowed",
        Outcome::Unchecked => "allowed on this node",
        Outcome::Depends => "depends on the backend",
        Outcome::Denied | Outcome::Unknown => "not allowed",
    }
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
