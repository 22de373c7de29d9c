//! Pods that run when the agent starts are put under policy, and their connections go on.
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, pod, web_policy};
use holdfast_e2e::cni::{Runtime, Sandbox};
use holdfast_e2e::lab::{UDP_PORT, at, web4, web6};
use holdfast_e2e::pod::REFUSED_AFTER;
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// Web server that policy allows, by the number that `web4` takes.
const OPEN: u8 = 10;
/// Web server that policy does not allow.
const DENIED: u8 = 12;

/// Web may reach one server.
fn policy() -> Value {
    web_policy(&json!([{"toCIDR": [format!("{}/32", web4(OPEN)), format!("{}/128", web6(OPEN))]}]))
}

/// A pod of this node with the uid that its sandbox has.
fn running(name: &str, addresses: &[IpAddr]) -> Value {
    let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let mut object = pod("default", name, json!({"app": "web"}), "n1", &addresses);
    object["metadata"]["uid"] = json!(format!("uid-{name}"));
    object
}

fn addresses(of: &Pod) -> [IpAddr; 2] {
    [of.v4.into(), of.v6.into()]
}

struct Cluster {
    api: ApiServer,
    netns_dir: PathBuf,
}

impl Cluster {
    fn new(lab: &Lab) -> Result<Self> {
        let directory = lab.directory().join("apiserver");
        let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
        api.put(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}))?;
        api.put(policy())?;
        api.put(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1"}, "status": {"addresses": []},
        }))?;
        let netns_dir = lab.directory().join("netns");
        std::fs::create_dir(&netns_dir)?;
        Ok(Self { api, netns_dir })
    }

    /// Shows a namespace to the agent, as a container runtime does.
    fn show(&self, file: &str, namespace: &Path) -> Result<()> {
        Ok(symlink(namespace, self.netns_dir.join(file))?)
    }

    fn agent(&self, lab: &Lab) -> Result<Program> {
        lab.start_agent(&self.options(lab))
    }

    fn options(&self, lab: &Lab) -> AgentOptions {
        AgentOptions::default()
            .flag("--kubernetes")
            .flag(&format!(
                "--kubeconfig={}",
                self.api.files().kubeconfig.display()
            ))
            .flag("--node-name=n1")
            .flag(&format!("--cni-socket={}", lab.cni_socket().display()))
            .flag(&format!("--cni-netns-dir={}", self.netns_dir.display()))
    }
}

fn endpoints(lab: &Lab) -> Result<BTreeSet<String>> {
    let list = lab.agent_json(&["endpoint", "list"])?;
    let list = list.as_array().context("no list")?;
    let keys = list.iter().filter_map(|endpoint| endpoint["key"].as_str());
    Ok(keys.map(str::to_owned).collect())
}

fn has_endpoints(lab: &Lab, expected: &[&str]) -> Result<()> {
    let expected: BTreeSet<String> = expected.iter().map(|&key| key.to_owned()).collect();
    eventually(&format!("the endpoints are {expected:?}"), SOON, || {
        let found = endpoints(lab)?;
        ensure!(found == expected, "{found:?}");
        Ok(())
    })
}

/// Waits until policy decides about new connections of a pod.
fn judged(of: &Pod) -> Result<()> {
    eventually("the pod is under policy", SOON, || {
        of.expect_closed(at(web4(DENIED), 80))?;
        let datagram = of.datagram(at(web4(DENIED), UDP_PORT), REFUSED_AFTER);
        ensure!(datagram.is_err(), "a datagram passed");
        of.expect_open(at(web4(OPEN), 80))
    })
}

fn named(lab: &Lab, pod: &str, texts: &[&str]) -> Result<()> {
    eventually(&format!("status names {pod}"), SOON, || {
        let status = lab.agent_json(&["status"])?;
        let problems = status["problems"].as_array().context("problems")?;
        let problems = problems.iter().filter_map(Value::as_str);
        let about = format!("not under policy: {pod}:");
        let mut about = problems.filter(|problem| problem.starts_with(&about));
        let problem = about.next().with_context(|| format!("{status}"))?;
        let missing = texts.iter().find(|text| !problem.contains(**text));
        ensure!(missing.is_none(), "{missing:?} is not in: {problem}");
        Ok(())
    })
}

/// The pods that `status` and the metric show as started without policy, and until when.
fn started_open(lab: &Lab) -> Result<Vec<(String, String)>> {
    let status = lab.agent_json(&["status"])?;
    let pods = status["started_open"].as_array().into_iter().flatten();
    let pods = pods.map(|pod| {
        let text = |field: &str| pod[field].as_str().unwrap_or_default().to_owned();
        (text("pod"), text("until"))
    });
    let pods: Vec<(String, String)> = pods.collect();
    let counted = lab.metric(9962, "holdfast_kubernetes_pods_started_open", "")?;
    ensure!(counted == pods.len() as f64, "{counted}, and {pods:?}");
    Ok(pods)
}

