//! A large cluster: pods of other nodes, a namespace that changes its labels, Services with many
//! backends.
//!
//! A change is a document that was read. Its time includes the join of the cluster's objects, plans
//! and commits, but not the datapath's steps.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_core::{
    core::router::Router,
    named_port::NamedPorts,
    policy::{
        cluster::{
            Protocol,
            namespace::Namespace,
            pod::Pod,
            service::{Service, ServicePort},
            slice::{Backend, EndpointSlice, SlicePort},
        },
        document::{Body, PolicyDocument},
        source::PolicyChange,
    },
    source_event::SourceEvent,
};
use anyhow::{Context, Result, ensure};
use holdfast_e2e::bench::usage;
use holdfast_e2e::in_memory::{Cost, Node, config, document, web};
use holdfast_e2e::policy::egress;

use super::names::per;
use super::prefixes::bytes;
use super::report::Figure;

const NAMESPACES: usize = 10;
/// Number of label sets of the pods of a namespace.
const APPS: usize = 4;
/// Number of backends of one slice, as clusters make slices.
const SLICE: usize = 100;
/// Number of endpoints of this node, each with labels of its own and under the same rules.
const ENDPOINTS: usize = 250;
/// Maximum number of changes of one kind that are measured.
const CHANGES: usize = 500;
/// Number of Services whose documents are read at once.
const READ_AT_ONCE: usize = 500;
/// Number of label changes of the namespace. The longest one counts.
const VERSIONS: usize = 3;

/// Promised times for one change of each kind.
const OF_A_SLICE: Duration = Duration::from_millis(5);
const OF_A_POD: Duration = Duration::from_millis(2);
const OF_A_NAMESPACE: Duration = Duration::from_secs(1);

/// A node of a cluster.
struct Member {
    node: Node,
    router: Router,
}

impl Member {
    /// The endpoints may connect to three of four kinds of pods, and to pods in namespaces with a
    /// label.
    fn start() -> Result<Self> {
        let mut rules = String::new();
        for namespace in 0..NAMESPACES {
            for app in 0..APPS - 1 {
                rules += &peer(&format!(
                    "app: a{app}, \"k8s:io.kubernetes.pod.namespace\": ns{namespace}"
                ));
            }
        }
        rules += &peer("\"k8s:io.cilium.k8s.namespace.labels.team\": v1");
        let policy = document(&egress("peers", "web", &rules))?;
        let endpoints: Vec<_> = (0..ENDPOINTS).map(|n| web(Some(n))).collect();
        Ok(Self {
            node: Node::start(config(), &[policy], &endpoints)?,
            router: Router::default(),
        })
    }

    /// Handles documents that were read at once.
    fn put(&mut self, documents: impl IntoIterator<Item = PolicyDocument>) -> Cost {
        let changes = documents.into_iter().map(SourceEvent::Apply);
        let changes = changes.map(PolicyChange::Document).collect();
        let start = Instant::now();
        let events = self.router.route(changes);
        let mut total = Cost {
            time: start.elapsed(),
            ..Cost::default()
        };
        for event in events {
            let cost = self.node.event(event);
            total.time += cost.time;
            total.longest = total.longest.max(cost.longest);
        }
        total
    }

    /// Writes to the ipcache and to policy maps so far.
    fn writes(&self) -> (u64, u64) {
        let counters = self.node.counters();
        (counters.ipcache_writes, counters.policy_writes)
    }

    /// Identities of local scopes and of endpoints and pods.
    fn identities(&self) -> u64 {
        self.node.identities() + self.node.core.summary().endpoint_identities as u64
    }

    /// A figure with the writes since `before`.
    fn figure(&self, name: &str, unit: &str, value: f64, before: (u64, u64)) -> Figure {
        let (ipcache, policy) = self.writes();
        Figure::new(name, unit, value).counted(
            self.identities(),
            ipcache - before.0,
            policy - before.1,
        )
    }
}

fn peer(labels: &str) -> String {
    format!(
        "- toEndpoints: [{{matchLabels: {{{labels}}}}}]\n  toPorts: [{{ports: [{{port: \"8080\", protocol: TCP}}]}}]\n"
    )
}

