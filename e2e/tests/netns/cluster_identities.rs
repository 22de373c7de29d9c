//! Identity numbers of the whole cluster: two agents make the objects, and one of the agents
//! deletes unused objects.
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, NAMESPACE, Options, Refusal, namespace, pod, web_policy};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::pod::Pod;
use holdfast_e2e::process::Program;
use holdfast_e2e::relay::Certificates;
use holdfast_e2e::{AgentOptions, Lab, config, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);
/// Longest wait until requests that failed for a while are tried again: the longest pause is 30 s.
const AGAIN: Duration = Duration::from_secs(60);
const IDENTITIES: &str = "ciliumidentities";
/// The first number that is a node's own.
const NODE_FIRST: u64 = 61_440;
const MADE_BY: &str = "holdfast.io/made-by";

/// Restricts the pods of a set that only one node has.
const LATE: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: late}
spec:
  endpointSelector: {matchLabels: {app: late}}
  egress: [{toCIDR: [203.0.113.11/32]}]
";

/// Connects the nodes of two labs. Returns the address of the first node.
fn connect(one: &Lab, two: &Lab) -> Result<SocketAddr> {
    let second = two.node.name();
    let link = format!("link add api0 type veth peer name api0 netns {second}");
    one.node.batch(&format!(
        "{link}\naddress add 10.200.0.1/30 dev api0\nlink set api0 up"
    ))?;
    two.node
        .batch("address add 10.200.0.2/30 dev api0\nlink set api0 up")?;
    Ok((Ipv4Addr::new(10, 200, 0, 1), 0).into())
}

fn cluster(one: &Lab, two: &Lab) -> Result<ApiServer> {
    let at_node = connect(one, two)?;
    let directory = one.directory().join("apiserver");
    let options = Options::default().and_identities();
    let api = ApiServer::start_at(Some(&one.node), at_node, &directory, options)?;
    for name in ["n1", "n2"] {
        api.put(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name}, "status": {"addresses": []},
        }))?;
    }
    api.put(namespace("default", "a"))?;
    api.put(web_policy(&json!([
        {"toEndpoints": [{"matchLabels": {"app": "db"}}]},
        {"toCIDR": ["203.0.113.10/32"]},
    ])))?;
    Ok(api)
}

fn own(name: &str, app: &str, of: &Pod, node: &str) -> Value {
    let addresses = [of.v4.to_string(), of.v6.to_string()];
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    pod("default", name, json!({"app": app}), node, &addresses)
}

fn start(lab: &Lab, api: &ApiServer, node: &str) -> Result<Program> {
    start_in(lab, api, node, "cluster")
}

fn start_in(lab: &Lab, api: &ApiServer, node: &str, mode: &str) -> Result<Program> {
    let kubeconfig = api.files().kubeconfig.display();
    let options = AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={kubeconfig}"))
        .flag(&format!("--node-name={node}"))
        .flag(&format!("--identity-allocation={mode}"))
        .flag("--identity-unused-for=2s")
        .flag("--identity-lease=3s")
        .flag("--identity-restore-grace-period=2s");
    lab.start_agent(&options)
}

fn add(lab: &Lab, of: &Pod, name: &str) -> Result<()> {
    let pod = format!("default/{name}");
    lab.agent(&["endpoint", "add", "--netns", of.netns.name(), "--pod", &pod])?;
    lab.endpoint_id(of)?;
    Ok(())
}

/// Adds a pod that no Pod document describes.
fn add_with_labels(lab: &Lab, of: &Pod, labels: &str) -> Result<()> {
    let netns = of.netns.name();
    lab.agent(&["endpoint", "add", "--netns", netns, "--labels", labels])?;
    lab.endpoint_id(of)?;
    Ok(())
}

