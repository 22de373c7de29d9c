//! Many EgressFirewalls: ordered lists over all identities outside of the cluster.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use agent_core::{core::Event, policy::document::PolicyDocument, source_event::SourceEvent};
use anyhow::{Result, ensure};
use dns_policy::name::Fqdn;
use holdfast_agent::resolver::ResolvedName;

use super::names::per;
use super::report::Figure;
use holdfast_e2e::in_memory::{Cost, Node, config, document};

/// Number of rules of one firewall: blocks, and a deny of the rest.
const RULES: usize = 50;
/// Number of objects of a listing that the resolver sends to the core at once.
const OBJECTS: usize = 64;
/// Number of changes in the mean of a figure.
const CHANGES: usize = 20;
/// The longest that the change of one firewall may take.
const LIMIT: Duration = Duration::from_millis(20);

/// The difference between two versions of a firewall.
#[derive(Clone, Copy)]
enum Differs {
    /// The ports of a rule in the middle.
    Block,
    /// The last rule, which selects every identity outside of the cluster.
    Everything,
}

/// The firewall of a namespace: some blocks from the common set of all firewalls, then a deny of
/// the rest.
fn firewall(
    number: usize,
    blocks: usize,
    differs: Differs,
    version: usize,
) -> Result<PolicyDocument> {
    let mut text = format!(
        "apiVersion: k8s.ovn.org/v1\nkind: EgressFirewall\nmetadata: {{name: default, namespace: n{number}}}\nspec:\n  egress:\n"
    );
    for rule in 0..RULES - 1 {
        let block = (number * (RULES - 1) + rule) % blocks;
        let block = Ipv4Addr::from_bits(0x3000_0000 + u32::try_from(block)? * 256);
        let changes = matches!(differs, Differs::Block) && rule == RULES / 2;
        let port = 443 + if changes { version } else { 0 };
        text += &format!(
            "  - {{type: Allow, to: {{cidrSelector: {block}/24}}, ports: [{{protocol: TCP, port: {port}}}]}}\n"
        );
    }
    let port = match differs {
        Differs::Everything => format!(", ports: [{{protocol: TCP, port: {}}}]", 1000 + version),
        Differs::Block => String::new(),
    };
    text += &format!("  - {{type: Deny, to: {{cidrSelector: 0.0.0.0/0}}{port}}}\n");
    document(&text)
}

/// A node with a pod in each namespace that has a firewall.
fn node(namespaces: usize) -> Result<Node> {
    let labels = |number| {
        vec![
            "k8s:app=web".to_owned(),
            format!("k8s:io.kubernetes.pod.namespace=n{number}"),
        ]
    };
    let pods: Vec<Vec<String>> = (0..namespaces).map(labels).collect();
    Node::start(config(), &[], &pods)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Changes one of several firewalls in force. Together they use `blocks` blocks.
pub(crate) fn changes(firewalls: usize, blocks: usize) -> Result<Vec<Figure>> {
    let mut node = node(firewalls)?;
    let mut total = Cost::default();
    for number in 0..firewalls {
        let cost = node.apply(&firewall(number, blocks, Differs::Block, 0)?);
        total.time += cost.time;
        total.longest = total.longest.max(cost.longest);
    }
    let counters = node.counters();
    ensure!(
        node.identities() >= blocks as u64,
        "{} identities",
        node.identities()
    );
    let mut figures = vec![
        Figure::new("firewalls: all applied", "ms", milliseconds(total.time)).counted(
            node.identities(),
            counters.ipcache_writes,
            counters.policy_writes,
        ),
        Figure::new("firewalls: longest part", "ms", milliseconds(total.longest)),
    ];
    for (name, differs) in [
        ("firewalls: a block changes", Differs::Block),
        ("firewalls: the last rule changes", Differs::Everything),
    ] {
        node.apply(&firewall(0, blocks, differs, 0)?);
        let before = node.counters();
        let mut time = Duration::ZERO;
        for version in 1..=CHANGES {
            let document = firewall(0, blocks, differs, version)?;
            node.now = node.now.plus_secs(1);
            time += node.apply(&document).time;
        }
        let after = node.counters();
        let mean = time / u32::try_from(CHANGES)?;
        let changes = CHANGES as u64;
        let figure = Figure::new(name, "ms", per(time, CHANGES) / 1e3).counted(
            node.identities(),
            (after.ipcache_writes - before.ipcache_writes) / changes,
            (after.policy_writes - before.policy_writes) / changes,
        );
        figures.push(figure.promised(format!("< {} ms", LIMIT.as_millis()), mean < LIMIT));
    }
    Ok(figures)
}

/// An agent that starts with firewalls of names and a deny of the rest, and then reads the objects
/// of all names: the first packets pass once the names' addresses are plumbed.
pub(crate) fn cold_start(firewalls: usize, names: usize) -> Result<Vec<Figure>> {
    let mut node = node(firewalls)?;
    for number in 0..firewalls {
        let own = (number..names).step_by(firewalls);
        let rules =
            own.map(|name| format!("  - {{type: Allow, to: {{dnsName: {}}}}}\n", name_of(name)));
        let text = format!(
            r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: n{number}}}
spec:
  egress:
{}  - {{type: Deny, to: {{cidrSelector: 0.0.0.0/0}}}}
",
            rules.collect::<String>()
        );
        node.apply(&document(&text)?);
    }
    let objects = (0..names).map(|name| {
        let address = Ipv4Addr::from_bits(0x3000_0000 + u32::try_from(name)?);
        Ok(SourceEvent::Apply(ResolvedName {
            key: format!("names/dns-{name}"),
            name: Fqdn::normalise(&name_of(name)),
            addresses: BTreeSet::from([IpAddr::V4(address)]),
        }))
    });
    let objects: Vec<SourceEvent<ResolvedName>> = objects.collect::<Result<_>>()?;
    let listing = [SourceEvent::Init]
        .into_iter()
        .chain(objects)
        .chain([SourceEvent::InitDone]);
    let listing: Vec<_> = listing.collect();
    let before = node.counters();
    let (mut time, mut longest) = (Duration::ZERO, Duration::ZERO);
    for some in listing.chunks(OBJECTS) {
        let cost = node.event(Event::Resolved(some.to_vec()));
        time += cost.time;
        longest = longest.max(cost.longest);
    }
    let after = node.counters();
    ensure!(
        node.identities() >= names as u64,
        "{} identities for {names} names",
        node.identities()
    );
    Ok(vec![
        Figure::new("firewalls: cold start, names", "ms", milliseconds(time)).counted(
            node.identities(),
            after.ipcache_writes - before.ipcache_writes,
            after.policy_writes - before.policy_writes,
        ),
        Figure::new(
            "firewalls: cold start, longest part",
            "ms",
            milliseconds(longest),
        ),
    ])
}

fn name_of(number: usize) -> String {
    format!("www{number}.example.com")
}
