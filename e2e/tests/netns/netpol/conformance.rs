//! 9 pods in 3 namespaces reach each other as the cases of Kubernetes' own suite expect it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::netpol_run::NODE;
use holdfast_e2e::reachability::{Servers, Target, answering};
use holdfast_e2e::{Lab, Pod, eventually, with_lab};
use limits::yaml;
use netpol::conformance::Pod as Name;
use netpol::conformance::{
    CASES, Case, NAMESPACES, PORTS, Port, Step, namespace_document, namespace_labels, pod_document,
};
use serde_json::{Value, json};

use super::{SOON, addresses};

/// Number of cases that are also played on a bridge.
const BRIDGED: usize = 12;

type Labels = BTreeMap<String, String>;

struct Cluster<'a> {
    lab: &'a Lab,
    pods: BTreeMap<Name, Pod>,
    _servers: Vec<Servers>,
    /// Files in the policy directory.
    files: BTreeMap<String, String>,
}

impl<'a> Cluster<'a> {
    fn new(lab: &'a Lab, add_pod: impl Fn(&str, u8) -> Result<Pod>) -> Result<Self> {
        let (mut pods, mut servers) = (BTreeMap::new(), Vec::new());
        for (n, name) in Name::all().enumerate() {
            let interface = format!("{}{}", name.namespace, name.name);
            let pod = add_pod(&interface, 21 + u8::try_from(n)?)?;
            servers.push(Servers::start(&pod.netns, &PORTS)?);
            pods.insert(name, pod);
        }
        Ok(Self {
            lab,
            pods,
            _servers: servers,
            files: BTreeMap::new(),
        })
    }

    /// Makes these the documents in the policy directory.
    fn set(&mut self, wanted: BTreeMap<String, String>) -> Result<()> {
        for (file, text) in &wanted {
            if self.files.get(file) != Some(text) {
                self.lab.write_policy(file, text)?;
            }
        }
        for file in self.files.keys().filter(|file| !wanted.contains_key(*file)) {
            self.lab.remove_policy(file)?;
        }
        self.files = wanted;
        Ok(())
    }

    /// Documents of all pods and namespaces: with these labels, or else with the labels of the
    /// start.
    fn objects(
        &self,
        pods: &BTreeMap<Name, Labels>,
        namespaces: &BTreeMap<String, Labels>,
    ) -> BTreeMap<String, String> {
        let namespaces = NAMESPACES.map(|name| {
            let labels = namespaces.get(name).cloned();
            let labels = labels.unwrap_or_else(|| namespace_labels(name));
            let document = namespace_document(name, &labels).to_string();
            (format!("namespace-{name}.json"), document)
        });
        let pods = Name::all().map(|name| {
            let labels = pods.get(&name).cloned().unwrap_or_else(|| name.labels());
            let mut document = pod_document(name, &labels, &addresses(&self.pods[&name]));
            document["spec"]["nodeName"] = json!(NODE);
            (
                format!("pod-{}-{}.json", name.namespace, name.name),
                document.to_string(),
            )
        });
        namespaces.into_iter().chain(pods).collect()
    }

    /// Plays a case. Returns the number of ports tried.
    fn play(&mut self, case: &Case) -> Result<usize> {
        let (mut pods, mut namespaces) = (BTreeMap::new(), BTreeMap::new());
        let mut policies: BTreeMap<String, String> = BTreeMap::new();
        let file = |key: &str| format!("policy-{}.json", key.replace('/', "-"));
        let mut tried = 0;
        for (n, step) in case.steps.iter().enumerate() {
            for (key, document) in step.policies() {
                policies.insert(file(key), document.to_string());
            }
            for key in &step.delete {
                policies.remove(&file(key));
            }
            for (name, labels) in &step.pods {
                let mut all = Name::all();
                let pod = all.find(|pod| pod.to_string() == *name);
                pods.insert(pod.context("a pod")?, labels.clone());
            }
            namespaces.extend(step.namespaces.clone());
            let mut documents = self.objects(&pods, &namespaces);
            documents.extend(policies.clone());
            self.set(documents)?;
            eventually("the documents are in force", SOON, || {
                let output = self.lab.netpol_command(&["--dry-run"])?.output()?;
                let printed = String::from_utf8_lossy(&output.stdout).into_owned();
                ensure!(printed.contains("is the same"), "{printed}");
                Ok(())
            })?;
            tried += eventually(&format!("step {n}"), SOON, || self.check(step))?;
        }
        Ok(tried)
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

    fn check_client(&self, step: &Step, from: Name) -> Result<usize> {
        let mut names = BTreeMap::new();
        let mut wanted = BTreeSet::new();
        for to in Name::all().filter(|to| *to != from) {
            let addresses = addresses(&self.pods[&to]).into_iter();
            for (address, port) in addresses.flat_map(|a| Port::all().map(move |p| (a, p))) {
                let target = Target {
                    at: SocketAddr::new(address, port.number),
                    protocol: port.protocol,
                };
                names.insert(target, format!("{from} > {to} {port} ({address})"));
                let is_open = step.is_open_by_address(from, to, port, address);
                if is_open.context("the step says nothing of it")? {
                    wanted.insert(target);
                }
            }
        }
        let targets: BTreeSet<Target> = names.keys().copied().collect();
        let found = answering(&self.pods[&from].netns, &targets, &wanted)?;
        let differ = found.symmetric_difference(&wanted).map(|t| &names[t]);
        let differ: Vec<&String> = differ.take(4).collect();
        ensure!(differ.is_empty(), "{differ:?} and perhaps more");
        Ok(targets.len())
    }
}

fn cases(address: impl Fn(Name) -> IpAddr) -> Result<Vec<Case>> {
    let documents = yaml::documents(CASES);
    let values = documents.iter().map(|document| document.value());
    let values = values.filter(|value| !matches!(value, Ok(Value::Null)));
    values
        .map(|value| Ok(Case::read(&value?, |name| address(name).to_string())?))
        .collect()
}

/// Plays every case that `chosen` picks by its place. The error lists all cases that differ.
fn play(mut cluster: Cluster<'_>, chosen: impl Fn(usize) -> bool, count: usize) -> Result<()> {
    let _netpol = cluster.lab.start_netpol(&[])?;
    let cases = cases(|name| cluster.pods[&name].v4.into())?;
    let cases = cases.iter().enumerate().filter(|(n, _)| chosen(*n));
    let (mut failed, mut played) = (Vec::new(), 0);
    for (_, case) in cases {
        played += 1;
        if let Err(error) = cluster.play(case) {
            failed.push(format!("{} ({}): {error:#}", case.id, case.case));
        }
    }
    ensure!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
    ensure!(played == count, "{played} cases");
    Ok(())
}

#[test]
fn routed_pods_reach_each_other_as_kubernetes_expects() {
    with_lab(|lab| {
        let cluster = Cluster::new(lab, |name, host| lab.add_pod(name, host))?;
        play(cluster, |_| true, 48)
    });
}

#[test]
fn pods_on_a_bridge_reach_each_other_as_kubernetes_expects() {
    with_lab(|lab| {
        lab.node.sysctl(&[
            ("net.bridge.bridge-nf-call-iptables", "1"),
            ("net.bridge.bridge-nf-call-ip6tables", "1"),
        ])?;
        let bridge = Bridge::new(lab, "br0")?;
        let cluster = Cluster::new(lab, |name, host| bridge.add_pod(name, host))?;
        play(cluster, |n| n % 4 == 1, BRIDGED)
    });
}
