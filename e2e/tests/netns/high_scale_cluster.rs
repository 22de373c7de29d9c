//! The tunnel in a cluster with an API server: CiliumWorldCIDRs that are added and removed, and nodes that do not
//! read the pods of others.
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, namespace, pod};
use holdfast_e2e::config::program;
use holdfast_e2e::fleet::{DEVICE, Fleet, with_fleet};
use holdfast_e2e::lab::at;
use holdfast_e2e::relay::Certificates;
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually};
use serde_json::{Value, json};
use shared_maps::event::Reason;

use super::high_scale::{NEVER, POLICY, PORT, SOON, connects, maps, stop};
use super::why::why;

const WORLD: &str = "ciliumworldcidrs";

/// An API server that both nodes reach past the router.
fn cluster(fleet: &Fleet<'_>, options: Options) -> Result<ApiServer> {
    let second = fleet.two.node.name();
    fleet.one.node.batch(&format!(
        "link add api0 type veth peer name api0 netns {second}\n\
         address add 10.200.0.1/30 dev api0\nlink set api0 up"
    ))?;
    fleet
        .two
        .node
        .batch("address add 10.200.0.2/30 dev api0\nlink set api0 up")?;
    let at_node = SocketAddr::from((Ipv4Addr::new(10, 200, 0, 1), 0));
    let directory = fleet.one.directory().join("apiserver");
    let api = ApiServer::start_at(Some(&fleet.one.node), at_node, &directory, options)?;
    for (name, block) in [("n1", "10.77.0.0/25"), ("n2", "10.77.0.128/25")] {
        api.put(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
            "spec": {"podCIDR": block, "podCIDRs": [block]}, "status": {"addresses": []},
        }))?;
    }
    api.put(namespace("default", "a"))?;
    Ok(api)
}

fn in_cluster(api: &ApiServer, node: &str, mode: &str) -> AgentOptions {
    AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!(
            "--kubeconfig={}",
            api.files().kubeconfig.display()
        ))
        .flag(&format!("--node-name={node}"))
        .flag("--identity-allocation=cluster")
        .flag("--enable-ipv6=false")
        .flag(&format!("--high-scale-ipcache={mode}"))
        .flag(&format!("--high-scale-device={DEVICE}"))
}

fn world(name: &str, blocks: &[&str]) -> Value {
    json!({
        "apiVersion": "cilium.io/v2alpha1", "kind": "CiliumWorldCIDRs",
        "metadata": {"name": name}, "spec": {"cidrs": blocks},
    })
}

#[test]
fn high_scale_blocks_outside_come_change_and_go_as_objects() {
    with_fleet(|fleet| {
        let options = Options::default().and_identities().and_high_scale();
        let api = cluster(fleet, options)?;
        let _one = fleet.one.start_agent(&in_cluster(&api, "n1", "full"))?;
        let says = |texts: &[&str]| fleet.one.status_has(SOON, texts);
        let blocks = |wanted: &[&str]| {
            eventually(&format!("blocks {wanted:?}"), SOON, || {
                let listed = maps(fleet.one, "world")?;
                let count = listed.lines().filter(|line| line.contains('/')).count();
                let has = wanted.iter().all(|block| listed.contains(block));
                ensure!(has && count == wanted.len(), "{listed}");
                Ok(())
            })
        };
        says(&["wraps nothing, because no CiliumWorldCIDRs object is in force"])?;
        api.put(world("outside", &["203.0.113.0/24", "192.0.2.0/24"]))?;
        says(&["wraps packets of at most 1450 bytes; 2 blocks outside of the cluster"])?;
        blocks(&["203.0.113.0/24", "192.0.2.0/24"])?;
        api.put(world("outside", &["203.0.113.0/24", "198.51.100.0/24"]))?;
        blocks(&["203.0.113.0/24", "198.51.100.0/24"])?;
        // Blocks of all objects count together.
        api.put(world("more", &["192.0.2.0/24", "203.0.113.0/24"]))?;
        let all = ["203.0.113.0/24", "198.51.100.0/24", "192.0.2.0/24"];
        blocks(&all)?;
        // A definition of another release may let these pass.
        for bad in ["203.0.113.0/33", "2001:db8::/32", "300.0.0.0/8", ""] {
            api.put(world("outside", &["10.9.0.0/16", bad]))?;
            says(&[
                "policy document refused: cluster (CiliumWorldCIDRs/outside): spec.cidrs[1]: ",
            ])?;
            eventually("the refused object is named", SOON, || {
                let got = fleet.one.agent(&["policy", "get"])?;
                let named =
                    got.contains("CiliumWorldCIDRs/outside") && got.contains("spec.cidrs[1]");
                ensure!(named, "{got}");
                Ok(())
            })?;
            blocks(&all)?;
            says(&["wraps packets of at most 1450 bytes; 3 blocks outside of the cluster"])?;
        }
        api.put(world("outside", &[]))?;
        blocks(&["192.0.2.0/24", "203.0.113.0/24"])?;
        api.delete(WORLD, "", "more")?;
        // An empty list is taken at its word.
        blocks(&[])?;
        says(&["wraps packets of at most 1450 bytes; 0 blocks outside of the cluster"])?;
        api.delete(WORLD, "", "outside")?;
        says(&["wraps nothing, because no CiliumWorldCIDRs object is in force"])
    });
}

