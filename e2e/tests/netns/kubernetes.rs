//! An agent takes pods, namespaces, Services and policies from the API server of a cluster. It
//! enforces the last state that it saw while the server is away, refuses requests or sends odd
//! objects.
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{
    ApiServer, Options, Refusal, kubeconfig, namespace, pod, web_policy,
};
use holdfast_e2e::cni::{Runtime, Sandbox};
use holdfast_e2e::lab::{at, web4, web6};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// Time until a restarted watch must be up to date: the longest pause of a watch is 30 s.
const FOLLOWS: Duration = Duration::from_secs(45);
/// Time until a new token must be in use: the agent reads the token's file again each minute.
const ROTATED: Duration = Duration::from_secs(60);
/// Time until the agent must use its stored list, which it does after 15 s.
const STANDS_IN: Duration = Duration::from_secs(30);
/// Every kind that is watched.
const KINDS: [&str; 10] = [
    "namespaces",
    "pods",
    "services",
    "endpointslices",
    "servicecidrs",
    "networkpolicies",
    "ciliumnetworkpolicies",
    "ciliumclusterwidenetworkpolicies",
    "ciliumcidrgroups",
    "ciliumnodes",
];

/// Web may reach databases, and everything in namespaces of team a.
fn policy() -> Value {
    web_policy(&json!([
        {"toEndpoints": [{"matchLabels": {"app": "db"}}]},
        {"toEndpoints": [{"matchLabels": {
            "k8s:io.cilium.k8s.namespace.labels.team": "a",
        }}]},
    ]))
}

fn remote(name: &str, app: &str, addresses: &[IpAddr]) -> Value {
    let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    pod("default", name, json!({"app": app}), "n2", &addresses)
}

fn own(name: &str, app: &str, of: &Pod) -> Value {
    let addresses = [of.v4.to_string(), of.v6.to_string()];
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    pod("default", name, json!({"app": app}), "n1", &addresses)
}

/// A pod of this node whose network is not there yet.
fn db_0(app: &str) -> Value {
    pod("default", "db-0", json!({"app": app}), "n1", &[])
}

/// An API server with a policy, the pod that it selects, and a database on another node.
fn cluster(lab: &Lab) -> Result<ApiServer> {
    let directory = lab.directory().join("apiserver");
    let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
    for object in [
        namespace("default", "c"),
        namespace("shop", "b"),
        policy(),
        own("web", "web", &lab.a),
        remote("db", "db", &[web4(10), web6(10)]),
        pod(
            "shop",
            "cart",
            json!({"app": "cart"}),
            "n2",
            &[&web4(11).to_string()],
        ),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1"}, "status": {"addresses": []},
        }),
    ] {
        api.put(object)?;
    }
    Ok(api)
}

fn options(kubeconfig: &Path) -> AgentOptions {
    AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={}", kubeconfig.display()))
        .flag("--node-name=n1")
}

fn add_web(lab: &Lab) -> Result<()> {
    let netns = lab.a.netns.name();
    lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "default/web"])?;
    lab.endpoint_id(&lab.a)?;
    Ok(())
}

/// Starts an agent without waiting until it is ready.
fn start(lab: &Lab, options: &AgentOptions) -> Result<Program> {
    let log = lab.directory().join("log/agent.log");
    Program::start("holdfast-agent", lab.agent_command(options)?, &log)
}

fn opens(lab: &Lab, to: IpAddr) -> Result<()> {
    eventually(&format!("{to} is open"), FOLLOWS, || {
        lab.a.expect_open(at(to, 80))
    })
}

fn closes(lab: &Lab, to: IpAddr) -> Result<()> {
    eventually(&format!("{to} is closed"), FOLLOWS, || {
        lab.a.expect_closed(at(to, 80))
    })
}

#[test]
fn nothing_is_in_force_before_every_kind_was_listed_and_then_policy_of_the_cluster_is() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        api.hold("endpointslices")?;
        let mut agent = start(lab, &options(&api.files().kubeconfig))?;
        lab.status_has(SOON, &["EndpointSlice"])?;
        eventually("the other kinds are listed", SOON, || {
            let listed = api.answered();
            let mut lists = listed.iter().filter(|a| a.verb == "watch");
            ensure!(lists.any(|a| a.resource == "pods"), "{listed:?}");
            Ok(())
        })?;
        let addresses = lab.agent(&["ip", "list"])?;
        ensure!(!addresses.contains(&web4(10).to_string()), "{addresses}");
        let policies = lab.agent(&["policy", "get"])?;
        ensure!(
            !policies.contains("CiliumNetworkPolicy/default/web"),
            "{policies}"
        );
        agent.check_alive()?;

        api.release("endpointslices")?;
        eventually("the agent is ready", SOON, || {
            let status = lab.agent_json(&["status"])?;
            ensure!(status["ready"] == true, "{status}");
            Ok(())
        })?;
        add_web(lab)?;
        for db in [web4(10), web6(10)] {
            opens(lab, db)?;
        }
        lab.a.expect_closed(at(web4(11), 80))?;
        // A namespace's label opens its pods; the endpoint follows its own pod's labels.
        api.put(namespace("shop", "a"))?;
        opens(lab, web4(11))?;
        api.put(own("web", "other", &lab.a))?;
        opens(lab, web4(12))?;
        api.put(own("web", "web", &lab.a))?;
        closes(lab, web4(12))?;
        api.edit("ciliumnetworkpolicies", "default", "web", |policy| {
            policy["spec"]["egress"] = json!([{"toCIDR": ["0.0.0.0/0"]}]);
        })?;
        opens(lab, web4(12))?;
        // Pods do not count as the world.
        closes(lab, web4(10))?;
        Ok(())
    });
}

