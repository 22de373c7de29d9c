//! NetworkPolicies of Kubernetes between real pods: 9 pods in 3 namespaces reach each other on TCP,
//! UDP and SCTP as each conformance case says, and policies are exchanged while the agent runs.
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::pod::FIRST_SYN;
use holdfast_e2e::reachability::{Servers, Target, answering};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Pod, eventually, with_lab};
use limits::yaml;
use netpol::conformance::Pod as Name;
use netpol::conformance::{
    CASES, Case, NAMESPACES, PORTS, Port, Step, namespace_document, namespace_labels, pod_document,
};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);

/// Labels of a namespace or of a pod.
type Labels = BTreeMap<String, String>;

struct Cluster<'a> {
    lab: &'a Lab,
    pods: BTreeMap<Name, Pod>,
    _servers: Vec<Servers>,
    /// Documents of pods and namespaces, by file.
    objects: BTreeMap<String, String>,
    /// Names of the policies in force, as `namespace/name`.
    policies: BTreeSet<String>,
}

fn file(policy: &str) -> String {
    format!("{}.json", policy.replace('/', "-"))
}

impl<'a> Cluster<'a> {
    fn new(lab: &'a Lab) -> Result<Self> {
        let (mut pods, mut servers) = (BTreeMap::new(), Vec::new());
        for (n, name) in Name::all().enumerate() {
            let interface = format!("{}{}", name.namespace, name.name);
            let pod = lab.add_pod(&interface, 21 + u8::try_from(n)?)?;
            servers.push(Servers::start(&pod.netns, &PORTS)?);
            pods.insert(name, pod);
        }
        Ok(Self {
            lab,
            pods,
            _servers: servers,
            objects: BTreeMap::new(),
            policies: BTreeSet::new(),
        })
    }

    /// Sets the given labels of pods and namespaces. All others get the labels that they had at the start.
    fn set_labels(
        &mut self,
        pods: &BTreeMap<Name, Labels>,
        namespaces: &BTreeMap<&'static str, Labels>,
    ) -> Result<()> {
        for name in NAMESPACES {
            let labels = namespaces.get(name).cloned();
            let labels = labels.unwrap_or_else(|| namespace_labels(name));
            self.put(
                format!("namespace-{name}"),
                &namespace_document(name, &labels),
            )?;
        }
        for name in Name::all() {
            let labels = pods.get(&name).cloned().unwrap_or_else(|| name.labels());
            let document = pod_document(name, &labels, &self.addresses(name));
            self.put(format!("pod-{}-{}", name.namespace, name.name), &document)?;
        }
        Ok(())
    }

    /// Writes an object of the cluster, if it changed.
    fn put(&mut self, name: String, document: &Value) -> Result<()> {
        let text = document.to_string();
        if self.objects.get(&name) != Some(&text) {
            self.lab.write_policy(&format!("{name}.json"), &text)?;
            self.objects.insert(name, text);
        }
        Ok(())
    }

    /// Puts the pods under the care of the agent.
    fn add_endpoints(&self) -> Result<()> {
        for (name, pod) in &self.pods {
            let (netns, key) = (pod.netns.name(), name.to_string());
            self.lab
                .agent(&["endpoint", "add", "--netns", netns, "--pod", &key])?;
            self.lab.endpoint_id(pod)?;
        }
        Ok(())
    }

    fn revision(&self) -> Result<u64> {
        let status = self.lab.agent_json(&["status"])?;
        let revision = status.pointer("/summary/revision").and_then(Value::as_u64);
        revision.context("no revision")
    }

    /// Puts policies in force and takes others away. Returns when the agent has the changes.
    fn set_policies(&mut self, apply: &[(&str, Value)], delete: &BTreeSet<String>) -> Result<()> {
        if apply.is_empty() && delete.is_empty() {
            return Ok(());
        }
        let before = self.revision()?;
        for (key, document) in apply {
            self.lab.write_policy(&file(key), &document.to_string())?;
            self.policies.insert((*key).to_owned());
        }
        for key in delete {
            self.lab.remove_policy(&file(key))?;
            self.policies.remove(key);
        }
        let wanted: BTreeSet<String> = self
            .policies
            .iter()
            .map(|key| format!("NetworkPolicy/{key}"))
            .collect();
        eventually("the agent has the policies", SOON, || {
            let listing = self.lab.agent_json(&["policy", "get"])?;
            let rejected = listing.get("rejected").and_then(Value::as_array);
            ensure!(rejected.is_none_or(Vec::is_empty), "refused: {listing}");
            let policies = listing.get("policies").and_then(Value::as_array);
            let keys = policies
                .context("no policies")?
                .iter()
                .filter_map(|p| p.get("key")?.as_str());
            let keys: BTreeSet<String> = keys.map(str::to_owned).collect();
            ensure!(keys == wanted, "in force: {keys:?}");
            ensure!(self.revision()? > before, "still the revision before");
            Ok(())
        })
    }

