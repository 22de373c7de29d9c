//! Identity numbers of the whole cluster, compared with numbers of a node: two nodes of one
//! cluster, whose agents have different modes. Both see the same objects at the same time, so that
//! figures of one run can be compared.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, pod as small_pod};
use holdfast_e2e::cni::{Runtime, Sandbox};
use holdfast_e2e::{Lab, Pod, eventually};
use serde_json::{Value, json};

use super::count;
use super::objects;
use super::report::Report;
use super::watched::Agent;

/// Longest wait until every label set has its object. Agents make 20 objects a second.
const MADE: Duration = Duration::from_secs(300);
/// Number of pods that each node adds, each with labels that no other pod has.
const ADDS: u8 = 100;
/// Last byte of the address of the first added pod, for each node.
const FIRST: [u8; 2] = [13, 13 + ADDS];
/// Time between a Pod object and its ADD, as between the scheduler and the runtime.
const SCHEDULED: Duration = Duration::from_millis(100);
/// Number of changes of pods, and their rate per second.
const CHANGES: usize = 2_000;
const RATE: u32 = 500;
/// Promises: additional time of ADD, additional memory of the agent in MiB, and ratio of the CPU
/// times of a change.
const ADD_MORE: Duration = Duration::from_millis(150);
const MEMORY_MIB: f64 = 2.0;
const FLAT: f64 = 1.5;
/// Numbers from here on are a node's own.
const NODE_FIRST: u32 = 61_440;
const IDENTITIES: &str = "ciliumidentities";
const LEASE: &str = "holdfast-identities";

/// One node of the cluster.
struct Node<'a> {
    name: &'static str,
    /// Value of `--identity-allocation`: `node` or `cluster`.
    mode: &'static str,
    lab: &'a Lab,
    agent: Agent,
    runtime: Runtime,
    first: u8,
}

/// Measures both modes with `pods` pods that have a tenth as many label sets.
pub(super) fn measure(report: &mut Report, pods: usize) -> Result<()> {
    let labs = [Lab::new()?, Lab::new()?];
    let [one, two] = &labs;
    let api = cluster(one, two, pods)?;
    let with_node = start(&api, one, "n1", "node", FIRST[0])?;
    with_node.agent.settle()?;
    let asked = api.answered();
    let asked = asked
        .iter()
        .filter(|one| one.resource == IDENTITIES || one.object.1.as_deref() == Some(LEASE));
    let asked = asked.count();
    let promise = "no request: 0";
    report.promise(
        "numbers-node-requests",
        "requests",
        count(asked),
        promise,
        asked == 0,
    );

    let begin = Instant::now();
    let with_cluster = start(&api, two, "n2", "cluster", FIRST[1])?;
    let sets = pods / 10;
    wait_for_objects(&api, sets)?;
    report.add("numbers-all-made", "s", begin.elapsed().as_secs_f64());
    let nodes = [with_node, with_cluster];
    memory(report, &nodes)?;
    adds(report, &api, &nodes)?;
    let sets = sets + 2 * usize::from(ADDS);
    wait_for_objects(&api, sets)?;
    let sets = sets + changes(report, &api, &nodes, pods, sets)?;

    let answered = api.answered();
    let creates = answered
        .iter()
        .filter(|one| one.resource == IDENTITIES && one.verb == "create");
    let tried = creates.clone().count();
    let made = creates.filter(|one| one.code == 201).count();
    let promise = format!("one for each label set: {sets}");
    report.promise(
        "numbers-made",
        "creates",
        count(made),
        &promise,
        made == sets,
    );
    report.add("numbers-tried", "creates", count(tried));
    Ok(())
}

/// An API server that both nodes reach, with the pods of other nodes.
fn cluster(one: &Lab, two: &Lab, pods: usize) -> Result<ApiServer> {
    let second = two.node.name();
    one.node.batch(&format!(
        "link add api0 type veth peer name api0 netns {second}\n\
         address add 10.200.0.1/30 dev api0\nlink set api0 up"
    ))?;
    two.node
        .batch("address add 10.200.0.2/30 dev api0\nlink set api0 up")?;
    let at = (Ipv4Addr::new(10, 200, 0, 1), 0).into();
    let directory = one.directory().join("apiserver");
    let options = Options::default().and_identities();
    let api = ApiServer::start_at(Some(&one.node), at, &directory, options)?;
    for number in 0..objects::NAMESPACES {
        api.put(objects::namespace(number))?;
    }
    for name in ["n1", "n2"] {
        api.put(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name}, "status": {"addresses": []},
        }))?;
    }
    api.put(json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumClusterwideNetworkPolicy",
        "metadata": {"name": "added"},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": "added"}},
            "egress": [{"toEndpoints": [{"matchLabels": {"track": "stable"}}]}],
        },
    }))?;
    for number in 0..pods {
        api.put(objects::pod(number, "stable"))?;
    }
    Ok(api)
}

fn start<'a>(
    api: &ApiServer,
    lab: &'a Lab,
    name: &'static str,
    mode: &'static str,
    first: u8,
) -> Result<Node<'a>> {
    let flags = [
        format!("--identity-allocation={mode}"),
        format!("--cni-socket={}", lab.cni_socket().display()),
    ];
    Ok(Node {
        name,
        mode,
        lab,
        agent: Agent::start(lab, api, name, &flags)?,
        runtime: Runtime::new(lab)?,
        first,
    })
}

/// Waits until each of `sets` label sets has its object, and none has two.
fn wait_for_objects(api: &ApiServer, sets: usize) -> Result<()> {
    eventually("every label set has its object", MADE, || {
        let all = api.all(IDENTITIES)?;
        let labels: BTreeSet<String> = all
            .iter()
            .map(|object| object["security-labels"].to_string())
            .collect();
        ensure!(
            all.len() == sets && labels.len() == sets,
            "{} objects of {} label sets, of {sets}",
            all.len(),
            labels.len()
        );
        Ok(())
    })
}