#[test]
fn enforcement_stays_and_status_says_why_while_the_server_is_away_or_refuses() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        let agent = lab.start_agent(&options(&api.files().kubeconfig))?;
        add_web(lab)?;
        opens(lab, web4(10))?;
        let stays = lab.a.stream(at(web4(10), 80))?;

        // Broken connections, then 410 with changes in between: everything is read again, but only
        // the difference has an effect.
        for kind in KINDS {
            api.break_streams(kind)?;
        }
        api.put(remote("db-2", "db", &[web4(12)]))?;
        opens(lab, web4(12))?;
        api.hold("pods")?;
        api.delete("pods", "default", "db-2")?;
        api.put(remote("db-3", "db", &[web4(13)]))?;
        api.expire("pods")?;
        api.release("pods")?;
        opens(lab, web4(13))?;
        closes(lab, web4(12))?;
        stays.expect_alive()?;

        // The server is away, also for an agent that starts.
        api.away();
        let all = "watches of Namespace, Pod, Service, ServiceCIDR, EndpointSlice, NetworkPolicy, ";
        lab.status_has(SOON, &[all, "what was read before stays in force"])?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        agent.kill_9()?;
        let _agent = start(lab, &options(&api.files().kubeconfig))?;
        lab.status_has(
            SOON,
            &[
                all,
                "the policy of the last run stays in force",
                "keeps the policy that it had",
            ],
        )?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        stays.expect_alive()?;
        // The server is back, with 429 for custom resources at first.
        api.back()?;
        lab.watches_follow(FOLLOWS)?;
        let busy = api.answered().iter().filter(|a| a.code == 429).count();
        ensure!(busy > 0, "no 429 was seen");
        api.put(remote("db-2", "db", &[web4(12)]))?;
        opens(lab, web4(12))?;
        stays.expect_alive()?;

        // Requests are refused with 403, 500 and 503: the last list stays in force.
        for (refusal, text) in [
            (Refusal::Forbidden, "the verb watch on pods is missing"),
            (Refusal::Unavailable, "503"),
        ] {
            api.refuse("pods", refusal)?;
            api.break_streams("pods")?;
            lab.status_has(SOON, &["watch of Pod", text])?;
            lab.a.expect_open(at(web4(12), 80))?;
            lab.a.expect_closed(at(web4(11), 80))?;
            api.allow("pods")?;
        }
        lab.watches_follow(FOLLOWS)?;
        // Lists that are null, and answers that never come.
        api.null_items("ciliumcidrgroups", true)?;
        api.expire("ciliumcidrgroups")?;
        lab.watches_follow(FOLLOWS)?;
        api.expire_token();
        api.break_streams("namespaces")?;
        lab.status_has(SOON, &["watch of Namespace", "does not accept the token"])?;
        lab.a.expect_open(at(web4(12), 80))?;
        stays.expect_alive()?;
        // The kubelet writes a new token to the file: the agent reads it again each minute.
        api.rotate_token(2)?;
        eventually("the watch follows with the new token", ROTATED, || {
            lab.watches_follow(FOLLOWS)
        })?;
        api.put(remote("db-4", "db", &[web4(14)]))?;
        opens(lab, web4(14))
    });
}

