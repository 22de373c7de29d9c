//! The answer of `why` is what a connection does: for each kind of Service, backends of this node and of
//! another one, and each combination of ingress and egress policy.
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{NODE4, at, web4};
use holdfast_e2e::pod::{FIRST_SYN, REFUSED_AFTER};
use holdfast_e2e::policy::{CLIENT, WEB, egress};
use holdfast_e2e::service::{self, ServicePort, service4};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Pod, config, with_lab};
use serde_json::Value;
use socket2::{Domain, Socket, Type};

/// Ingress policies of the receivers.
const INGRESS: [&str; 3] = ["allow", "deny", "none"];
const MIXED: u8 = 50;
/// Number of connections after which both backends of a Service were chosen.
const TRIES: usize = 40;

/// A pod that receives, with a Service that leads to this pod alone.
struct Backend {
    name: String,
    address: IpAddr,
    host: u8,
    /// Whether the pod is on this node.
    is_own: bool,
}

impl Backend {
    /// Each way to reach the pod, by name.
    fn ways(&self) -> [(&'static str, SocketAddr); 4] {
        [
            ("pod", at(self.address, 8080)),
            ("ClusterIP", at(service4(self.host), 80)),
            ("external IP", at(external(self.host), 80)),
            ("NodePort", at(NODE4, node_port(self.host))),
        ]
    }
}

fn external(host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(203, 0, 113, 200 + host / 10))
}

fn node_port(host: u8) -> u16 {
    30_000 + u16::from(host)
}

fn documents(name: &str, host: u8, backends: &[&Backend]) -> String {
    let (vip, outside, node) = (service4(host), external(host), node_port(host));
    let backends = backends.iter().map(|backend| {
        format!(
            "{{addresses: [\"{}\"], targetRef: {{kind: Pod, namespace: default, name: {}}}}}",
            backend.address, backend.name
        )
    });
    let backends: Vec<String> = backends.collect();
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{type: NodePort, clusterIPs: [{vip}], externalIPs: [{outside}], \
         ports: [{{name: sql, port: 80, nodePort: {node}}}]}}\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}-4, labels: {{kubernetes.io/service-name: {name}}}}}\n\
         addressType: IPv4\nendpoints: [{}]\nports: [{{name: sql, port: 8080}}]\n",
        backends.join(", ")
    )
}

fn translated(host: u8, backends: &[&Backend]) -> Vec<ServicePort> {
    let to = [
        at(service4(host), 80),
        at(external(host), 80),
        at(NODE4, node_port(host)),
    ];
    let ports = to.into_iter().map(|vip| ServicePort {
        protocol: "tcp",
        at: vip,
        backends: backends.iter().map(|one| at(one.address, 8080)).collect(),
    });
    ports.collect()
}

fn labels(name: &str) -> String {
    format!("k8s:app={name},k8s:tier=db,k8s:io.kubernetes.pod.namespace=default")
}

/// A pod of the other node.
fn far_pod(name: &str, address: IpAddr) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\n\
         metadata: {{name: {name}, namespace: default, labels: {{app: {name}, tier: db}}}}\n\
         spec: {{nodeName: other}}\nstatus: {{phase: Running, podIPs: [{{ip: {address}}}]}}\n"
    )
}

const OTHER_NODE: &str = "---\napiVersion: v1\nkind: Node\nmetadata: {name: other}\n\
    status: {addresses: [{type: InternalIP, address: 192.0.2.77}]}\n";

/// Ingress policies of the receivers of both nodes.
fn ingress_policies() -> String {
    let all = ["near", "far"].into_iter().flat_map(|place| {
        [
            ("allow", "[{fromEndpoints: [{}]}]"),
            ("deny", "[{fromEndpoints: [{matchLabels: {app: absent}}]}]"),
        ]
        .map(|(kind, rules)| {
            let name = format!("{place}-{kind}");
            format!(
                "---\napiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\n\
                 metadata: {{name: {name}, namespace: default}}\nspec:\n\
                 \x20 endpointSelector: {{matchLabels: {{app: {name}}}}}\n\
                 \x20 ingress: {rules}\n"
            )
        })
    });
    all.collect()
}