fn unmanaged(lab: &Lab, expected: f64) -> Result<()> {
    eventually("pods without an endpoint are counted", SOON, || {
        let found = lab.metric(9962, "holdfast_kubernetes_pods_unmanaged", "")?;
        ensure!(found == expected, "{found}, not {expected}");
        Ok(())
    })
}

#[test]
fn connections_of_a_pod_that_ran_before_the_agent_go_on_under_policy() {
    with_lab(|lab| {
        let cluster = Cluster::new(lab)?;
        cluster.api.put(running("web", &addresses(&lab.a)))?;
        cluster.show("cni-a", &lab.a.netns.path())?;
        // A namespace of the node that is no pod's.
        cluster.show("world", &lab.world.path())?;
        let streams = [
            lab.a.stream(at(web4(OPEN), 80))?,
            lab.a.stream(at(web6(OPEN), 80))?,
        ];
        lab.a.expect_open(at(web4(DENIED), 80))?;

        let agent = cluster.agent(lab)?;
        has_endpoints(lab, &["netns/cni-a"])?;
        judged(&lab.a)?;
        for stream in &streams {
            stream.expect_alive()?;
        }
        unmanaged(lab, 0.0)?;
        let open = started_open(lab)?;
        let [(pod, until)] = open.as_slice() else {
            anyhow::bail!("{open:?}");
        };
        ensure!(pod == "default/web" && until.ends_with('Z'), "{open:?}");
        ensure!(
            lab.agent(&["status"])?.contains("Started open"),
            "not printed"
        );
        // A typing error in a command does not take the pod out of its policy.
        let netns = lab.a.netns.name();
        let other = ["endpoint", "add", "--netns", netns, "--pod", "default/wbe"];
        let refused = lab.agent(&other).err().context("it was added")?;
        let refused = format!("{refused:#}");
        ensure!(refused.contains("give --pod default/web"), "{refused}");
        has_endpoints(lab, &["netns/cni-a"])?;
        judged(&lab.a)?;

        // An agent that starts while the API server is away keeps the pod as an endpoint with its last labels.
        agent.kill_9()?;
        cluster.api.away();
        let log = lab.directory().join("log/agent.log");
        let command = lab.agent_command(&cluster.options(lab))?;
        let _agent = Program::start("holdfast-agent", command, &log)?;
        eventually("the agent answers", SOON, || endpoints(lab).map(drop))?;
        has_endpoints(lab, &["netns/cni-a"])?;
        judged(&lab.a)?;
        cluster.api.back()?;
        eventually("the agent is ready", Duration::from_secs(45), || {
            let status = lab.agent_json(&["status"])?;
            ensure!(status["ready"] == true, "{status}");
            Ok(())
        })?;
        judged(&lab.a)?;
        for stream in &streams {
            stream.expect_alive()?;
        }

        // CHECK finds the pod. ADD gives it the runtime's name: it is still one endpoint, with the
        // same number.
        let runtime = Runtime::new(lab)?;
        let sandbox = Sandbox::new(&lab.a, "web");
        let check = runtime.call("CHECK", &sandbox, json!({"prevResult": sandbox.result()}))?;
        ensure!(check.is_ok(), "{check:?}");
        let before = lab.endpoint_id(&lab.a)?;
        runtime.start(&sandbox)?;
        has_endpoints(lab, &["cni/c0ffee-web/eth0"])?;
        ensure!(lab.endpoint_id(&lab.a)? == before, "another endpoint");
        for stream in &streams {
            stream.expect_alive()?;
        }
        judged(&lab.a)?;
        // Neither a restart nor the runtime's name changes how the pod began.
        ensure!(
            started_open(lab)? == open,
            "{:?}, before {open:?}",
            started_open(lab)?
        );
        // A pod that the plugin added began under policy.
        cluster.api.put(running("late", &addresses(&lab.b)))?;
        runtime.start(&Sandbox::new(&lab.b, "late"))?;
        ensure!(started_open(lab)? == open, "{:?}", started_open(lab)?);
        Ok(())
    });
}

