//! Each conformance case has the reachability that Kubernetes expects, between 9 pods, on TCP, UDP
//! and SCTP, IPv4 and IPv6.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::netpol_run::{NODE, SOON};
use holdfast_e2e::reachability::{Servers, Target, answering};
use holdfast_e2e::{Lab, Pod, eventually, with_lab};
use limits::yaml;
use netpol::conformance::Pod as Name;
use netpol::conformance::{
    Blocks, CASES, Case, NAMESPACES, PORTS, Port, Step, namespace_document, namespace_labels,
    pod_document,
};
use serde_json::{Value, json};

/// Ports of all pods that one pod of the lab tries in each check of one family.
const TRIED: usize = 8 * 6;

struct Cluster<'a> {
    lab: &'a Lab,
    pods: BTreeMap<Name, Pod>,
    _servers: Vec<Servers>,
    /// Documents in the policy directory, by file.
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
        let mut cluster = Self {
            lab,
            pods,
            _servers: servers,
            files: BTreeMap::new(),
        };
        cluster.write(cluster.objects(&Step::default()))?;
        Ok(cluster)
    }

    fn addresses(&self, name: Name) -> [IpAddr; 2] {
        let pod = &self.pods[&name];
        [pod.v4.into(), pod.v6.into()]
    }

    /// Documents of namespaces and pods, with the labels that the step gives them.
    fn objects(&self, step: &Step) -> BTreeMap<String, Value> {
        let mut documents = BTreeMap::new();
        for name in NAMESPACES {
            let labels = step.namespaces.get(name).cloned();
            let labels = labels.unwrap_or_else(|| namespace_labels(name));
            let file = format!("namespace-{name}.json");
            documents.insert(file, namespace_document(name, &labels));
        }
        for name in Name::all() {
            let labels = step.pods.get(&name.to_string()).cloned();
            let labels = labels.unwrap_or_else(|| name.labels());
            let mut document = pod_document(name, &labels, &self.addresses(name));
            document["spec"]["nodeName"] = json!(NODE);
            let file = format!("pod-{}-{}.json", name.namespace, name.name);
            documents.insert(file, document);
        }
        documents
    }

    /// Makes these the documents of the policy directory.
    fn write(&mut self, documents: BTreeMap<String, Value>) -> Result<()> {
        for file in self
            .files
            .keys()
            .filter(|file| !documents.contains_key(*file))
        {
            self.lab.remove_policy(file)?;
        }
        let documents = documents.into_iter();
        let texts = documents.map(|(file, document)| (file, document.to_string()));
        let texts: BTreeMap<String, String> = texts.collect();
        for (file, text) in &texts {
            if self.files.get(file) != Some(text) {
                self.lab.write_policy(file, text)?;
            }
        }
        self.files = texts;
        Ok(())
    }

    /// Plays a case, with blocks of this family.
    fn play(&mut self, case: &Case, families: &[Family]) -> Result<usize> {
        let (mut state, mut policies) = (Step::default(), BTreeMap::new());
        let mut tried = 0;
        for (n, step) in case.steps.iter().enumerate() {
            state.pods.extend(step.pods.clone());
            state.namespaces.extend(step.namespaces.clone());
            for (key, document) in step.policies() {
                policies.insert(format!("policy-{}.json", key.replace('/', "-")), document);
            }
            for key in &step.delete {
                policies.remove(&format!("policy-{}.json", key.replace('/', "-")));
            }
            let mut documents = self.objects(&state);
            documents.extend(policies.clone());
            self.write(documents)?;
            for family in families {
                let check = || self.check(step, *family);
                tried += eventually(&format!("step {n}, {family:?}"), SOON, check)?;
            }
        }
        Ok(tried)
    }

    /// Every pod tries every port of every other pod. Gives the number of ports.
    fn check(&self, step: &Step, family: Family) -> Result<usize> {
        std::thread::scope(|scope| {
            let clients =
                Name::all().map(|from| scope.spawn(move || self.check_client(step, from, family)));
            let clients: Vec<_> = clients.collect();
            let results = clients
                .into_iter()
                .map(|client| client.join().expect("it did not panic"));
            results.sum()
        })
    }

    /// Fails if other ports of other pods answer a pod than Kubernetes expects.
    fn check_client(&self, step: &Step, from: Name, family: Family) -> Result<usize> {
        let (mut names, mut wanted) = (BTreeMap::new(), BTreeSet::new());
        for to in Name::all().filter(|to| *to != from) {
            let address = family.of(self.addresses(to));
            for port in Port::all() {
                let at = SocketAddr::new(address, port.number);
                let protocol = port.protocol;
                let target = Target { at, protocol };
                names.insert(target, format!("{from} > {to} {port}"));
                let is_open = step.is_open(Blocks::Everything, from, to, port);
                if is_open.context("the step says nothing of it")? {
                    wanted.insert(target);
                }
            }
        }
        let targets: BTreeSet<Target> = names.keys().copied().collect();
        let found = answering(&self.pods[&from].netns, &targets, &wanted)?;
        let differ = found.symmetric_difference(&wanted);
        let differ: Vec<&String> = differ.map(|target| &names[target]).collect();
        ensure!(
            differ.is_empty(),
            "{} differ, of which {} should be open: {:?}",
            differ.len(),
            wanted.difference(&found).count(),
            differ.iter().take(4).collect::<Vec<_>>()
        );
        ensure!(targets.len() == TRIED, "{} ports", targets.len());
        Ok(TRIED)
    }
}