/// Namespace of a pod: pod numbers go round the namespaces. Each round has the next label set.
fn namespace_of(pod: usize) -> String {
    format!("ns{}", pod % NAMESPACES)
}

fn pod_address(pod: usize) -> Result<IpAddr> {
    Ok(Ipv4Addr::from_bits(0x0a80_0000 + u32::try_from(pod)?).into())
}

fn body(key: String, body: Body) -> PolicyDocument {
    PolicyDocument {
        key,
        source: "bench".to_owned(),
        warnings: Vec::new(),
        body,
    }
}

pub(super) fn pod(number: usize) -> Result<PolicyDocument> {
    pod_labelled(number, &[])
}

fn pod_labelled(number: usize, more: &[(&str, String)]) -> Result<PolicyDocument> {
    let app = number / NAMESPACES % APPS;
    let labels = [
        ("app", format!("a{app}")),
        ("pod-template-hash", format!("h{number}")),
    ];
    let labels = labels.iter().chain(more);
    let labels = labels.map(|(key, value)| ((*key).to_owned(), value.clone()));
    let pod = Pod {
        namespace: namespace_of(number),
        name: format!("p{number}"),
        uid: Some(format!("uid-{number}").into()),
        labels: labels.collect(),
        service_account: Some("default".to_owned()),
        node: Some(format!("node{}", number % 100)),
        addresses: vec![pod_address(number)?],
        created: Some(number as u64),
        ports: NamedPorts::default(),
    };
    let key = format!("Pod/{}/{}", pod.namespace, pod.name);
    Ok(body(key, Body::Pod(Arc::new(pod))))
}

fn namespace(number: usize, version: usize) -> PolicyDocument {
    let name = format!("ns{number}");
    let labels = BTreeMap::from([("team".to_owned(), format!("v{version}"))]);
    let key = format!("Namespace/{name}");
    body(
        key,
        Body::Namespace(Arc::new(Namespace {
            name,
            labels,
            uid: None,
        })),
    )
}

