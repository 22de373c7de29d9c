//! A port of the node that leads to a pod (NodePort, host port) admits only senders that the pod's
//! ingress policy admits: with kube-proxy's rules of each mode, over both families, for routed pods and
//! pods on a bridge, and for clients on the node and outside of it.
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{NODE4, NODE6, at, web4, web6};
use holdfast_e2e::pod::{FIRST_SYN, REFUSED_AFTER};
use holdfast_e2e::policy::{CLIENT, WEB};
use holdfast_e2e::service::node_port::{self, Kind, Mode, NodePort};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Netns, Pod, eventually, with_lab};
use socket2::{Domain, Socket, Type};

const SOON: Duration = Duration::from_secs(10);
const ECHO: &str = "k8s:app=echo,k8s:io.kubernetes.pod.namespace=default";
const NODES: [IpAddr; 2] = [NODE4, NODE6];
/// A pod of another node that policy admits.
const REMOTE: [IpAddr; 2] = [web4(11), web6(11)];
const OUTSIDE: [IpAddr; 2] = [web4(12), web6(12)];

const ADMITTED_PODS: &str = "  - fromEndpoints: [{matchLabels: {app: web}}]\n";

fn ingress(rules: &str) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: echo-in, namespace: default}}
spec:
  endpointSelector: {{matchLabels: {{app: echo}}}}
  ingress:
{rules}"
    )
}

/// The ports of the node: three that lead to each backend, in both families.
fn ports(backends: &[&Pod]) -> Vec<NodePort> {
    let mut all = Vec::new();
    for (n, backend) in (0..).zip(backends) {
        for (kind, port) in [
            (Kind::Cluster, 30_080),
            (Kind::Local, 31_080),
            (Kind::HostPort, 8080),
        ] {
            for ip in both(backend) {
                let port = port + n * 100;
                let backend = at(ip, 80);
                all.push(NodePort {
                    kind,
                    port,
                    backend,
                });
            }
        }
    }
    all
}

fn both(pod: &Pod) -> [IpAddr; 2] {
    [pod.v4.into(), pod.v6.into()]
}

/// The address and port that clients use.
fn of_node(port: &NodePort) -> SocketAddr {
    at(NODES[usize::from(port.backend.is_ipv6())], port.port)
}

/// Who connects, and whether the pod's policy admits it.
struct Client<'a> {
    name: &'static str,
    netns: &'a Netns,
    /// Its addresses, if the namespace has several.
    from: Option<[IpAddr; 2]>,
    is_admitted: bool,
}

impl<'a> Client<'a> {
    fn pod(name: &'static str, pod: &'a Pod, is_admitted: bool) -> Self {
        Self {
            name,
            netns: &pod.netns,
            from: None,
            is_admitted,
        }
    }

    fn outside(name: &'static str, lab: &'a Lab, from: [IpAddr; 2], is_admitted: bool) -> Self {
        Self {
            name,
            netns: &lab.world,
            from: Some(from),
            is_admitted,
        }
    }

    fn connects(&self, to: SocketAddr) -> Result<bool> {
        let limit = if self.is_admitted {
            FIRST_SYN
        } else {
            REFUSED_AFTER
        };
        self.netns.enter(|| -> Result<bool> {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            if let Some(from) = self.from {
                socket.bind(&at(from[usize::from(to.is_ipv6())], 0).into())?;
            }
            Ok(socket.connect_timeout(&to.into(), limit).is_ok())
        })?
    }

    /// Connects to all ports, and fails if policy does not hold at one of them.
    fn check(&self, ports: &[NodePort]) -> Result<()> {
        let mut wrong = Vec::new();
        for port in ports {
            if self.connects(of_node(port))? != self.is_admitted {
                wrong.push(format!(
                    "{:?} {} to {}",
                    port.kind,
                    of_node(port),
                    port.backend
                ));
            }
        }
        let did = if self.is_admitted {
            "did not connect"
        } else {
            "connected"
        };
        ensure!(wrong.is_empty(), "{} {did}: {wrong:?}", self.name);
        Ok(())
    }
}

/// Checks all clients at once. The error lists everything that is wrong.
fn check(clients: &[Client<'_>], ports: &[NodePort]) -> Result<()> {
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let running: Vec<_> = clients
            .iter()
            .map(|client| scope.spawn(|| client.check(ports)))
            .collect();
        let ended = running.into_iter().map(|thread| thread.join());
        let results = ended.map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results
            .filter_map(|result| result.err().map(|error| format!("{error:#}")))
            .collect()
    });
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("{}", wrong.join("\n"))
}

fn remote_pod() -> String {
    let [four, six] = REMOTE;
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: far, namespace: default, labels: {{app: web}}}}
spec: {{nodeName: other}}
status: {{phase: Running, podIPs: [{{ip: {four}}}, {{ip: "{six}"}}]}}
"#
    )
}