/// How many pods an agent of the cluster reads.
fn pods_read(lab: &Lab) -> Result<u64> {
    let status: Value = serde_json::from_str(&lab.agent(&["status", "-o", "json"])?)?;
    let watches = status["cluster"]["watches"].as_array();
    let mut watches = watches.context("no watches")?.iter();
    let of_pods = watches.find(|watch| watch["kind"] == "Pod");
    let count = of_pods.and_then(|watch| watch["objects"].as_u64());
    count.with_context(|| format!("no watch of pods: {status}"))
}

/// Web server and another pod on the first node, client and DNS server on the second.
struct Pods {
    web: Pod,
    other: Pod,
    client: Pod,
    kept: Pod,
}

fn pods(fleet: &Fleet<'_>, api: &ApiServer) -> Result<Pods> {
    let pods = Pods {
        web: fleet.pod_of_one("web", 21)?,
        other: fleet.pod_of_one("other", 23)?,
        client: fleet.pod_of_two("client", 132)?,
        kept: fleet.pod_of_two("kept", 134)?,
    };
    for (name, of, node, labels) in [
        ("web", &pods.web, "n1", json!({"app": "web"})),
        ("other", &pods.other, "n1", json!({"app": "other"})),
        ("client", &pods.client, "n2", json!({"app": "client"})),
        ("kept", &pods.kept, "n2", json!({"k8s-app": "kube-dns"})),
    ] {
        api.put(pod("default", name, labels, node, &[&of.v4.to_string()]))?;
    }
    Ok(pods)
}

/// The cluster with its pods. The client has a server, which admits the web server alone.
fn with_server(fleet: &Fleet<'_>) -> Result<(ApiServer, Pods, Web)> {
    let options = Options::default().and_identities().and_high_scale();
    let api = cluster(fleet, options)?;
    api.put(world("outside", &["203.0.113.0/24"]))?;
    let pods = pods(fleet, &api)?;
    let server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
    for lab in [fleet.one, fleet.two] {
        lab.write_policy("in.yaml", POLICY)?;
    }
    Ok((api, pods, server))
}

fn add(lab: &Lab, of: &Pod, name: &str) -> Result<()> {
    let pod = format!("default/{name}");
    lab.agent(&["endpoint", "add", "--netns", of.netns.name(), "--pod", &pod])?;
    lab.endpoint_id(of)?;
    Ok(())
}

fn add_all(fleet: &Fleet<'_>, pods: &Pods) -> Result<()> {
    add(fleet.one, &pods.web, "web")?;
    add(fleet.one, &pods.other, "other")?;
    add(fleet.two, &pods.client, "client")?;
    add(fleet.two, &pods.kept, "kept")
}

fn start(fleet: &Fleet<'_>, options: [AgentOptions; 2]) -> Result<[Option<Program>; 2]> {
    let [one, two] = options;
    Ok([
        Some(fleet.one.start_agent(&one)?),
        Some(fleet.two.start_agent(&two)?),
    ])
}

/// The client admits the web server by its labels, and not the other pod.
fn is_judged(pods: &Pods) -> Result<()> {
    super::high_scale::is_judged(&pods.web, &pods.other, &pods.client)
}