fn service(number: usize) -> Result<PolicyDocument> {
    let address = Ipv4Addr::from_bits(0x0a60_0000 + u32::try_from(number)?);
    let service = Service {
        namespace: namespace_of(number),
        name: format!("s{number}"),
        cluster_ips: vec![address.into()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: vec![ServicePort {
            name: "http".to_owned(),
            protocol: Protocol::Tcp,
            port: 80,
            node_port: None,
        }],
        selector: BTreeMap::new(),
        has_other_proxy: false,
    };
    let key = format!("Service/{}/{}", service.namespace, service.name);
    Ok(body(key, Body::Service(Arc::new(service))))
}

/// Number of the pod that is backend `index` of a Service. The pod is in the Service's namespace,
/// and has the label set of the Service's number.
fn backend(service: usize, index: usize) -> usize {
    let app = service / NAMESPACES % APPS;
    (index * APPS + app) * NAMESPACES + service % NAMESPACES
}

fn slice(service: usize, number: usize, pods: &[usize]) -> Result<PolicyDocument> {
    let mut backends = Vec::new();
    for pod in pods {
        backends.push(Backend {
            addresses: vec![pod_address(*pod)?],
            ready: true,
            serving: true,
            terminating: false,
            pod: Some(format!("{}/p{pod}", namespace_of(*pod))),
        });
    }
    let slice = EndpointSlice {
        namespace: namespace_of(service),
        name: format!("s{service}-{number}"),
        service: Some(format!("s{service}")),
        backends,
        ports: vec![SlicePort {
            name: "http".to_owned(),
            protocol: Protocol::Tcp,
            port: Some(8080),
        }],
    };
    let key = format!("EndpointSlice/{}/{}", slice.namespace, slice.name);
    Ok(body(key, Body::Slice(Arc::new(slice))))
}

/// Adds the namespaces and `each` pods in each namespace. Returns the time.
fn fill(member: &mut Member, each: usize) -> Result<Duration> {
    let mut time = member.put((0..NAMESPACES).map(|n| namespace(n, 0))).time;
    let pods: Result<Vec<_>> = (0..each * NAMESPACES).map(pod).collect();
    time += member.put(pods?).time;
    Ok(time)
}

/// Pods of other nodes, `each` in every namespace.
pub(crate) fn pods(each: usize) -> Result<Vec<Figure>> {
    let mut member = Member::start()?;
    let count = each * NAMESPACES;
    let (before, memory) = (member.writes(), resident()?);
    let time = fill(&mut member, each)?;
    let memory = resident()?.saturating_sub(memory);
    let written = member.writes().0 - before.0;
    ensure!(
        written == count as u64,
        "{written} addresses of {count} pods"
    );
    let mut figures = vec![
        member.figure("pods: all inserted", "ms", time.as_secs_f64() * 1e3, before),
        Figure::new("pods: inserted", "us/pod", per(time, count)),
        Figure::new("pods: memory", "bytes/pod", bytes(memory, count)),
    ];
    let before = member.writes();
    figures.push(relabelled(&mut member, "pods", each)?.promised_before(OF_A_NAMESPACE));
    let moved = (member.writes().0 - before.0) / VERSIONS as u64;
    ensure!(moved == each as u64, "{moved} addresses of {each} pods");
    let mut times = Vec::new();
    for number in count..count + CHANGES {
        times.push(member.put([pod(number)?]).time);
    }
    figures.push(percentile("pods: a new pod, p99", &mut times)?.promised_before(OF_A_POD));
    Ok(figures)
}

/// A namespace gets other labels: the longest time of several.
fn relabelled(member: &mut Member, what: &str, each: usize) -> Result<Timed> {
    let before = member.writes();
    let mut longest = Cost::default();
    for version in 1..=VERSIONS {
        let cost = member.put([namespace(0, version)]);
        longest.time = longest.time.max(cost.time);
        longest.longest = longest.longest.max(cost.longest);
    }
    let versions = VERSIONS as u64;
    let (ipcache, policy) = member.writes();
    let name = format!("{what}: labels of a namespace with {each}");
    Ok(Timed {
        figure: Figure::new(&name, "ms", longest.time.as_secs_f64() * 1e3).counted(
            member.identities(),
            (ipcache - before.0) / versions,
            (policy - before.1) / versions,
        ),
        time: longest.time,
        note: format!("longest part {:.1} ms", longest.longest.as_secs_f64() * 1e3),
    })
}

/// Services with `backends` pods each, of ten namespaces with four times as many pods.
pub(crate) fn services(count: usize, backends: usize) -> Result<Vec<Figure>> {
    let mut member = Member::start()?;
    fill(&mut member, backends * APPS)?;
    let (before, memory) = (member.writes(), resident()?);
    let mut time = Duration::ZERO;
    for first in (0..count).step_by(READ_AT_ONCE) {
        let mut documents = Vec::new();
        for number in first..count.min(first + READ_AT_ONCE) {
            documents.push(service(number)?);
            let pods: Vec<_> = (0..backends).map(|index| backend(number, index)).collect();
            for (part, pods) in pods.chunks(SLICE).enumerate() {
                documents.push(slice(number, part, pods)?);
            }
        }
        time += member.put(documents).time;
    }
    let memory = resident()?.saturating_sub(memory);
    let written = member.writes().0 - before.0;
    ensure!(
        written == count as u64,
        "{written} addresses of {count} Services"
    );
    let (ms, all) = (time.as_secs_f64() * 1e3, count * backends);
    let mut figures = vec![
        member.figure("services: all inserted", "ms", ms, before),
        Figure::new("services: inserted", "us/service", per(time, count)),
        Figure::new("services: memory", "bytes/backend", bytes(memory, all)),
    ];
    figures.push(slices(&mut member, count, backends)?);
    figures.push(new_pods(&mut member, count, backends)?);
    figures.push(label_sets(&mut member, count, backends)?);
    figures.push(relabelled(&mut member, "services", backends * APPS)?.figure);
    Ok(figures)
}

/// One backend of a slice becomes a pod that policy does not allow, and back: the Service closes to
/// every endpoint, and opens.
fn slices(member: &mut Member, count: usize, backends: usize) -> Result<Figure> {
    let before = member.writes();
    let mut times = Vec::new();
    let last = (backends - 1) % SLICE;
    let open = (0..count).filter(|number| number / NAMESPACES % APPS != APPS - 1);
    for number in open.take(CHANGES / 2) {
        let first = (backends - 1) / SLICE * SLICE;
        let pods: Vec<_> = (first..backends).map(|n| backend(number, n)).collect();
        let mut other = pods.clone();
        let closed = (APPS - 1) * NAMESPACES;
        *other.get_mut(last).context("a backend")? = closed;
        for pods in [&other, &pods] {
            let document = slice(number, first / SLICE, pods)?;
            times.push(member.put([document]).time);
        }
    }
    let written = member.writes().1 - before.1;
    let wanted = (times.len() * ENDPOINTS) as u64;
    ensure!(written == wanted, "{written} entries, not {wanted}");
    let timed = percentile("services: a slice changes, p99", &mut times)?;
    Ok(timed.promised_before(OF_A_SLICE))
}

/// A Service whose backends all have labels of their own. One of them becomes a pod that policy does
/// not allow, and back.
fn label_sets(member: &mut Member, count: usize, backends: usize) -> Result<Figure> {
    // The number of the next Service of pods that policy allows, and pod numbers after all others.
    let number = count.next_multiple_of(NAMESPACES * APPS);
    let first_pod = 1_000_000;
    let pods: Vec<_> = (0..backends)
        .map(|n| first_pod + n * NAMESPACES * APPS)
        .collect();
    let mut documents = vec![service(number)?];
    for at in &pods {
        documents.push(pod_labelled(*at, &[("instance", format!("i{at}"))])?);
    }
    for (part, pods) in pods.chunks(SLICE).enumerate() {
        documents.push(slice(number, part, pods)?);
    }
    member.put(documents);
    let before = member.writes();
    let (part, last) = pods
        .chunks(SLICE)
        .enumerate()
        .next_back()
        .context("a backend")?;
    let mut other = last.to_vec();
    *other.last_mut().context("a backend")? = (APPS - 1) * NAMESPACES;
    let mut times = Vec::new();
    for _ in 0..CHANGES / 2 {
        for pods in [&other[..], last] {
            let document = slice(number, part, pods)?;
            times.push(member.put([document]).time);
        }
    }
    let written = member.writes().1 - before.1;
    let wanted = (times.len() * ENDPOINTS) as u64;
    ensure!(written == wanted, "{written} entries, not {wanted}");
    let name = format!("services: a slice changes, {backends} label sets, p99");
    Ok(percentile(&name, &mut times)?.promised_before(OF_A_SLICE))
}

/// A pod starts and joins a Service.
fn new_pods(member: &mut Member, count: usize, backends: usize) -> Result<Figure> {
    let before = member.writes();
    let mut times = Vec::new();
    for number in 0..CHANGES.min(count) {
        let joins = backend(number, backends + number / NAMESPACES / APPS);
        let first = (backends - 1) / SLICE * SLICE;
        let mut pods: Vec<_> = (first..backends).map(|n| backend(number, n)).collect();
        pods.push(joins);
        let documents = [pod(joins)?, slice(number, first / SLICE, &pods)?];
        times.push(member.put(documents).time);
    }
    let written = member.writes().0 - before.0;
    ensure!(written == times.len() as u64, "{written} addresses");
    Ok(percentile("services: a new pod, p99", &mut times)?.promised_before(OF_A_POD))
}

/// A figure with its time.
struct Timed {
    figure: Figure,
    time: Duration,
    note: String,
}

impl Timed {
    fn promised_before(self, limit: Duration) -> Figure {
        let promise = format!("less than {} ms; {}", limit.as_millis(), self.note);
        self.figure.promised(promise, self.time < limit)
    }
}

fn percentile(name: &str, times: &mut [Duration]) -> Result<Timed> {
    times.sort_unstable();
    let at = |percent: usize| times.get(times.len() * percent / 100).copied();
    let (half, time) = (at(50).context("no times")?, at(99).context("no times")?);
    Ok(Timed {
        figure: Figure::new(name, "us", per(time, 1)),
        time,
        note: format!("median {:.0} us of {}", per(half, 1), times.len()),
    })
}

pub(super) fn resident() -> Result<u64> {
    usage::resident(std::process::id())
}