#[test]
fn a_pod_that_was_taken_in_goes_when_the_runtime_removes_it() {
    with_lab(|lab| {
        let cluster = Cluster::new(lab)?;
        let c = lab.add_pod("c", 100)?;
        cluster.api.put(running("web", &addresses(&lab.a)))?;
        cluster.api.put(running("c", &addresses(&c)))?;
        cluster.show("cni-a", &lab.a.netns.path())?;
        let _agent = cluster.agent(lab)?;
        has_endpoints(lab, &["netns/cni-a"])?;
        named(
            lab,
            "default/c",
            &[&c.v4.to_string(), "kubectl -n default delete pod c"],
        )?;
        unmanaged(lab, 1.0)?;
        // The pod's namespace appears, and the agent looks into it.
        cluster.show("cni-c", &c.netns.path())?;
        has_endpoints(lab, &["netns/cni-a", "netns/cni-c"])?;
        judged(&c)?;
        unmanaged(lab, 0.0)?;
        // A document for the pod is not needed, and `status` says so.
        let document = format!("netns: {}\nlabels: [k8s:app=web]\n", c.netns.name());
        std::fs::write(lab.directory().join("endpoints/c.yaml"), document)?;
        // A second interface out of the pod is not under policy, and `status` says so.
        lab.node.batch(&format!(
            "link add second type veth peer name net1 netns {}",
            c.netns.name()
        ))?;
        let texts = [
            "is already endpoint netns/cni-c; the agent put this pod under policy itself",
            "pod default/c has further interfaces to other namespaces (net1)",
        ];
        eventually("status names both", SOON, || {
            let status = lab.agent(&["status"])?;
            let missing = texts.iter().find(|text| !status.contains(**text));
            ensure!(missing.is_none(), "{status}");
            Ok(())
        })?;
        std::fs::remove_file(lab.directory().join("endpoints/c.yaml"))?;

        // The runtime removes one pod by DEL. The API server and the namespace's file have it a
        // little longer.
        let runtime = Runtime::new(lab)?;
        runtime.stop(&Sandbox {
            container: "of-before".to_owned(),
            ..Sandbox::new(&lab.a, "web")
        })?;
        has_endpoints(lab, &["netns/cni-c"])?;
        named(lab, "default/web", &[&lab.a.v4.to_string()])?;
        has_endpoints(lab, &["netns/cni-c"])?;
        // The other pod ends with its namespace.
        std::fs::remove_file(cluster.netns_dir.join("cni-c"))?;
        drop(c);
        has_endpoints(lab, &[])
    });
}

#[test]
fn namespaces_that_cannot_be_a_pods_are_refused_by_name() {
    with_lab(|lab| {
        let cluster = Cluster::new(lab)?;
        // Two pods on a bridge with the same address.
        let address: IpAddr = "10.78.0.10".parse()?;
        lab.node.batch(
            "link add cni0 type bridge\n\
             address add 10.78.0.1/24 dev cni0\n\
             link set cni0 up",
        )?;
        let [d, e] = [("d", 110), ("e", 111)].map(|(name, host)| lab.add_pod(name, host));
        let (d, e) = (d?, e?);
        for pod in [&d, &e] {
            lab.node
                .batch(&format!("link set {} master cni0", pod.host_side))?;
            pod.netns
                .batch(&format!("address add {address}/24 dev eth0"))?;
        }
        cluster.show("cni-d", &d.netns.path())?;
        cluster.show("cni-e", &e.netns.path())?;
        cluster.api.put(running("twice", &[address]))?;
        // Not a veth.
        lab.b.netns.batch(
            "link set eth0 name veth0\nlink add eth0 type bridge\naddress add 10.78.1.1/32 dev eth0",
        )?;
        cluster.show("cni-b", &lab.b.netns.path())?;
        cluster
            .api
            .put(running("no-veth", &["10.78.1.1".parse()?]))?;
        // A pod that gave itself the address of another one.
        cluster.api.put(running("web", &addresses(&lab.a)))?;
        cluster.show("cni-a", &lab.a.netns.path())?;
        let stolen: IpAddr = "10.77.0.99".parse()?;
        lab.a
            .netns
            .batch(&format!("address add {stolen}/32 dev eth0"))?;
        cluster.api.put(running("victim", &[stolen]))?;

        let _agent = cluster.agent(lab)?;
        has_endpoints(lab, &["netns/cni-a"])?;
        named(
            lab,
            "default/twice",
            &["cni-d, cni-e", &address.to_string()],
        )?;
        named(lab, "default/no-veth", &["cni-b", "bridge", "veth pair"])?;
        named(lab, "default/victim", &[&stolen.to_string()])?;
        unmanaged(lab, 3.0)?;
        has_endpoints(lab, &["netns/cni-a"])?;
        judged(&lab.a)
    });
}