#[test]
fn high_scale_pruned_nodes_read_no_pods_of_others_and_judge_them_all_the_same() {
    with_fleet(|fleet| {
        let (api, pods, _server) = with_server(fleet)?;
        let full = |node| in_cluster(&api, node, "full");
        let [mut one, mut two] = start(fleet, [full("n1"), full("n2")])?;
        add_all(fleet, &pods)?;
        for lab in [fleet.one, fleet.two] {
            lab.status_has(SOON, &["wraps packets of at most 1450 bytes"])?;
        }
        is_judged(&pods)?;
        eventually("all pods are known", SOON, || {
            for (lab, of) in [
                (fleet.one, &pods.client),
                (fleet.one, &pods.kept),
                (fleet.two, &pods.web),
            ] {
                ensure!(lab.is_plumbed(of.v4.into())?, "{} is unknown", of.v4);
            }
            Ok(())
        })?;

        let pruned = |node| full(node).flag("--high-scale-prune=true");
        stop(&mut one)?;
        one = Some(fleet.one.start_agent(&pruned("n1"))?);
        // One after the other: neither needs the other's step.
        is_judged(&pods)?;
        stop(&mut two)?;
        two = Some(fleet.two.start_agent(&pruned("n2"))?);
        is_judged(&pods)?;
        eventually(
            "only pods of the node and kept ones are known",
            SOON,
            || {
                for (lab, of, known) in [
                    (fleet.one, &pods.client, false),
                    (fleet.two, &pods.web, false),
                    (fleet.two, &pods.other, false),
                    (fleet.one, &pods.kept, true),
                ] {
                    ensure!(lab.is_plumbed(of.v4.into())? == known, "{}: {known}", of.v4);
                }
                Ok(())
            },
        )?;
        // A new pod of another node is not taken in, and is judged by what its packets say.
        let late = fleet.pod_of_one("late", 25)?;
        let address = late.v4.to_string();
        api.put(pod(
            "default",
            "late",
            json!({"app": "web"}),
            "n1",
            &[&address],
        ))?;
        add(fleet.one, &late, "late")?;
        let to = at(pods.client.v4.into(), PORT);
        eventually("the late web server is admitted", SOON, || {
            ensure!(connects(&late, to, NEVER)?, "refused");
            Ok(())
        })?;
        ensure!(!fleet.two.is_plumbed(late.v4.into())?, "it is taken in");
        // Own pods, and on the first node the kept one of the second.
        ensure!(
            pods_read(fleet.one)? == 4 && pods_read(fleet.two)? == 2,
            "others are read"
        );
        for lab in [fleet.one, fleet.two] {
            lab.watches_follow(SOON)?;
        }
        drop((one, two));
        Ok(())
    });
}

#[test]
fn high_scale_pruning_too_early_is_announced_before_it_hurts() {
    with_fleet(|fleet| {
        let (api, pods, _server) = with_server(fleet)?;
        // The first node does not wrap yet.
        let behind = in_cluster(&api, "n1", "decap-only");
        let [mut one, two] = start(fleet, [behind, in_cluster(&api, "n2", "full")])?;
        add_all(fleet, &pods)?;
        is_judged(&pods)?;
        let plain = || fleet.two.counted(Reason::Plain);
        ensure!(plain()? > 0, "plain packets are not counted");
        let metric = "holdfast_forward_count_total";
        let port = holdfast_e2e::node::AGENT_METRICS;
        eventually("the metric counts them", SOON, || {
            let counted = fleet.two.metric(port, metric, "reason=\"plain\"")?;
            ensure!(counted > 0.0, "{counted}");
            Ok(())
        })?;
        // The node that wraps already loses nothing, because the other one unwraps.
        eventually("no node is named as behind", SOON, || {
            let status = fleet.two.agent(&["status"])?;
            ensure!(!status.contains("do not unwrap packets"), "{status}");
            Ok(())
        })?;
        // A node that does not unwrap is named, and nothing else. No agent corrects its CiliumNode.
        api.put(json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
            "metadata": {"name": "n3", "annotations": {"holdfast.io/high-scale": "off"}},
            "spec": {"addresses": []},
        }))?;
        fleet.two.status_has(
            SOON,
            &["1 of the cluster's nodes do not unwrap packets, and pods there get none from this node: n3;"],
        )?;
        api.delete("ciliumnodes", "", "n3")?;
        // Once it wraps, nothing more is counted.
        stop(&mut one)?;
        one = Some(fleet.one.start_agent(&in_cluster(&api, "n1", "full"))?);
        fleet
            .one
            .status_has(SOON, &["wraps packets of at most 1450 bytes"])?;
        eventually("no node is named as behind", SOON, || {
            let status = fleet.two.agent(&["status"])?;
            ensure!(!status.contains("do not unwrap packets"), "{status}");
            Ok(())
        })?;
        let before = plain()?;
        is_judged(&pods)?;
        ensure!(plain()? == before, "plain packets although both nodes wrap");
        drop((one, two));
        Ok(())
    });
}

fn start_relay(fleet: &Fleet<'_>, api: &ApiServer, files: &Certificates) -> Result<Program> {
    let program = program("holdfast-agent")?.display().to_string();
    let mut command = fleet.one.node.command(&program);
    command.args([
        "relay",
        "--metrics-address=off",
        "--name=relay",
        "--with-world-cidrs=true",
    ]);
    command.args(["--identity-allocation=cluster", "--listen=10.200.0.1:9971"]);
    command.arg(format!("--kubeconfig={}", api.files().admin.display()));
    command.arg(format!("--tls-cert={}", files.certificate.display()));
    command.arg(format!("--tls-key={}", files.key.display()));
    command.arg(format!("--client-ca={}", files.authority.display()));
    let log = fleet.one.directory().join("log/relay.log");
    Program::start("holdfast-agent relay", command, &log)
}