    fn addresses(&self, name: Name) -> [IpAddr; 2] {
        let pod = &self.pods[&name];
        [pod.v4.into(), pod.v6.into()]
    }

    /// Fails unless exactly the ports that the step says answer a pod. Returns the number of ports that it tried.
    fn check_client(&self, step: &Step, from: Name) -> Result<usize> {
        let mut names = BTreeMap::new();
        let mut wanted = BTreeSet::new();
        for to in Name::all().filter(|to| *to != from) {
            for (address, port) in self
                .addresses(to)
                .into_iter()
                .flat_map(|a| Port::all().map(move |p| (a, p)))
            {
                let target = Target {
                    at: SocketAddr::new(address, port.number),
                    protocol: port.protocol,
                };
                names.insert(target, format!("{from} > {to} {port} ({address})"));
                if step
                    .is_open(from, to, port)
                    .context("the step says nothing of it")?
                {
                    wanted.insert(target);
                }
            }
        }
        let targets: BTreeSet<Target> = names.keys().copied().collect();
        let found = answering(&self.pods[&from].netns, &targets, &wanted)?;
        let differ: Vec<&String> = found
            .symmetric_difference(&wanted)
            .map(|t| &names[t])
            .collect();
        let closed = wanted.difference(&found).count();
        ensure!(
            differ.is_empty(),
            "{} differ, of which {closed} should be open: {:?}",
            differ.len(),
            differ.iter().take(4).collect::<Vec<_>>()
        );
        Ok(targets.len())
    }

    /// Makes every pod try every port of every other pod. Returns the number of ports.
    fn check(&self, step: &Step) -> Result<usize> {
        std::thread::scope(|scope| {
            let clients =
                Name::all().map(|from| scope.spawn(move || self.check_client(step, from)));
            let clients: Vec<_> = clients.collect();
            let results = clients
                .into_iter()
                .map(|client| client.join().expect("it did not panic"));
            results.sum()
        })
    }
}

fn cases(address: impl Fn(Name) -> String) -> Result<Vec<Case>> {
    let documents = yaml::documents(CASES);
    let values = documents.iter().map(|document| document.value());
    let values = values.filter(|value| !matches!(value, Ok(Value::Null)));
    values
        .map(|value| Ok(Case::read(&value?, &address)?))
        .collect()
}

/// Plays a case without policies of earlier cases. Returns the number of ports tried.
fn play(cluster: &mut Cluster<'_>, case: &Case) -> Result<usize> {
    let old = cluster.policies.clone();
    cluster.set_policies(&[], &old)?;
    let (mut pods, mut namespaces) = (BTreeMap::new(), BTreeMap::new());
    cluster.set_labels(&pods, &namespaces)?;
    let mut packets = 0;
    for (n, step) in case.steps.iter().enumerate() {
        let apply: Vec<_> = step.policies().collect();
        cluster.set_policies(&apply, &step.delete)?;
        let pod = |name: &str| Name::all().find(|pod| pod.to_string() == name);
        for (name, labels) in &step.pods {
            pods.insert(pod(name).context("a pod")?, labels.clone());
        }
        for (name, labels) in &step.namespaces {
            let name = NAMESPACES.iter().find(|known| *known == name);
            namespaces.insert(*name.context("a namespace")?, labels.clone());
        }
        cluster.set_labels(&pods, &namespaces)?;
        packets += eventually(&format!("step {n}"), SOON, || cluster.check(step))?;
    }
    Ok(packets)
}

#[test]
fn pods_reach_each_other_as_the_conformance_cases_say() {
    with_lab(|lab| {
        let mut cluster = Cluster::new(lab)?;
        cluster.set_labels(&BTreeMap::new(), &BTreeMap::new())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        cluster.add_endpoints()?;
        let cases = cases(|name| cluster.pods[&name].v4.to_string())?;
        ensure!(cases.len() == 48, "{} cases", cases.len());
        let mut failed = Vec::new();
        let mut packets = 0;
        for case in &cases {
            match play(&mut cluster, case) {
                Ok(number) => packets += number,
                Err(error) => failed.push(format!("{} ({}): {error:#}", case.id, case.case)),
            }
        }
        println!("{} cases, {packets} ports tried", cases.len());
        ensure!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
        Ok(())
    });
}

const WEB: &str = "k8s:app=web,k8s:io.kubernetes.pod.namespace=shop";
const API: &str = "k8s:app=api,k8s:io.kubernetes.pod.namespace=shop";

const POLICY: &str = r#"apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress, Egress]
  ingress:
  - from: [{podSelector: {matchLabels: {app: api}}}]
    ports: [{port: 80}]
  egress:
  - to:
    - {ipBlock: {cidr: 203.0.113.0/24, except: [203.0.113.12/32]}}
    - {ipBlock: {cidr: 10.77.0.0/16}}
    ports: [{port: 80, endPort: 100}]
"#;