/// Numbers that the agent has for the pods with this label.
fn numbers(lab: &Lab, app: &str) -> Result<BTreeSet<u64>> {
    let label = format!("\"k8s:app={app}\"");
    let all = lab.identities()?.into_iter();
    let of_app = all.filter(|(id, labels)| *id >= 256 && *id <= 65_535 && labels.contains(&label));
    Ok(of_app.map(|(id, _)| id).collect())
}

/// The one number of the cluster that the agent has for the pods with this label.
fn number(lab: &Lab, app: &str) -> Result<u64> {
    let all = numbers(lab, app)?;
    let mut all = all.iter();
    let number = *all.next().context("no number")?;
    ensure!(all.next().is_none(), "{app} has several numbers");
    ensure!(number < NODE_FIRST, "{app} has number {number} of the node");
    Ok(number)
}

/// The value of `k8s:app` in each object, by number.
fn objects(api: &ApiServer) -> Result<BTreeMap<u64, String>> {
    let all = api.all(IDENTITIES)?;
    let of = |object: &Value| {
        let number = object["metadata"]["name"].as_str()?.parse().ok()?;
        let app = object["security-labels"]["k8s:app"].as_str()?;
        Some((number, app.to_owned()))
    };
    Ok(all.iter().filter_map(of).collect())
}

fn has_object(api: &ApiServer, app: &str, is_there: bool) -> Result<()> {
    eventually(&format!("an object of {app}: {is_there}"), AGAIN, || {
        let all = objects(api)?;
        ensure!(all.values().any(|one| one == app) == is_there, "{all:?}");
        Ok(())
    })
}

fn agree(labs: [&Lab; 2], api: &ApiServer, app: &str) -> Result<u64> {
    eventually(&format!("one number of {app}"), SOON, || {
        let [first, second] = [number(labs[0], app)?, number(labs[1], app)?];
        let objects = objects(api)?;
        let object = objects.get(&first).map(String::as_str);
        ensure!(
            first == second && object == Some(app),
            "{first} {second}, {objects:?}"
        );
        Ok(first)
    })
}

#[test]
fn two_nodes_have_one_number_for_a_label_set_and_pods_stay_as_they_are_without_the_api_server() {
    with_lab(|one| {
        with_lab(|two| {
            let api = cluster(one, two)?;
            let db = two.add_pod("d", 14)?;
            api.put(own("web-1", "web", &one.a, "n1"))?;
            api.put(own("web-2", "web", &two.b, "n2"))?;
            api.put(own("db", "db", &db, "n2"))?;
            let _first = start(one, &api, "n1")?;
            let second = start(two, &api, "n2")?;
            add(one, &one.a, "web-1")?;
            add(two, &two.b, "web-2")?;
            add(two, &db, "db")?;
            let web = agree([one, two], &api, "web")?;
            agree([one, two], &api, "db")?;
            let made = api.answered();
            let made = made.iter().filter(|one| {
                one.resource == IDENTITIES && one.verb == "create" && one.code == 201
            });
            ensure!(
                made.count() == 2,
                "one object for each set: {:?}",
                objects(&api)?
            );

            // The API server is away: pods stay as they are, and a new label set is under policy soon.
            let stays = one.a.stream(at(web4(10), 80))?;
            let late = one.add_pod("l", 15)?;
            one.write_policy("late.yaml", LATE)?;
            api.away();
            let begin = Instant::now();
            add_with_labels(one, &late, "k8s:app=late")?;
            late.expect_closed(at(web4(12), 80))?;
            late.expect_open(at(web4(11), 80))?;
            let took = begin.elapsed();
            ensure!(took < Duration::from_secs(3), "under policy after {took:?}");
            let local = numbers(one, "late")?;
            ensure!(
                local.iter().all(|id| *id >= NODE_FIRST) && local.len() == 1,
                "{local:?}"
            );
            one.a.expect_closed(at(web4(12), 80))?;
            stays.expect_alive()?;
            ensure!(number(one, "web")? == web);

            // The API server is back: the label set gets a number of the cluster, and connections
            // stay.
            let of_late = late.stream(at(web4(11), 80))?;
            api.back()?;
            eventually("a number of the cluster", AGAIN, || number(one, "late"))?;
            of_late.expect_alive()?;
            late.expect_closed(at(web4(12), 80))?;
            stays.expect_alive()?;

            // Another program deletes an object in use.
            api.delete(IDENTITIES, "", &web.to_string())?;
            has_object(&api, "web", true)?;
            ensure!(agree([one, two], &api, "web")? == web);
            one.status_has(SOON, &["were deleted although pods have their labels"])
                .or_else(|_| {
                    two.status_has(SOON, &["were deleted although pods have their labels"])
                })?;

            // A node loses its disk.
            second.kill_9()?;
            std::fs::remove_dir_all(two.directory().join("state"))?;
            std::fs::create_dir_all(two.directory().join("state"))?;
            let _second = start(two, &api, "n2")?;
            ensure!(agree([one, two], &api, "web")? == web);
            agree([one, two], &api, "db")?;
            stays.expect_alive()
        });
        Ok(())
    });
}

