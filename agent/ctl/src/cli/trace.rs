//! `policy trace`: judges a packet by the running agent's policies, or by files.

use std::net::IpAddr;

use agent_core::{
    kubernetes::{book::Book, labels::LabelFilter},
    named_port::NamedPorts,
    policy::{
        ask::{self, Peer, Step, To, Trace},
        repository::Repository,
        trace::{Port, RuleView, after_tier},
    },
    selector::selector::Subject,
    source_event::SourceEvent,
};
use anyhow::{Context as _, Result, bail};
use daemon::command_line::failure;
use holdfast_agent::{
    admin::{client::Client, query::encode},
    config::args::TraceArgs,
};
use shared_maps::IdentityId;

use super::{policy, show::print};

/// Prints the trace. Fails if the packet is dropped.
pub(crate) async fn run(args: &TraceArgs) -> Result<()> {
    let to = receiver(args)?;
    let port = args.destination_port()?;
    let trace = if args.policy_files.is_empty() {
        let path = format!(
            "/v1/trace?from={}&to={}&port={}",
            encode(&args.from),
            encode(&to),
            encode(&port.to_string())
        );
        Client::new(args.client.admin_socket()).get(&path).await?
    } else {
        by_files(args, &to, port)?
    };
    print(args.client.output(), &trace, text)?;
    if !trace.allowed && lacks_port_name(&trace) && args.named_ports.is_empty() {
        failure::note(
            "holdfast-agent",
            &"labels have no port names, which are in Pod documents: give the receiver's with \
             --named-port, for example --named-port http=80/TCP, or give its address as --to",
        );
    }
    if trace.allowed {
        Ok(())
    } else {
        bail!("not allowed")
    }
}

/// Whether a rule names a port that the labels of the receiver do not have.
fn lacks_port_name(trace: &Trace) -> bool {
    let mut rules = trace.steps.iter().flat_map(|step| &step.other_ports);
    rules.any(RuleView::lacks_port_name)
}

/// The receiver, with labels for its named ports.
fn receiver(args: &TraceArgs) -> Result<String> {
    if args.named_ports.is_empty() {
        return Ok(args.to.peer.clone());
    }
    if !matches!(Peer::parse(&args.to.peer)?, Peer::Labels(_)) {
        bail!(
            "--named-port goes with labels: {} has its own, or none",
            args.to.peer
        );
    }
    let named = NamedPorts::parse(&args.named_ports).context("--named-port")?;
    let named = named.labels();
    let labels = named.iter().map(ToString::to_string);
    let labels: Vec<String> = [args.to.peer.clone()].into_iter().chain(labels).collect();
    Ok(labels.join(","))
}

fn by_files(args: &TraceArgs, to: &str, port: Port) -> Result<Trace> {
    let mut repository = Repository::default();
    let mut book = Book::new(LabelFilter::default(), "default");
    for (file, documents) in policy::read_documents(&args.policy_files)? {
        for document in documents {
            let document = document?;
            book.put(&document);
            let key = document.key.clone();
            if repository.insert(document.into()).is_some() {
                bail!("{file}: {key} is there twice; rename or remove one");
            }
        }
    }
    let Peer::Labels(from) = Peer::parse(&args.from)? else {
        bail!(
            "--from {}: without an agent, give labels, for example k8s:app=web",
            args.from
        );
    };
    let to = To::from(Peer::parse(to)?);
    let known = match to {
        To::Address(address) => pod_at(&mut book, address),
        To::Labels(_) | To::Name(_) => None,
    };
    Ok(ask::trace(&repository, &from, &to, port, known))
}

/// The pod that has this address according to the documents. Address blocks do not select pods.
fn pod_at(book: &mut Book, address: IpAddr) -> Option<Subject> {
    let pods = book.changes().pods.into_iter();
    let mut pods = pods.filter_map(|event| match event {
        SourceEvent::Apply(pod) => Some(pod),
        _ => None,
    });
    let pod = pods.find(|pod| pod.addresses.contains(&address))?;
    Some(Subject::new(IdentityId::ENDPOINT_MIN, pod.labels))
}

/// The trace in lines that people read.
pub(crate) fn text(trace: &Trace) -> String {
    let mut text = format!("{} to {}, {}\n", trace.from.join(","), trace.to, trace.port);
    for step in &trace.steps {
        line(&mut text, step);
    }
    text.push_str(if trace.allowed {
        "allowed\n"
    } else {
        "not allowed\n"
    });
    text
}

fn line(text: &mut String, step: &Step) {
    let state = if step.passes { "ok" } else { "DROPPED" };
    let peer = match (step.step.as_str(), step.peer.is_empty()) {
        (_, true) => String::new(),
        ("ingress", _) => format!("from {}: ", step.peer.join(",")),
        _ => format!("to {}: ", step.peer.join(",")),
    };
    let by = |rules: &[agent_core::policy::trace::RuleView]| {
        let rules: Vec<String> = rules.iter().map(ToString::to_string).collect();
        rules.join("; ")
    };
    let said = match (step.step.as_str(), step.verdict.as_str()) {
        ("dns", "proxied") => format!("it may look up the name by {}", by(&step.rules)),
        ("dns", "denied") => format!(
            "packets to its DNS servers are denied by {}",
            by(&step.rules)
        ),
        ("dns", _) => "no DNS rule allows it to look up the name: no address is learned".to_owned(),
        (_, "allowed") => format!("allowed by {}", by(&step.rules)),
        (_, "proxied") => format!("through the DNS proxy by {}", by(&step.rules)),
        (_, "denied") => format!("denied by {}", by(&step.rules)),
        (_, "not-restricted") => "not restricted".to_owned(),
        (_, "from-node") => "packets that the node itself makes need no rule; one that it \
             translates is judged by its first sender"
            .to_owned(),
        _ if step.other_ports.is_empty() => "no rule is about it".to_owned(),
        _ => format!(
            "no rule for this port; for others {}",
            by(&step.other_ports)
        ),
    };
    let said = after_tier(step.tier.as_ref(), said);
    text.push_str(&format!("  {state:7}  {:8} {peer}{said}\n", step.step));
}

#[cfg(test)]
mod tests;