#[derive(Clone, Copy, Debug)]
enum Family {
    V4,
    V6,
}

impl Family {
    const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn of(self, [v4, v6]: [IpAddr; 2]) -> IpAddr {
        match self {
            Self::V4 => v4,
            Self::V6 => v6,
        }
    }
}

/// The cases, with blocks of the addresses of one family.
fn cases(cluster: &Cluster<'_>, family: Family) -> Result<Vec<Case>> {
    let documents = yaml::documents(CASES);
    let values = documents.iter().map(|document| document.value());
    let values = values.filter(|value| !matches!(value, Ok(Value::Null)));
    let address = |name| family.of(cluster.addresses(name));
    values
        .map(|value| Ok(Case::read(&value?, address)?))
        .collect()
}

/// Plays the cases whose ids begin with one of these texts. Gives their number.
fn play(cluster: &mut Cluster<'_>, ids: &[&str]) -> Result<usize> {
    let (mut played, mut tried, mut failed) = (BTreeSet::new(), 0, Vec::new());
    for family in Family::ALL {
        for case in cases(cluster, family)? {
            // Blocks are of one family; other policies mean both.
            let families = match (family, case.has_blocks_of_pods()) {
                (family, true) => vec![family],
                (Family::V4, false) => Family::ALL.to_vec(),
                (Family::V6, false) => continue,
            };
            if !ids.iter().any(|id| case.id.starts_with(id)) {
                continue;
            }
            match cluster.play(&case, &families) {
                Ok(number) => tried += number,
                Err(error) => failed.push(format!("{} ({}): {error:#}", case.id, case.case)),
            }
            played.insert(case.id);
        }
    }
    println!("{} cases, {tried} ports tried", played.len());
    ensure!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
    Ok(played.len())
}

#[test]
fn routed_pods_reach_each_other_as_kubernetes_expects() {
    with_lab(|lab| {
        let mut cluster = Cluster::new(lab, |name, host| lab.add_pod(name, host))?;
        let _netpol = lab.start_netpol(&[])?;
        let played = play(&mut cluster, &["tcp", "udp", "sctp"])?;
        ensure!(played == 48, "{played} cases");
        Ok(())
    });
}

#[test]
fn pods_on_a_bridge_reach_each_other_as_kubernetes_expects() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        let mut cluster = Cluster::new(lab, |name, host| bridge.add_pod(name, host))?;
        let _netpol = lab.start_netpol(&["--set-bridge-sysctls"])?;
        let played = play(&mut cluster, &["tcp-0", "tcp-3", "udp", "sctp"])?;
        ensure!(played >= 12, "{played} cases");
        Ok(())
    });
}