#[test]
fn a_port_of_the_node_admits_whom_the_pod_admits() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "cni0")?;
        let (admitted, refused) = (bridge.add_pod("p", 11)?, bridge.add_pod("q", 12)?);
        let (routed, bridged) = (lab.add_pod("r", 21)?, bridge.add_pod("s", 21)?);
        let _webs = [
            Web::start(&routed.netns, &[], &[80], &[])?,
            Web::start(&bridged.netns, &[], &[80], &[])?,
        ];
        let ports = ports(&[&routed, &bridged]);
        lab.write_policy("far.yaml", &remote_pod())?;
        lab.write_policy("in.yaml", &ingress(ADMITTED_PODS))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        for pod in [&lab.a, &admitted] {
            lab.add_endpoint(pod, WEB)?;
        }
        for pod in [&lab.b, &refused] {
            lab.add_endpoint(pod, CLIENT)?;
        }
        for pod in [&routed, &bridged] {
            lab.add_endpoint(pod, ECHO)?;
        }
        let clients = [
            Client::pod("an admitted routed pod", &lab.a, true),
            Client::pod("an admitted pod on the bridge", &admitted, true),
            Client::pod("another routed pod", &lab.b, false),
            Client::pod("another pod on the bridge", &refused, false),
            Client::outside("an admitted pod of another node", lab, REMOTE, true),
            Client::outside("a client outside", lab, OUTSIDE, false),
            Client {
                name: "a process of the node",
                netns: &lab.node,
                from: None,
                is_admitted: true,
            },
        ];
        // As the bridge plugin does with `hairpinMode`.
        let hairpin = format!(
            "link set dev {} type bridge_slave hairpin on",
            bridged.host_side
        );
        lab.node.batch(&hairpin)?;
        // Rules see packets of a bridge before the node routes them (`br_netfilter`), or after.
        for (mode, early) in [
            (Mode::Nftables, true),
            (Mode::Nftables, false),
            (Mode::IptablesNft, true),
            (Mode::IptablesLegacy, false),
        ] {
            let early_value = if early { "1" } else { "0" };
            lab.node.sysctl(&[
                ("net.bridge.bridge-nf-call-iptables", early_value),
                ("net.bridge.bridge-nf-call-ip6tables", early_value),
            ])?;
            // Without `br_netfilter`, two pods on a bridge cannot use a port that is not masqueraded.
            let works = |port: &&NodePort| early || port.kind != Kind::Local;
            let ports: Vec<NodePort> = ports.iter().filter(works).copied().collect();
            node_port::open(lab, mode, &ports).with_context(|| format!("{mode:?}"))?;
            check(&clients, &ports).with_context(|| format!("{mode:?}, early: {early}"))?;
            // A pod reaches itself through its own port.
            for backend in [&routed, &bridged] {
                let own = |port: &&NodePort| both(backend).contains(&port.backend.ip());
                let own: Vec<NodePort> = ports.iter().filter(own).copied().collect();
                Client::pod("the pod itself", backend, true)
                    .check(&own)
                    .with_context(|| format!("{mode:?}, early: {early}"))?;
            }
        }
        // The probes of the kubelet.
        for backend in [&routed, &bridged] {
            for ip in both(backend) {
                let probe = Client {
                    name: "a probe",
                    netns: &lab.node,
                    from: None,
                    is_admitted: true,
                };
                ensure!(probe.connects(at(ip, 80))?, "a probe of {ip}");
            }
        }
        is_observed(lab, &routed)?;
        connections_end(lab, &ports)
    });
}

/// `observe` shows the sender that policy judged, together with an address of the node.
fn is_observed(lab: &Lab, backend: &Pod) -> Result<()> {
    let identities = lab.identities()?;
    let mut refused = identities
        .iter()
        .filter(|(_, labels)| labels.contains("app=client"));
    let (id, _) = refused.next().context("an identity")?;
    let (to, remote) = (format!("-> {}:80 ", backend.v4), format!("remote {id}, "));
    let own = format!(" {}:", lab.b.v4);
    let seen = lab.agent(&["observe"])?;
    let mut translated = seen
        .lines()
        .filter(|line| line.contains(&to) && line.contains(&remote) && !line.contains(&own));
    ensure!(
        translated.any(|line| line.contains("policy_denied")),
        "{to}{remote}: {seen}"
    );
    Ok(())
}

/// A connection that was admitted ends with the rule that admitted it.
fn connections_end(lab: &Lab, ports: &[NodePort]) -> Result<()> {
    let cluster = ports.iter().find(|port| port.kind == Kind::Cluster);
    let stream = lab.a.stream(of_node(cluster.context("a port")?))?;
    stream.expect_alive()?;
    lab.write_policy("in.yaml", &ingress(&ADMITTED_PODS.replace("web", "nobody")))?;
    stream.expect_cut(SOON)
}

/// Clients outside of the cluster are selected by their own addresses, also where a deny overrides.
#[test]
fn blocks_are_about_the_client_s_own_address() {
    with_lab(|lab| {
        let echo = lab.add_pod("r", 21)?;
        let _web = Web::start(&echo.netns, &[], &[80], &[])?;
        let ports = ports(&[&echo]);
        let rules = r#"
  - fromCIDR: ["203.0.113.0/24", "2001:db8:113::/64"]
  ingressDeny:
  - fromCIDR: ["203.0.113.13/32", "2001:db8:113::d/128"]
"#;
        lab.write_policy("in.yaml", &ingress(rules))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&echo, ECHO)?;
        lab.add_endpoint(&lab.a, WEB)?;
        let clients = [
            Client::outside("an admitted client", lab, [web4(10), web6(10)], true),
            Client::outside("a denied client", lab, [web4(13), web6(13)], false),
            Client::outside(
                "the router",
                lab,
                ["192.0.2.2".parse()?, "2001:db8:53::2".parse()?],
                false,
            ),
            Client::pod("a pod", &lab.a, false),
        ];
        for mode in [Mode::Nftables, Mode::IptablesNft] {
            node_port::open(lab, mode, &ports)?;
            check(&clients, &ports).with_context(|| format!("{mode:?}"))?;
        }
        // A rule that admits the world admits clients outside of the cluster, and no pod.
        lab.write_policy("in.yaml", &ingress("  - fromEntities: [world]\n"))?;
        let [admitted, ..] = &clients;
        eventually("the world is admitted", SOON, || admitted.check(&ports))?;
        Client::outside("a client of the world", lab, OUTSIDE, true).check(&ports)?;
        Client::pod("a pod", &lab.a, false).check(&ports)
    });
}