fn leader(api: &ApiServer, other_than: &str) -> Result<String> {
    eventually("an agent leads", SOON, || {
        let lease = api.get("leases", NAMESPACE, "holdfast-identities")?;
        let holder = lease.context("no Lease")?["spec"]["holderIdentity"].clone();
        let holder = holder.as_str().unwrap_or_default().to_owned();
        ensure!(!holder.is_empty() && holder != other_than, "{holder:?}");
        Ok(holder)
    })
}

fn object(number: u64, app: &str, annotations: &Value) -> Value {
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumIdentity",
        "metadata": {
            "name": number.to_string(), "annotations": annotations,
            // Cilium copies the labels of pods to its objects.
            "labels": {"app.kubernetes.io/managed-by": "holdfast"},
        },
        "security-labels": {"k8s:app": app, "k8s:io.kubernetes.pod.namespace": "default"},
    })
}

#[test]
fn one_agent_deletes_unused_objects_and_another_one_goes_on_when_it_was_killed() {
    with_lab(|one| {
        with_lab(|two| {
            let api = cluster(one, two)?;
            api.put(own("web-1", "web", &one.a, "n1"))?;
            api.put(own("web-2", "web", &two.b, "n2"))?;
            // A pod of a node without an agent.
            api.put(pod(
                "default",
                "far",
                json!({"app": "far"}),
                "n3",
                &["10.88.0.9"],
            ))?;
            let mut agents = BTreeMap::from([
                ("n1".to_owned(), start(one, &api, "n1")?),
                ("n2".to_owned(), start(two, &api, "n2")?),
            ]);
            add(one, &one.a, "web-1")?;
            add(two, &two.b, "web-2")?;
            // Only its node knows this pod.
            let alone = one.add_pod("l", 15)?;
            add_with_labels(one, &alone, "k8s:app=alone")?;
            let web = agree([one, two], &api, "web")?;
            has_object(&api, "far", true)?;
            has_object(&api, "alone", true)?;
            let uid = |number: u64| -> Result<Value> {
                let object = api.get(IDENTITIES, "", &number.to_string())?;
                Ok(object.context("no object")?["metadata"]["uid"].clone())
            };
            let uid_of_web = uid(web)?;

            let ours = json!({MADE_BY: "holdfast"});
            let unused = |number: u64, app: &str| api.put(object(number, app, &ours));
            unused(300, "unused-1")?;
            api.put(object(301, "others", &json!({})))?;
            has_object(&api, "unused-1", false)?;

            // Younger duplicates of an object in use: one as an agent makes it, and one of another program.
            std::thread::sleep(Duration::from_millis(1100));
            for (number, annotations) in [(303, &ours), (304, &json!({}))] {
                let mut object = api
                    .get(IDENTITIES, "", &web.to_string())?
                    .context("no object")?;
                object["metadata"] =
                    json!({"name": number.to_string(), "annotations": annotations});
                api.put(object)?;
            }
            eventually("the duplicate of the agents is deleted", SOON, || {
                let all = objects(&api)?;
                ensure!(!all.contains_key(&303) && all.contains_key(&304), "{all:?}");
                Ok(())
            })?;
            ensure!(agree([one, two], &api, "web")? == web);

            let killed = leader(&api, "")?;
            agents.remove(&killed).context("the leader")?.kill_9()?;
            let other = leader(&api, &killed)?;
            ensure!(agents.contains_key(&other), "{other} leads");
            unused(302, "unused-2")?;
            has_object(&api, "unused-2", false)?;
            // The last pod of a label set is deleted.
            api.delete("pods", "default", "far")?;
            has_object(&api, "far", false)?;
            for app in ["web", "alone", "others"] {
                has_object(&api, app, true)?;
            }
            ensure!(uid(web)? == uid_of_web, "an object in use was deleted");
            Ok(())
        });
        Ok(())
    });
}