const DENY: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egressDeny: [{toCIDR: [203.0.113.11/32]}]
"#;

/// Versions of [`POLICY`] that are refused: what is replaced, by what, and the field.
const REFUSED: [(&str, &str, &str); 7] = [
    (
        "[203.0.113.12/32]",
        "[198.51.100.0/24]",
        "spec.egress[0].to[0].ipBlock.except[0]",
    ),
    (
        "[203.0.113.12/32]",
        "[\"2001:db8::/64\"]",
        "spec.egress[0].to[0].ipBlock.except[0]",
    ),
    (
        "port: 80, endPort",
        "port: http, endPort",
        "spec.egress[0].ports[0].endPort",
    ),
    (
        "{ipBlock:",
        "{podSelector: {}, ipBlock:",
        "spec.egress[0].to[0].ipBlock",
    ),
    (
        "{podSelector: {matchLabels: {app: api}}}",
        "{}",
        "spec.ingress[0].from[0]",
    ),
    ("policyTypes", "policyType", "spec.policyType"),
    (
        "203.0.113.0/24",
        "203.0.113.0/33",
        "spec.egress[0].to[0].ipBlock.cidr",
    ),
];

/// What [`POLICY`] means for web (pod a), for api (pod b), and for the node.
fn policy_holds(lab: &Lab) -> Result<()> {
    let web = lab.a.v4.into();
    lab.a.expect_open(at(web4(10), 80))?;
    lab.a.expect_closed(at(web4(12), 80))?;
    lab.a.expect_closed(at(web4(10), 443))?;
    lab.a.expect_closed(at(lab.b.v4.into(), 80))?;
    lab.b.expect_open(at(web, 80))?;
    lab.b.expect_closed(at(web, 81))?;
    let node = lab
        .node
        .enter(|| TcpStream::connect_timeout(&at(web, 81), FIRST_SYN))?;
    node.context("the node reaches its pod")?;
    Ok(())
}

fn refusals(lab: &Lab) -> Result<String> {
    let listing = lab.agent_json(&["policy", "get"])?;
    let refused = listing
        .get("rejected")
        .context("no list of refused documents")?;
    Ok(refused.to_string())
}

#[test]
fn a_network_policy_holds_beside_others_and_its_last_good_version_stays() {
    with_lab(|lab| {
        let own = [&lab.a, &lab.b].map(|pod| [pod.v4.into(), pod.v6.into()]);
        let _a = Web::start(&lab.a.netns, &own[0], &[80, 81], &[])?;
        let _b = Web::start(&lab.b.netns, &own[1], &[80], &[])?;
        lab.write_policy("web.yaml", POLICY)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&lab.b, API)?;
        policy_holds(lab)?;

        // The rule of a packet is named by its field.
        let id = lab.endpoint_id(&lab.a)?.to_string();
        let why = lab.agent(&["why", &id, "203.0.113.10:80"])?;
        ensure!(
            why.contains("NetworkPolicy/shop/web spec.egress[0]"),
            "{why}"
        );
        let Err(why) = lab.agent(&["why", &id, "203.0.113.12:80"]) else {
            panic!("a part that the policy leaves out is open");
        };
        ensure!(format!("{why:#}").contains("no rule"), "{why:#}");
        // A block that covers a pod does not mean the pod.
        let api = at(lab.b.v4.into(), 80).to_string();
        let Err(why) = lab.agent(&["why", &id, &api]) else {
            panic!("a block opens the way to a pod");
        };
        ensure!(
            format!("{why:#}").contains("a block covers its address"),
            "{why:#}"
        );
        let trace = [
            "policy", "trace", "--from", API, "--to", WEB, "--port", "80",
        ];
        let trace = lab.agent(&trace)?;
        ensure!(
            trace.contains("NetworkPolicy/shop/web spec.ingress[0]"),
            "{trace}"
        );

        for (part, other, field) in REFUSED {
            lab.write_policy("web.yaml", &POLICY.replace(part, other))?;
            eventually(&format!("{field} is named"), SOON, || {
                let refused = refusals(lab)?;
                ensure!(refused.contains(&format!("{field}: ")), "{refused}");
                ensure!(refused.contains("NetworkPolicy/shop/web"), "{refused}");
                Ok(())
            })?;
        }
        policy_holds(lab)?;

        // The agent restarts while the document is bad.
        let stream = lab.a.stream(at(web4(11), 80))?;
        agent.kill_9()?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        policy_holds(lab)?;
        stream.expect_alive()?;

        // A deny of another kind of policy overrides what the document allows.
        lab.write_policy("web.yaml", POLICY)?;
        lab.write_policy("deny.yaml", DENY)?;
        stream.expect_cut(SOON)?;
        eventually("the document is accepted", SOON, || {
            let refused = refusals(lab)?;
            ensure!(refused == "[]", "{refused}");
            Ok(())
        })?;
        lab.a.expect_closed(at(web4(11), 80))?;
        policy_holds(lab)
    });
}