/// The answer of `why`; its exit code must agree.
fn why(lab: &Lab, arguments: &[&str]) -> Result<Value> {
    let program = config::program("holdfast-agent")?.display().to_string();
    let mut command = lab.node.command(&program);
    command.arg("why").args(arguments).args(["-o", "json"]);
    command.arg("--admin-socket").arg(lab.agent_socket());
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let answer: Value =
        serde_json::from_str(&said).with_context(|| format!("{arguments:?}: {said}{error}"))?;
    ensure!(
        (answer["allowed"] == true) == output.status.success(),
        "{arguments:?}: {answer:#}"
    );
    Ok(answer)
}

/// Compares the answers of `why` with the connections that they are about.
#[derive(Default)]
struct Comparison {
    count: usize,
    outcomes: BTreeSet<String>,
    wrong: Vec<String>,
}

impl Comparison {
    /// Another node judges the other side if `is_far`.
    fn add(&mut self, name: &str, answer: &Value, is_far: bool, is_open: bool) {
        let wanted = match (is_open, is_far) {
            (true, true) => "unchecked",
            (true, false) => "allowed",
            (false, _) => "denied",
        };
        let unchecked = &answer["unchecked"][0];
        let command = unchecked["command"].as_str().unwrap_or_default();
        let is_named = unchecked["node"] == "other"
            && unchecked["node_addresses"][0] == "192.0.2.77"
            && command.starts_with("holdfast-agent why default/far-");
        if answer["outcome"] != wanted || (wanted == "unchecked") != is_named {
            self.wrong
                .push(format!("{name}, wanted {wanted}: {answer:#}"));
        }
        self.outcomes.insert(wanted.to_owned());
        self.count += 1;
    }

    fn end(&self) -> Result<()> {
        println!("{} combinations, {} differ", self.count, self.wrong.len());
        ensure!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        ensure!(self.count >= 40, "{} combinations", self.count);
        ensure!(self.outcomes.len() == 3, "only {:?}", self.outcomes);
        Ok(())
    }
}

#[test]
fn why_says_what_a_connection_does() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "cni0")?;
        let pods = [
            lab.add_pod("x", 21)?,
            bridge.add_pod("y", 22)?,
            lab.add_pod("z", 23)?,
        ];
        let webs = pods.iter().chain([&lab.a, &lab.b]);
        let webs = webs.map(|pod| Web::start(&pod.netns, &[], &[8080], &[]));
        let _webs = webs.collect::<Result<Vec<Web>>>()?;
        let near = pods.iter().map(|pod| (true, IpAddr::from(pod.v4)));
        let far = (11..14).map(|host| (false, web4(host)));
        let kinds = INGRESS.iter().cycle();
        let backends = near.chain(far).zip(kinds).zip((10_u8..).step_by(10));
        let backends = backends.map(|(((is_own, address), kind), host)| Backend {
            name: format!("{}-{kind}", if is_own { "near" } else { "far" }),
            address,
            host: if host < MIXED { host } else { host + 10 },
            is_own,
        });
        let backends: Vec<Backend> = backends.collect();

        let mut cluster = OTHER_NODE.to_owned() + &ingress_policies();
        let mut ports = Vec::new();
        for one in &backends {
            cluster += &documents(&one.name, one.host, &[one]);
            ports.extend(translated(one.host, &[one]));
            if !one.is_own {
                cluster += &far_pod(&one.name, one.address);
            }
        }
        let both = [&backends[0], &backends[1]];
        cluster += &documents("mixed", MIXED, &both);
        ports.extend(translated(MIXED, &both));
        service::kube_proxy(lab, &ports)?;
        lab.write_policy("cluster.yaml", &cluster)?;
        let rules = "- toEndpoints: [{matchLabels: {tier: db}}]\n- toEntities: [host]\n";
        lab.write_policy("web.yaml", &egress("web", "web", rules))?;
        let closed = "- toCIDR: [\"198.51.100.0/24\"]\n";
        lab.write_policy("client.yaml", &egress("client", "client", closed))?;
        let _agent = lab.start_agent(&AgentOptions::default().flag("--node-name=n1"))?;
        for (pod, one) in pods.iter().zip(&backends) {
            lab.add_endpoint(pod, &labels(&one.name))?;
        }
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&lab.b, CLIENT)?;

        let mut all = Comparison::default();
        for (sender, egress) in [(&lab.a, "egress allowed"), (&lab.b, "egress denied")] {
            for one in &backends {
                compare(lab, &mut all, (sender, egress), one)?;
            }
        }
        let (own, far): (Vec<_>, Vec<_>) = backends.iter().partition(|one| one.is_own);
        for (own, far) in own
            .iter()
            .flat_map(|own| far.iter().map(move |far| (own, far)))
        {
            let is_open = connects_from(lab, far.address, at(own.address, 8080))?;
            let (to, from) = (own.address.to_string(), at(far.address, 8080).to_string());
            let answer = why(lab, &[&to, &from, "--ingress"])?;
            let name = format!("{} to {}", far.name, own.name);
            all.add(&name, &answer, true, is_open);
        }
        all.end()?;
        depends(lab)
    });
}

