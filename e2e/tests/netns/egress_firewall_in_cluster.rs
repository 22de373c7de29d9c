//! EgressFirewalls of a cluster: read by relays, or from the stored list while the API server is
//! away, and with names that one node learned and every node opens.
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, NAMESPACE, Options, pod};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::pod::Pod;
use holdfast_e2e::process::Program;
use holdfast_e2e::relay::Certificates;
use holdfast_e2e::{AgentOptions, Lab, Query, config, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// Time until the agent uses its stored list, and a little more.
const STANDS_IN: Duration = Duration::from_secs(40);
/// Number of names that the pods of two nodes look up.
const NAMES: u8 = 200;

fn firewall(rules: &Value) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {"name": "default", "namespace": "default"}, "spec": {"egress": rules},
    })
}

fn block(kind: &str, block: &str) -> Value {
    json!({"type": kind, "to": {"cidrSelector": block}})
}

fn name(name: &str) -> Value {
    json!({"type": "Allow", "to": {"dnsName": name}})
}

fn node(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name}, "status": {"addresses": []},
    })
}

fn own(name: &str, of: &Pod, node: &str) -> Value {
    let addresses = [of.v4.to_string(), of.v6.to_string()];
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    pod("default", name, json!({"app": "web"}), node, &addresses)
}

fn options(api: &ApiServer, node: &str) -> AgentOptions {
    AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!(
            "--kubeconfig={}",
            api.files().kubeconfig.display()
        ))
        .flag(&format!("--node-name={node}"))
        .flag("--dns-server=192.0.2.53")
        .flag("--pod-cidr=10.77.0.0/24")
}

fn closes(pod: &Pod, to: IpAddr) -> Result<()> {
    eventually(&format!("{to} is closed"), SOON, || {
        pod.expect_closed(at(to, 80))
    })
}

fn opens(pod: &Pod, to: IpAddr) -> Result<()> {
    eventually(&format!("{to} is open"), SOON, || {
        pod.expect_open(at(to, 80))
    })
}

fn relay(lab: &Lab, api: &ApiServer, files: &Certificates) -> Result<Program> {
    let program = config::program("holdfast-agent")?;
    let program = program.to_str().context("a path in UTF-8")?;
    let mut command: Command = lab.node.command(program);
    command.env("NO_COLOR", "1");
    command.args(["relay", "--metrics-address=off", "--name=relay"]);
    command.arg(format!("--kubeconfig={}", api.files().admin.display()));
    command.arg("--listen=127.0.0.1:9971");
    command.arg(format!("--tls-cert={}", files.certificate.display()));
    command.arg(format!("--tls-key={}", files.key.display()));
    command.arg(format!("--client-ca={}", files.authority.display()));
    let log = lab.directory().join("log/relay.log");
    Program::start("holdfast-agent relay", command, &log)
}

#[test]
fn a_firewall_that_comes_by_a_relay_stays_although_agent_relay_and_api_server_are_away() {
    with_lab(|lab| {
        let directory = lab.directory().join("apiserver");
        let api = ApiServer::start(Some(&lab.node), &directory, Options::with_relays())?;
        api.put(node("n1"))?;
        api.put(own("web", &lab.a, "n1"))?;
        let to = |host: u8| format!("{}/32", web4(host));
        api.put(firewall(&json!([
            block("Allow", &to(11)),
            block("Deny", "203.0.113.0/24")
        ])))?;
        let (of_relay, of_agent) = Certificates::issue(&lab.directory().join("tls"))?;
        let relays = relay(lab, &api, &of_relay)?;
        let options = options(&api, "n1")
            .flag("--k8s-relay=127.0.0.1:9971")
            .flag(&format!("--k8s-relay-ca={}", of_agent.authority.display()))
            .flag(&format!(
                "--k8s-relay-cert={}",
                of_agent.certificate.display()
            ))
            .flag(&format!("--k8s-relay-key={}", of_agent.key.display()));
        let agent = lab.start_agent(&options)?;
        let netns = lab.a.netns.name();
        lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "default/web"])?;
        closes(&lab.a, web4(10))?;
        lab.a.expect_open(at(web4(11), 80))?;
        let file = lab.directory().join("state/state/cluster.json");
        eventually("the firewall is stored", STANDS_IN, || {
            let text = std::fs::read_to_string(&file)?;
            ensure!(text.contains("EgressFirewall/default/default"), "{text}");
            Ok(())
        })?;

        agent.kill_9()?;
        relays.kill_9()?;
        api.away();
        let log = lab.directory().join("log/agent-2.log");
        let _agent = Program::start("holdfast-agent", lab.agent_command(&options)?, &log)?;
        eventually("the stored list stands in", STANDS_IN, || {
            let list = lab.agent(&["policy", "get"])?;
            ensure!(list.contains("EgressFirewall/default/default"), "{list}");
            Ok(())
        })?;
        lab.a.expect_open(at(web4(11), 80))?;
        lab.a.expect_closed(at(web4(10), 80))?;
        // API server and relay are back, with the rules in another order.
        let rules = json!([block("Deny", "203.0.113.0/24"), block("Allow", &to(11))]);
        api.put(firewall(&rules))?;
        api.back()?;
        let _relay = relay(lab, &api, &of_relay)?;
        closes(&lab.a, web4(11))
    });
}

/// A node with its pod.
struct Node<'a> {
    lab: &'a Lab,
    pod: &'a Pod,
    name: &'static str,
}