#[test]
fn high_scale_pruned_nodes_take_only_their_pods_from_a_relay() {
    with_fleet(|fleet| {
        let (api, pods, _server) = with_server(fleet)?;
        let (of_relay, files) = Certificates::issue(&fleet.one.directory().join("tls"))?;
        let _relay = start_relay(fleet, &api, &of_relay)?;
        let pruned = |node| {
            in_cluster(&api, node, "full")
                .flag("--high-scale-prune=true")
                .flag("--high-scale-force=true")
                .flag("--k8s-relay=10.200.0.1:9971")
                .flag(&format!("--k8s-relay-ca={}", files.authority.display()))
                .flag(&format!("--k8s-relay-cert={}", files.certificate.display()))
                .flag(&format!("--k8s-relay-key={}", files.key.display()))
        };
        let agents = start(fleet, [pruned("n1"), pruned("n2")])?;
        add_all(fleet, &pods)?;
        for lab in [fleet.one, fleet.two] {
            lab.status_has(SOON, &["wraps packets of at most 1450 bytes", "by relay"])?;
        }
        is_judged(&pods)?;
        let reads = |of_one: u64, of_two: u64| {
            eventually("pods are read", SOON, || {
                let (one, two) = (pods_read(fleet.one)?, pods_read(fleet.two)?);
                ensure!((one, two) == (of_one, of_two), "{one} and {two}");
                Ok(())
            })
        };
        reads(3, 2)?;
        // Labels are added and removed: the pod is kept as long as it has them.
        let relabel = |labels: Value| {
            api.edit("pods", "default", "client", |pod| {
                pod["metadata"]["labels"] = labels.clone();
            })
        };
        relabel(json!({"app": "client", "k8s-app": "kube-dns"}))?;
        reads(4, 2)?;
        relabel(json!({"app": "client"}))?;
        reads(3, 2)?;
        api.delete("pods", "default", "kept")?;
        reads(2, 1)?;
        drop(agents);
        Ok(())
    });
}

/// Egress of the web server: to the client by its labels, to the DNS server by its labels, and to a block.
const EGRESS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web-out, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {app: client}}]
  - toEndpoints: [{matchLabels: {k8s-app: kube-dns}}]
"#;

#[test]
fn high_scale_pruned_egress_knows_kept_pods_by_labels_and_others_by_blocks() {
    with_fleet(|fleet| {
        let (api, pods, _server) = with_server(fleet)?;
        let _dns = Web::start(&pods.kept.netns, &[pods.kept.v4.into()], &[PORT], &[])?;
        for lab in [fleet.one, fleet.two] {
            lab.write_policy("out.yaml", EGRESS)?;
        }
        let full = |node| in_cluster(&api, node, "full").flag("--high-scale-force=true");
        let [mut one, two] = start(fleet, [full("n1"), full("n2")])?;
        add_all(fleet, &pods)?;
        for lab in [fleet.one, fleet.two] {
            lab.status_has(SOON, &["wraps packets of at most 1450 bytes"])?;
        }
        let opens = |of: &Pod| {
            eventually(&format!("{} is open", of.v4), SOON, || {
                ensure!(
                    connects(&pods.web, at(of.v4.into(), PORT), NEVER)?,
                    "closed"
                );
                Ok(())
            })
        };
        opens(&pods.client)?;
        opens(&pods.kept)?;
        stop(&mut one)?;
        one = Some(
            fleet
                .one
                .start_agent(&full("n1").flag("--high-scale-prune=true"))?,
        );
        fleet.one.watches_follow(SOON)?;
        eventually(
            "labels of a pod that is not kept select nothing",
            SOON,
            || {
                let to = at(pods.client.v4.into(), PORT);
                ensure!(!connects(&pods.web, to, NEVER)?, "open");
                Ok(())
            },
        )?;
        opens(&pods.kept)?;
        let client = format!("{}:{PORT}", pods.client.v4);
        let (_, why) = why(fleet.one, &["default/web", &client])?;
        ensure!(
            why.contains("prune"),
            "why does not say that pods are not read: {why}"
        );
        let block = format!("{EGRESS}  - toCIDR: [\"{}/25\"]\n", "10.77.0.128");
        fleet.one.write_policy("out.yaml", &block)?;
        opens(&pods.client)?;
        opens(&pods.kept)?;
        drop((one, two));
        Ok(())
    });
}