#[test]
fn a_change_of_the_mode_and_back_opens_and_cuts_nothing() {
    with_lab(|one| {
        with_lab(|two| {
            let api = cluster(one, two)?;
            api.put(own("web-1", "web", &one.a, "n1"))?;
            let mut agent = start_in(one, &api, "n1", "node")?;
            add(one, &one.a, "web-1")?;
            let stays = one.a.stream(at(web4(10), 80))?;
            let holds = || -> Result<()> {
                stays.expect_alive()?;
                one.a.expect_open(at(web4(10), 80))?;
                one.a.expect_closed(at(web4(12), 80))
            };
            holds()?;
            ensure!(objects(&api)?.is_empty(), "{:?}", objects(&api)?);
            let before = number(one, "web")?;
            for mode in ["cluster", "node"] {
                agent.kill_9()?;
                holds()?;
                agent = start_in(one, &api, "n1", mode)?;
                holds()?;
                has_object(&api, "web", true)?;
                eventually("the number of the object", SOON, || {
                    holds()?;
                    let now = number(one, "web")?;
                    let all = objects(&api)?;
                    let is_of_object = all.get(&now).is_some_and(|app| app == "web");
                    ensure!(is_of_object, "{now}, and before {before}: {all:?}");
                    Ok(())
                })?;
            }
            drop(agent);
            holds()
        });
        Ok(())
    });
}

#[test]
fn a_refusal_is_named_with_its_remedy_and_policy_is_in_force_all_the_same() {
    with_lab(|one| {
        with_lab(|two| {
            let api = cluster(one, two)?;
            api.put(own("web-1", "web", &one.a, "n1"))?;
            let _agent = start(one, &api, "n1")?;
            api.refuse(IDENTITIES, Refusal::Forbidden)?;
            add(one, &one.a, "web-1")?;
            one.a.expect_open(at(web4(10), 80))?;
            one.a.expect_closed(at(web4(12), 80))?;
            let texts = [
                "CiliumIdentities are not made",
                "k8s:app=web",
                "ClusterRole holdfast-identities",
            ];
            one.status_has(SOON, &texts)?;
            let local = one.metric(AGENT_METRICS, "holdfast_identities_local", "")?;
            ensure!(local == 1.0, "{local}");
            api.allow(IDENTITIES)?;
            has_object(&api, "web", true)?;
            eventually("a number of the cluster", SOON, || number(one, "web"))?;
            let status = one.agent(&["status"])?;
            ensure!(!status.contains("are not made"), "{status}");
            Ok(())
        });
        Ok(())
    });
}