impl Node<'_> {
    fn start(&self, api: &ApiServer) -> Result<Program> {
        let options = options(api, self.name)
            .flag("--resolver=kube")
            .flag(&format!("--resolver-namespace={NAMESPACE}"))
            .flag("--resolver-lease=3s");
        self.lab.start_agent(&options.with_builtin())
    }

    fn add_pod(&self) -> Result<()> {
        let pod = format!("default/{}", self.name);
        let netns = self.pod.netns.name();
        self.lab
            .agent(&["endpoint", "add", "--netns", netns, "--pod", &pod])?;
        Ok(())
    }

    /// Makes the node's pod look up a name.
    fn ask(&self, name: &str, address: IpAddr) -> Result<()> {
        self.lab.zone.set(name, &[address], 600);
        self.pod.ask(&Query::a(name, DNS4))?.expect(address)?;
        Ok(())
    }
}

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

fn address(n: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 114, n).into()
}

/// Names of the objects, each with its addresses.
fn objects(api: &ApiServer) -> Result<Vec<(String, BTreeSet<String>)>> {
    let of = |object: &Value| {
        let names = object["status"]["resolvedNames"].as_array().cloned();
        let names = names.unwrap_or_default();
        let addresses = names
            .iter()
            .filter_map(|name| name["resolvedAddresses"].as_array());
        let addresses = addresses.flatten().filter_map(|one| one["ip"].as_str());
        let name = object["spec"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        (name, addresses.map(str::to_owned).collect())
    };
    Ok(api.all("dnsnameresolvers")?.iter().map(of).collect())
}

fn has_object(api: &ApiServer, name: &str, is_there: bool) -> Result<()> {
    eventually(&format!("an object of {name}: {is_there}"), SOON, || {
        let all = objects(api)?;
        ensure!(all.iter().any(|(of, _)| of == name) == is_there, "{all:?}");
        Ok(())
    })
}

fn leader(api: &ApiServer, other_than: &str) -> Result<String> {
    eventually("an agent leads", SOON, || {
        let lease = api.get("leases", NAMESPACE, "holdfast-resolver")?;
        let holder = lease.context("no Lease")?["spec"]["holderIdentity"].clone();
        let holder = holder.as_str().unwrap_or_default().to_owned();
        ensure!(!holder.is_empty() && holder != other_than, "{holder:?}");
        Ok(holder)
    })
}

#[test]
fn all_nodes_open_what_the_pods_of_one_learned_also_after_the_leader_was_killed() {
    with_lab(|one| {
        with_lab(|two| {
            for lab in [one, two] {
                lab.world.batch("route add local 203.0.114.0/24 dev lo")?;
            }
            let at_node = connect(one, two)?;
            let directory = one.directory().join("apiserver");
            let with_resolver = Options::with_resolver();
            let api = ApiServer::start_at(Some(&one.node), at_node, &directory, with_resolver)?;
            let nodes = [
                Node {
                    lab: one,
                    pod: &one.a,
                    name: "n1",
                },
                Node {
                    lab: two,
                    pod: &two.b,
                    name: "n2",
                },
            ];
            for of in &nodes {
                api.put(node(of.name))?;
                api.put(own(of.name, of.pod, of.name))?;
            }
            let dns = block("Allow", "192.0.2.53/32");
            let (known, rest) = (name("*.example.test"), block("Deny", "0.0.0.0/0"));
            api.put(firewall(&json!([dns, known, rest])))?;
            // These conflicts add to the conflicts that parallel writers cause.
            api.conflict("dnsnameresolvers", 3)?;
            let mut agents = Vec::new();
            for of in &nodes {
                agents.push(of.start(&api)?);
                of.add_pod()?;
            }
            has_object(&api, "*.example.test.", true)?;
            std::thread::scope(|scope| {
                let asking = |(of, first): (&'_ Node<'_>, u8)| -> Result<()> {
                    for n in (first..NAMES).step_by(2) {
                        of.ask(&format!("sub{n}.example.test"), address(n))?;
                    }
                    Ok(())
                };
                let both = nodes.iter().zip([0, 1]);
                let both: Vec<_> = both.map(|of| scope.spawn(move || asking(of))).collect();
                let mut both = both.into_iter();
                both.try_for_each(|one| one.join().expect("a thread that asks"))
            })?;
            let wanted: BTreeSet<String> = (0..NAMES).map(|n| address(n).to_string()).collect();
            eventually("all answers are in the object", SOON, || {
                let all = objects(&api)?;
                let found = all.first().context("no object")?.1.clone();
                let lost: Vec<_> = wanted.difference(&found).collect();
                ensure!(all.len() == 1 && lost.is_empty(), "lost: {lost:?}");
                Ok(())
            })?;
            // Each node opens addresses that its own pod did not look up.
            opens(nodes[1].pod, address(0))?;
            opens(nodes[0].pod, address(1))?;
            nodes[0].pod.expect_closed(at(address(NAMES), 80))?;

            let killed = leader(&api, "")?;
            let killed = usize::from(killed != "n1");
            let stays = nodes[killed].pod.stream(at(address(0), 80))?;
            agents.remove(killed).kill_9()?;
            let survivor = &nodes[1 - killed];
            ensure!(leader(&api, nodes[killed].name)? == survivor.name);
            survivor.ask("late.example.test", address(NAMES))?;
            api.put(firewall(&json!([
                dns,
                known,
                name("www.example.org"),
                rest
            ])))?;
            has_object(&api, "www.example.org.", true)?;
            api.put(firewall(&json!([dns, known, rest])))?;
            has_object(&api, "www.example.org.", false)?;

            // The killed agent comes back, and opens the addresses that it missed.
            let _agent = nodes[killed].start(&api)?;
            opens(nodes[killed].pod, address(NAMES))?;
            nodes[killed].pod.expect_open(at(address(2), 80))?;
            stays.expect_alive()
        });
        Ok(())
    });
}