#[test]
fn an_agent_that_starts_without_the_server_uses_the_list_of_the_last_run() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        api.put(own("late", "web", &lab.b))?;
        api.put(db_0("web"))?;
        let socket = format!("--cni-socket={}", lab.cni_socket().display());
        let options = options(&api.files().kubeconfig).flag(&socket);
        let agent = lab.start_agent(&options)?;
        add_web(lab)?;
        opens(lab, web4(10))?;
        let stays = lab.a.stream(at(web4(10), 80))?;
        let file = lab.directory().join("state/state/cluster.json");
        eventually("the listing is stored", SOON, || {
            let text = std::fs::read_to_string(&file)?;
            ensure!(text.contains("\"Pod/default/late\""), "{text}");
            Ok(())
        })?;
        agent.kill_9()?;

        // The stored list is used, also for an endpoint that is added while the server is away.
        api.away();
        let _agent = start(lab, &options)?;
        lab.status_has(
            STANDS_IN,
            &[
                "watches of Namespace, Pod, ",
                "the stored list of",
                "is used",
            ],
        )?;
        let age = "holdfast_kubernetes_stored_list_age_seconds";
        let age = lab.metric(AGENT_METRICS, age, "kind=\"Pod\"")?;
        ensure!(age > 0.0, "{age}");
        let netns = lab.b.netns.name();
        lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "default/late"])?;
        eventually("the later endpoint is under policy", SOON, || {
            lab.b.expect_open(at(web4(10), 80))?;
            lab.b.expect_closed(at(web4(11), 80))
        })?;
        lab.a.expect_open(at(web4(10), 80))?;
        stays.expect_alive()?;

        // A pod is deleted and created again under its name: the list has the labels of the former pod.
        api.delete("pods", "default", "db-0")?;
        api.put(db_0("db"))?;
        let object = api.get("pods", "default", "db-0")?.context("db-0")?;
        let uid = object["metadata"]["uid"]
            .as_str()
            .context("uid")?
            .to_owned();
        let replaced = lab.add_pod("p", 100)?;
        let sandbox = Sandbox {
            uid,
            ..Sandbox::new(&replaced, "db-0")
        };
        let mut runtime = Runtime::new(lab)?;
        runtime.wait = 2;
        let error = runtime.add(&sandbox)?.err().context("ADD succeeded")?;
        let expected = format!("uid {}", sandbox.uid);
        ensure!(
            error.code == 11 && error.message.contains(&expected),
            "{error:?}"
        );
        let list = lab.agent(&["endpoint", "list"])?;
        ensure!(!list.contains("db-0"), "{list}");

        // The server is back, with changes: only the difference has an effect.
        api.put(namespace("shop", "a"))?;
        api.delete("pods", "default", "db")?;
        api.put(remote("db-2", "db", &[web4(12)]))?;
        api.back()?;
        lab.watches_follow(FOLLOWS)?;
        opens(lab, web4(11))?;
        opens(lab, web4(12))?;
        closes(lab, web4(10))?;
        let age = "holdfast_kubernetes_stored_list_age_seconds";
        ensure!(lab.metric(AGENT_METRICS, age, "")? == 0.0, "still stored");

        // The replaced pod starts with labels of its own, which no policy selects.
        runtime.wait = 20;
        runtime.start(&sandbox)?;
        let (allowed, other) = (at(web4(12), 80), at(web4(13), 80));
        for to in [allowed, other] {
            eventually(&format!("{to} is open"), SOON, || replaced.expect_open(to))?;
        }
        Ok(())
    });
}

#[test]
fn odd_objects_are_named_and_disturb_no_other() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        for odd in [
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": "odd", "namespace": "default", "labels": {"app": 5}},
                "spec": {"nodeName": null, "containers": null},
                "status": {"podIPs": "none", "phase": 3},
            }),
            json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": {"name": "odd", "namespace": "default", "labels": null},
                "spec": {"clusterIPs": [7], "ports": {"port": "x"}},
            }),
            json!({
                "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
                "metadata": {"name": "odd", "namespace": "default"}, "spec": null,
            }),
        ] {
            api.put(odd)?;
        }
        let _agent = lab.start_agent(&options(&api.files().kubeconfig))?;
        add_web(lab)?;
        opens(lab, web4(10))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        let policies = lab.agent(&["policy", "get"])?;
        for odd in [
            "Pod/default/odd",
            "Service/default/odd",
            "CiliumNetworkPolicy/default/odd",
        ] {
            ensure!(policies.contains(odd), "{odd}: {policies}");
        }

        // A bad version of a good policy: the last good version stays in force.
        api.edit("ciliumnetworkpolicies", "default", "web", |policy| {
            policy["spec"]["egress"][0] = json!({"toEndpoints": 7});
        })?;
        eventually("the policy is refused", SOON, || {
            let policies = lab.agent_json(&["policy", "get"])?;
            let refused = policies["rejected"].to_string();
            ensure!(refused.contains("spec.egress[0].toEndpoints"), "{refused}");
            Ok(())
        })?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;

        // Two Services with one address, and a pod with the address of another pod.
        for name in ["one", "two"] {
            api.put(json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"clusterIPs": ["10.96.0.10"], "ports": [{"port": 80, "protocol": "TCP"}]},
            }))?;
        }
        lab.status_has(SOON, &["10.96.0.10", "default/one", "default/two"])?;
        api.put(remote("thief", "other", &[web4(10)]))?;
        lab.status_has(
            SOON,
            &[&web4(10).to_string(), "default/db", "default/thief"],
        )
    });
}