/// Compares each way from a pod of this node to a backend, and the receiver's view of it.
fn compare(
    lab: &Lab,
    all: &mut Comparison,
    (sender, egress): (&Pod, &str),
    to: &Backend,
) -> Result<()> {
    let from = sender.v4.to_string();
    for (way, target) in to.ways() {
        let is_open = connects(sender, target)?;
        let answer = why(lab, &[&from, &target.to_string()])?;
        let name = format!("{egress}, {way} of {}", to.name);
        all.add(&name, &answer, !to.is_own, is_open);
    }
    if to.is_own {
        let is_open = connects(sender, at(to.address, 8080))?;
        // The port is the receiver's.
        let (own, from) = (to.address.to_string(), format!("{from}:8080"));
        let answer = why(lab, &[&own, &from, "--ingress"])?;
        let name = format!("{egress}, as {} sees it", to.name);
        all.add(&name, &answer, false, is_open);
    }
    Ok(())
}

/// A Service with one backend that accepts connections and one that drops them.
fn depends(lab: &Lab) -> Result<()> {
    let vip = at(service4(MIXED), 80);
    let mut ends = BTreeSet::new();
    for _ in 0..TRIES {
        ends.insert(connects(&lab.a, vip)?);
        if ends.len() == 2 {
            break;
        }
    }
    ensure!(ends.len() == 2, "only {ends:?}");
    let from = lab.a.v4.to_string();
    let answer = why(lab, &[&from, &vip.to_string()])?;
    ensure!(answer["outcome"] == "depends", "{answer:#}");
    let outcomes: Vec<&Value> = answer["backends"]
        .as_array()
        .context("backends")?
        .iter()
        .map(|one| &one["outcome"])
        .collect();
    ensure!(outcomes == ["allowed", "denied"], "{answer:#}");
    let error = lab.agent(&["why", &from, &vip.to_string()]).err();
    let error = format!("{:#}", error.context("it was allowed")?);
    ensure!(error.contains("depends on the backend"), "{error}");
    Ok(())
}

fn connects(pod: &Pod, to: SocketAddr) -> Result<bool> {
    pod.netns
        .enter(|| std::net::TcpStream::connect_timeout(&to, waits()).is_ok())
}

/// Whether a pod of the other node, which the world plays, reaches a pod of this one.
fn connects_from(lab: &Lab, from: IpAddr, to: SocketAddr) -> Result<bool> {
    lab.world.enter(|| -> Result<bool> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.bind(&at(from, 0).into())?;
        Ok(socket.connect_timeout(&to.into(), waits()).is_ok())
    })?
}

/// Ends before the second SYN, which is sent after one second.
fn waits() -> Duration {
    REFUSED_AFTER.min(FIRST_SYN)
}