fn memory(report: &mut Report, nodes: &[Node<'_>; 2]) -> Result<()> {
    let mut taken = Vec::new();
    for node in nodes {
        node.agent.settle()?;
        let (now, _) = node.agent.memory()?;
        report.add(&format!("numbers-memory-{}", node.mode), "MiB", now);
        taken.push(now);
    }
    let [of_node, of_cluster] = taken[..] else {
        return Ok(());
    };
    let more = of_cluster - of_node;
    let promise = format!("<= {MEMORY_MIB} MiB");
    report.promise(
        "numbers-memory",
        "MiB more",
        more,
        &promise,
        more <= MEMORY_MIB,
    );
    Ok(())
}

/// ADD of pods with labels that no pod had, on both nodes in turn.
fn adds(report: &mut Report, api: &ApiServer, nodes: &[Node<'_>; 2]) -> Result<()> {
    let mut taken = [Vec::new(), Vec::new()];
    // The pods' interfaces stay until the end.
    let mut pods: Vec<Pod> = Vec::new();
    let mut local = 0;
    for n in 0..ADDS {
        for (node, taken) in nodes.iter().zip(&mut taken) {
            let host = node.first + n;
            let name = format!("p{host}");
            let pod = node.lab.add_pod(&name, host)?;
            let sandbox = sandbox(&pod, &name, n);
            api.put(added(&sandbox, &pod, node.name)?)?;
            std::thread::sleep(SCHEDULED);
            let begin = Instant::now();
            node.runtime.start(&sandbox)?;
            taken.push(begin.elapsed());
            let number = node
                .agent
                .identity(pod.v4)?
                .context("a pod without a number")?;
            local += usize::from(node.mode == "cluster" && number >= NODE_FIRST);
            pods.push(pod);
        }
    }
    let mut slowest = Vec::new();
    for (node, taken) in nodes.iter().zip(&mut taken) {
        taken.sort_unstable();
        let at = |percent: usize| taken.get((taken.len() - 1) * percent / 100).copied();
        let (median, slow) = at(50).zip(at(99)).context("no ADD")?;
        let name = format!("numbers-add-{}", node.mode);
        report.add(&format!("{name}-p50"), "ms", median.as_secs_f64() * 1e3);
        report.add(&format!("{name}-p99"), "ms", slow.as_secs_f64() * 1e3);
        slowest.push(slow);
    }
    let [of_node, of_cluster] = slowest[..] else {
        return Ok(());
    };
    let more = of_cluster.as_secs_f64() - of_node.as_secs_f64();
    let promise = format!("<= {} ms", ADD_MORE.as_millis());
    let holds = more <= ADD_MORE.as_secs_f64();
    report.promise("numbers-add-p99", "ms more", more * 1e3, &promise, holds);
    let promise = "ADD waited for the number of the cluster: 0";
    report.promise(
        "numbers-add-local",
        "pods",
        count(local),
        promise,
        local == 0,
    );
    Ok(())
}

/// The sandboxes are spread over namespaces, because each namespace has a share of the objects that
/// an agent makes.
fn sandbox(pod: &Pod, name: &str, n: u8) -> Sandbox {
    let namespace = usize::from(n) % objects::NAMESPACES;
    Sandbox {
        pod: format!("ns-{namespace}/{name}"),
        ..Sandbox::new(pod, name)
    }
}

fn added(sandbox: &Sandbox, pod: &Pod, node: &str) -> Result<Value> {
    let (namespace, name) = sandbox.pod.split_once('/').context("namespace/name")?;
    let addresses = [pod.v4.to_string(), pod.v6.to_string()];
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let labels = json!({"app": "added", "number": name});
    let mut object = small_pod(namespace, name, labels, node, &addresses);
    object["metadata"]["uid"] = json!(sandbox.uid);
    Ok(object)
}

/// CPU time of a change between label sets that have numbers. Returns how many label sets were
/// added for it.
fn changes(
    report: &mut Report,
    api: &ApiServer,
    nodes: &[Node<'_>; 2],
    pods: usize,
    sets: usize,
) -> Result<usize> {
    let changed = CHANGES.min(pods);
    let more = changed / 10;
    for app in 0..more {
        api.put(objects::pod(app * 10, "canary"))?;
    }
    wait_for_objects(api, sets + more)?;
    let mut before = Vec::new();
    for node in nodes {
        node.agent.settle()?;
        before.push(node.agent.cpu()?);
    }
    let start = Instant::now();
    for n in 0..CHANGES {
        let due = start + Duration::from_secs(1) / RATE * u32::try_from(n)?;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        // Each pod changes with each round, and no label set loses its last pod for long.
        let track = if (n / changed).is_multiple_of(2) {
            "canary"
        } else {
            "stable"
        };
        api.put(objects::pod(n % changed, track))?;
    }
    let mut costs = Vec::new();
    for (node, before) in nodes.iter().zip(before) {
        node.agent.settle()?;
        let cpu = node.agent.cpu()? - before;
        let micros = cpu.as_secs_f64() * 1e6 / count(CHANGES);
        report.add(&format!("numbers-change-{}", node.mode), "us CPU", micros);
        costs.push(micros);
    }
    let [of_node, of_cluster] = costs[..] else {
        return Ok(more);
    };
    let ratio = of_cluster / of_node;
    let promise = format!("of a change with numbers of the node, <= {FLAT}");
    report.promise("numbers-change", "times", ratio, &promise, ratio <= FLAT);
    Ok(more)
}
