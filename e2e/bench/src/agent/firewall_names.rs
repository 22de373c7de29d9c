//! Names of EgressFirewalls: how much 10,000 of them slow down an answer about another name.

use std::time::Duration;

use agent_core::{
    core::{CoreConfig, Event},
    policy::document::PolicyDocument,
};
use anyhow::{Result, ensure};
use holdfast_e2e::policy::{dns_to, egress};

use super::report::Figure;
use holdfast_e2e::in_memory::{DNS, Node, config, document, web};

/// Number of names of each firewall. Half of them are wildcards.
const NAMES: usize = 5_000;
/// Number of names that pods look up many times.
const ASKED: usize = 1_000;
/// Longest time that the firewalls may add at the 99th percentile.
const LIMIT: Duration = Duration::from_micros(5);

fn firewall(namespace: &str) -> Result<PolicyDocument> {
    let mut text = format!(
        "apiVersion: k8s.ovn.org/v1\nkind: EgressFirewall\nmetadata: {{name: default, namespace: {namespace}}}\nspec:\n  egress:\n"
    );
    for n in 0..NAMES / 2 {
        text += &format!(
            "  - {{type: Allow, to: {{dnsName: n{n}.{namespace}.test}}}}\n  - {{type: Allow, to: {{dnsName: '*.n{n}.{namespace}.test'}}}}\n"
        );
    }
    document(&text)
}

fn node(firewalls: &[&str]) -> Result<Node> {
    let config = CoreConfig {
        dns_servers: vec![format!("{DNS}:53").parse()?],
        ..config()
    };
    let dns = document(&egress("dns", "web", &dns_to("*", &[&format!("{DNS}/32")])))?;
    let mut node = Node::start(config, &[dns], &[web(None)])?;
    for namespace in firewalls {
        node.apply(&firewall(namespace)?);
    }
    Ok(node)
}

/// The time of an answer that changes nothing.
fn answer(node: &mut Node, number: usize) -> Result<Duration> {
    node.now = node.now.plus(Duration::from_micros(50));
    let name = format!("www.k{}.example.com", number % ASKED);
    let address = std::net::Ipv4Addr::from_bits(0x3300_0000 + u32::try_from(number % ASKED)?);
    let event = node.answer(0, &name, vec![address.into()], 3600)?;
    let cost = node.event(Event::Mappings(vec![event]));
    ensure!(cost.realised == 1, "{name} was not realised");
    Ok(cost.time)
}

/// Answers with and without firewalls, in turns.
pub(crate) fn unmatched(answers: usize) -> Result<Vec<Figure>> {
    let mut nodes = [node(&[])?, node(&["default", "other"])?];
    let mut times = [Vec::new(), Vec::new()];
    for number in 0..answers + ASKED {
        for (node, times) in nodes.iter_mut().zip(&mut times) {
            let time = answer(node, number)?;
            if number >= ASKED {
                times.push(time);
            }
        }
    }
    let [without, with] = times.map(p99);
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let added = micros(with) - micros(without);
    let promise = format!(
        "at most {} us more than without firewalls",
        LIMIT.as_micros()
    );
    Ok(vec![
        Figure::new("names of no firewall, p99", "us/answer", micros(without)),
        Figure::new("beside 10,000 others, p99", "us/answer", micros(with))
            .promised(promise, added < micros(LIMIT)),
    ])
}

fn p99(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let at = times.len() * 99 / 100;
    times.get(at).copied().unwrap_or_default()
}