#[test]
fn beside_a_cilium_operator_nothing_is_made() {
    with_lab(|one| {
        with_lab(|two| {
            let api = cluster(one, two)?;
            // An operator renews its Lease.
            let lease = |renewed: u32| {
                api.put(json!({
                    "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                    "metadata": {"name": "cilium-operator-resource-lock", "namespace": "kube-system"},
                    "spec": {"holderIdentity": "operator-a", "leaseTransitions": renewed},
                }))
            };
            lease(0)?;
            api.put(own("web-1", "web", &one.a, "n1"))?;
            let _agent = start(one, &api, "n1")?;
            add(one, &one.a, "web-1")?;
            let mut renewed = 0;
            eventually("the mode is refused", SOON, || {
                renewed += 1;
                lease(renewed)?;
                let status = one.agent(&["status"])?;
                ensure!(
                    status.contains("a Cilium operator runs in this cluster"),
                    "{status}"
                );
                Ok(())
            })?;
            ensure!(objects(&api)?.is_empty(), "{:?}", objects(&api)?);
            one.a.expect_open(at(web4(10), 80))?;
            one.a.expect_closed(at(web4(12), 80))
        });
        Ok(())
    });
}

#[test]
fn numbers_come_through_a_relay_and_the_agent_makes_objects_itself() {
    with_lab(|lab| {
        let directory = lab.directory().join("apiserver");
        let options = Options::with_relays().and_identities();
        let api = ApiServer::start(Some(&lab.node), &directory, options)?;
        api.put(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1"}, "status": {"addresses": []},
        }))?;
        api.put(namespace("default", "a"))?;
        api.put(own("web-1", "web", &lab.a, "n1"))?;
        api.put(own("db", "db", &lab.b, "n1"))?;
        let (of_relay, of_agent) = Certificates::issue(&lab.directory().join("tls"))?;
        let program = config::program("holdfast-agent")?;
        let mut relay = lab
            .node
            .command(program.to_str().context("a path in UTF-8")?);
        relay.args(["relay", "--metrics-address=off", "--name=relay"]);
        relay.arg("--identity-allocation=cluster");
        relay.arg(format!("--kubeconfig={}", api.files().admin.display()));
        relay.arg("--listen=127.0.0.1:9971");
        relay.arg(format!("--tls-cert={}", of_relay.certificate.display()));
        relay.arg(format!("--tls-key={}", of_relay.key.display()));
        relay.arg(format!("--client-ca={}", of_relay.authority.display()));
        let log = lab.directory().join("log/relay.log");
        let _relay = Program::start("holdfast-agent relay", relay, &log)?;
        let options = AgentOptions::default()
            .flag("--kubernetes")
            .flag(&format!(
                "--kubeconfig={}",
                api.files().kubeconfig.display()
            ))
            .flag("--node-name=n1")
            .flag("--identity-allocation=cluster")
            .flag("--k8s-relay=127.0.0.1:9971")
            .flag(&format!("--k8s-relay-ca={}", of_agent.authority.display()))
            .flag(&format!(
                "--k8s-relay-cert={}",
                of_agent.certificate.display()
            ))
            .flag(&format!("--k8s-relay-key={}", of_agent.key.display()));
        let _agent = lab.start_agent(&options)?;
        add(lab, &lab.a, "web-1")?;
        has_object(&api, "web", true)?;
        let web = eventually("a number of the cluster", SOON, || number(lab, "web"))?;
        ensure!(objects(&api)?.get(&web).map(String::as_str) == Some("web"));
        // Another program made the object of the other pod's labels.
        let mut object = api
            .get(IDENTITIES, "", &web.to_string())?
            .context("no object")?;
        object["metadata"] = json!({"name": "5000"});
        object["security-labels"]["k8s:app"] = json!("db");
        api.put(object)?;
        add(lab, &lab.b, "db")?;
        eventually("the number of the object, which is the older", SOON, || {
            let db = number(lab, "db")?;
            ensure!(db == 5000, "{db}");
            Ok(())
        })?;
        lab.watches_follow(SOON)
    });
}