#[test]
fn a_kind_without_its_crd_is_empty_after_a_while_and_named() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        for kind in ["ciliumcidrgroups", "egressfirewalls", "dnsnameresolvers"] {
            api.uninstall(kind)?;
        }
        let _agent = start(lab, &options(&api.files().kubeconfig))?;
        eventually("the agent is ready without the CRD", FOLLOWS, || {
            let status = lab.agent_json(&["status"])?;
            ensure!(status["ready"] == true, "{status}");
            Ok(())
        })?;
        lab.status_has(
            SOON,
            &["CiliumCIDRGroup", "install the CRDs", "crds.install"],
        )?;
        // A cluster may lack these kinds: it then has no such objects, which is no problem.
        let status = lab.agent(&["status"])?;
        for kind in ["EgressFirewall", "DNSNameResolver"] {
            let mut lines = status.lines();
            let problem = lines.find(|line| line.contains("PROBLEM") && line.contains(kind));
            ensure!(problem.is_none(), "{problem:?}");
        }
        add_web(lab)?;
        opens(lab, web4(10))
    });
}

#[test]
fn a_server_that_cannot_be_used_is_an_error_with_its_file_and_exit_code_2() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        let directory = lab.directory();
        let write = |name: &str, text: &str| -> Result<std::path::PathBuf> {
            let path = directory.join(name);
            std::fs::write(&path, text)?;
            Ok(path)
        };
        let files = api.files();
        let other = ApiServer::start(None, &directory.join("other"), Options::default())?;
        let old = write("old.token", "no-longer-accepted")?;
        let cases = [
            (directory.join("absent.kubeconfig"), "absent.kubeconfig"),
            (write("torn.kubeconfig", "clusters: [")?, "torn.kubeconfig"),
            (write("empty.kubeconfig", "")?, "empty.kubeconfig"),
            (
                write(
                    "ca.kubeconfig",
                    &kubeconfig(&api.url(), &other.files().ca, &files.token),
                )?,
                "not trusted with the CA",
            ),
            (
                write("old.kubeconfig", &kubeconfig(&api.url(), &files.ca, &old))?,
                "does not accept the credentials",
            ),
        ];
        for (path, text) in cases {
            let output = lab.agent_command(&options(&path))?.output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(2), "{text}: {output:?}");
            ensure!(said.contains(text), "{text}: {said}");
            ensure!(
                said.contains(&path.display().to_string()),
                "no file: {said}"
            );
        }
        Ok(())
    });
}

#[test]
fn a_new_label_of_a_namespace_reaches_a_thousand_pods() {
    with_lab(|lab| {
        let api = cluster(lab)?;
        for number in 0..1000 {
            let address = format!("10.200.{}.{}", number / 250, number % 250 + 1);
            let app = json!({"app": format!("app-{}", number % 20)});
            api.put(pod(
                "shop",
                &format!("pod-{number}"),
                app,
                "n2",
                &[&address],
            ))?;
        }
        let _agent = lab.start_agent(&options(&api.files().kubeconfig))?;
        add_web(lab)?;
        let of_team = |team: &str| -> Result<usize> {
            let label = format!("io.cilium.k8s.namespace.labels.team={team}");
            let of: Vec<u64> = lab
                .identities()?
                .into_iter()
                .filter(|(_, labels)| labels.contains(&label))
                .map(|(id, _)| id)
                .collect();
            let list = lab.agent_json(&["ip", "list"])?;
            let entries = list.as_array().context("ip list is no list")?;
            let is_of = |entry: &&Value| {
                entry["identity"]
                    .as_u64()
                    .is_some_and(|id| of.contains(&id))
            };
            Ok(entries.iter().filter(is_of).count())
        };
        eventually("all pods are there", SOON, || {
            let count = of_team("b")?;
            ensure!(count >= 1000, "{count}");
            Ok(())
        })?;
        let start = Instant::now();
        api.put(namespace("shop", "a"))?;
        let pause = Duration::from_millis(20);
        eventually("a pod of the namespace is open", SOON, || {
            lab.a.connect(at(web4(11), 80), pause)
        })?;
        println!(
            "the first of 1,000 pods is open after {:?}",
            start.elapsed()
        );
        println!("{} pods are relabelled then", of_team("a")?);
        eventually("all pods have the label", SOON, || {
            let count = of_team("a")?;
            ensure!(count >= 1000, "{count}");
            Ok(())
        })?;
        println!(
            "the last of 1,000 pods is seen to be relabelled after {:?}",
            start.elapsed()
        );
        Ok(())
    });
}
