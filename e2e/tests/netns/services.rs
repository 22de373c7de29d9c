//! Services are judged by the pods behind them, over both families, UDP and TCP, from routed and from
//! bridged pods, while the node translates their addresses as kube-proxy does.
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::lab::{DNS4, DNS6, NODE4, at, web4, web6};
use holdfast_e2e::policy::{CLIENT, WEB, egress, names};
use holdfast_e2e::service::{self, ServicePort, service4, service6};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Pod, Query, SdpOptions, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);
const NODE_LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 20, 10));
/// Number of connections to a Service in a row: each may go to another backend.
const TRIES: usize = 6;

const DNS: u8 = 10;
const DB: u8 = 20;
const MIXED: u8 = 30;
const EMPTY: u8 = 40;

fn vips(host: u8) -> [IpAddr; 2] {
    [service4(host), service6(host)]
}

fn of_family<'a>(vip: &IpAddr, all: &'a [[IpAddr; 2]]) -> impl Iterator<Item = IpAddr> + 'a {
    let family = usize::from(vip.is_ipv6());
    all.iter().map(move |both| both[family])
}

/// A Service with its slices, and what kube-proxy does with it.
struct Service<'a> {
    name: &'a str,
    host: u8,
    /// Name, protocol, port, port of the backends.
    ports: &'a [(&'static str, &'static str, u16, u16)],
    /// Names of pods, each with its IPv4 and IPv6 address.
    backends: &'a [(&'a str, [IpAddr; 2])],
}

impl Service<'_> {
    fn documents(&self) -> String {
        let [four, six] = vips(self.host);
        let ports = |target: bool| {
            let ports = self.ports.iter().map(|(name, protocol, port, to)| {
                let number = if target { to } else { port };
                let protocol = protocol.to_uppercase();
                format!("{{name: {name}, protocol: {protocol}, port: {number}}}")
            });
            ports.collect::<Vec<_>>().join(", ")
        };
        let name = self.name;
        let mut text = format!(
            r#"
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec: {{clusterIPs: [{four}, "{six}"], ports: [{}]}}
"#,
            ports(false)
        );
        for (n, family) in ["IPv4", "IPv6"].into_iter().enumerate() {
            let backends = self.backends.iter().map(|(pod, addresses)| {
                format!(
                    "{{addresses: [\"{}\"], targetRef: {{kind: Pod, namespace: default, name: {pod}}}}}",
                    addresses[n]
                )
            });
            let backends: Vec<String> = backends.collect();
            text += &format!(
                r"
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-{n}, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: {family}
endpoints: [{}]
ports: [{}]
",
                backends.join(", "),
                ports(true)
            );
        }
        text
    }

    fn translated(&self) -> Vec<ServicePort> {
        let addresses: Vec<[IpAddr; 2]> = self.backends.iter().map(|(_, both)| *both).collect();
        let all = vips(self.host).into_iter().flat_map(|vip| {
            let addresses = &addresses;
            self.ports
                .iter()
                .map(move |(_, protocol, port, to)| ServicePort {
                    protocol,
                    at: at(vip, *port),
                    backends: of_family(&vip, addresses).map(|ip| at(ip, *to)).collect(),
                })
        });
        all.collect()
    }
}

fn pod_document(name: &str, app: &str, [four, six]: [IpAddr; 2]) -> String {
    format!(
        r#"
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {app}}}}}
spec: {{nodeName: other}}
status: {{phase: Running, podIPs: [{{ip: {four}}}, {{ip: "{six}"}}]}}
"#
    )
}

fn both(pod: &Pod) -> [IpAddr; 2] {
    [pod.v4.into(), pod.v6.into()]
}

/// Rules of the clients: by pods' labels and pods' ports.
fn rules() -> String {
    r#"
- toEndpoints: [{matchLabels: {app: db}}]
  toPorts: [{ports: [{port: "8080", protocol: TCP}, {port: "7777", protocol: UDP}]}]
- toEndpoints: [{matchLabels: {app: dns}}]
  toPorts:
  - ports: [{port: "5353", protocol: ANY}]
    rules: {dns: [{matchPattern: "*.good.test"}]}
"#
    .to_owned()
}

/// The rule by which pod b queries without the proxy.
const PLAIN: &str = "- toEndpoints: [{matchLabels: {app: dns}}]\n  toPorts: [{ports: [{port: \"5353\", protocol: ANY}]}]\n";

/// Queries for DNS pods may come from the pods of the other rules.
const DNS_INGRESS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: dns, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: dns}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}, {matchLabels: {app: client}}]
    toPorts: [{ports: [{port: "5353", protocol: ANY}]}]
"#;

fn labels(app: &str) -> String {
    format!("k8s:app={app},k8s:io.kubernetes.pod.namespace=default")
}

/// Checks that allowed names are answered, and that other names are refused and reach no server.
fn is_judged(lab: &Lab, pod: &Pod, servers: &[IpAddr]) -> Result<()> {
    let bad = lab.zone.asked("www.bad.test");
    for server in servers {
        for tcp in [false, true] {
            let over = |query: Query| if tcp { query.tcp() } else { query };
            for _ in 0..TRIES / 2 {
                let good = over(Query::a("www.good.test", *server));
                let reply = pod.ask(&good).with_context(|| format!("{good:?}"))?;
                reply.expect(web4(10))?;
            }
            let bad = over(Query::a("www.bad.test", *server));
            let reply = pod.ask(&bad).with_context(|| format!("{bad:?}"))?;
            ensure!(reply.addresses().is_empty(), "{bad:?}: answered");
        }
    }
    ensure!(
        lab.zone.asked("www.bad.test") == bad,
        "a refused name reached its server"
    );
    Ok(())
}

fn reaches(pod: &Pod, port: u16, datagrams: u16) -> Result<()> {
    for vip in vips(DB) {
        for _ in 0..TRIES {
            pod.expect_open(at(vip, port))?;
            pod.datagram(at(vip, datagrams), SOON)
                .with_context(|| format!("UDP to {vip}"))?;
        }
    }
    Ok(())
}

/// Flows of queries and answers that connection tracking has, except the proxies' own.
fn tracked(lab: &Lab, pods: &[&Pod]) -> Result<Vec<String>> {
    let flows = lab
        .node
        .enter(|| std::fs::read_to_string("/proc/thread-self/net/nf_conntrack"))??;
    let of_pods = |line: &&str| {
        let from = |pod: &&Pod| line.contains(&format!("src={} dst=10.96.0.{DNS} ", pod.v4));
        line.contains("dport=53 ") && pods.iter().any(from)
    };
    Ok(flows.lines().filter(of_pods).map(str::to_owned).collect())
}

#[test]
fn policy_about_pods_holds_at_the_addresses_of_their_services() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
        lab.zone.set("www.bad.test", &[web4(11)], 60);
        let bridge = Bridge::new(lab, "cni0")?;
        let bridged = bridge.add_pod("p", 11)?;
        let (db, dns) = (lab.add_pod("db", 21)?, lab.add_pod("dns", 22)?);
        let _web = Web::start(&db.netns, &both(&db), &[8080, 80], &[7777])?;
        let _here = DnsServer::start_on(&dns.netns, &both(&dns), 5353, &lab.zone)?;
        let _there = DnsServer::start_on(&lab.world, &[DNS4, DNS6], 5353, &lab.zone)?;

        // Each Service has one pod here, and one on another node.
        let (far, old) = ([web4(12), web6(12)], [web4(13), web6(13)]);
        let dns_ports = [("udp", "udp", 53, 5353), ("tcp", "tcp", 53, 5353)];
        let services = [
            Service {
                name: "dns",
                host: DNS,
                ports: &dns_ports,
                backends: &[("dns-0", both(&dns)), ("dns-1", [DNS4, DNS6])],
            },
            Service {
                name: "db",
                host: DB,
                ports: &[("sql", "tcp", 80, 8080), ("log", "udp", 7000, 7777)],
                backends: &[("db-0", both(&db)), ("db-1", far)],
            },
            Service {
                name: "mixed",
                host: MIXED,
                ports: &[("sql", "tcp", 80, 8080)],
                backends: &[("db-0", both(&db)), ("old-0", old)],
            },
            Service {
                name: "empty",
                host: EMPTY,
                ports: &[("sql", "tcp", 80, 8080)],
                backends: &[],
            },
        ];
        let translated: Vec<ServicePort> = services.iter().flat_map(Service::translated).collect();
        service::kube_proxy(lab, &translated)?;
        let mut cluster: String = services.iter().map(Service::documents).collect();
        for (name, app, addresses) in [
            ("dns-1", "dns", [DNS4, DNS6]),
            ("db-1", "db", far),
            ("old-0", "old", old),
        ] {
            cluster += &pod_document(name, app, addresses);
        }
        lab.write_policy("cluster.yaml", &cluster)?;
        lab.write_policy(
            "web.yaml",
            &egress("web", "web", &(rules() + &names("*.good.test"))),
        )?;
        lab.write_policy("plain.yaml", &egress("plain", "client", PLAIN))?;
        lab.write_policy("db.yaml", &egress("db", "db", &rules()))?;
        lab.write_policy("dns.yaml", DNS_INGRESS)?;
        let options = AgentOptions::default()
            .flag("--k8s-service-cidr=10.96.0.0/16,fd96::/64")
            .flag("--k8s-dns-alias=169.254.20.10=default/dns");
        let _agent = lab.start_agent(&options)?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        for (pod, labels) in [(&db, labels("db")), (&dns, labels("dns"))] {
            lab.add_endpoint(pod, &labels)?;
        }
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&bridged, WEB)?;
        lab.add_endpoint(&lab.b, CLIENT)?;

        for (pod, what) in [(&lab.a, "routed"), (&bridged, "bridged")] {
            is_judged(lab, pod, &vips(DNS)).context(what)?;
            reaches(pod, 80, 7000).context(what)?;
            pod.expect_open(at(web4(10), 80))
                .context("an answer opens its address")?;
            for vip in vips(DB) {
                pod.expect_closed(at(vip, 8080)).context(what)?;
            }
            for vip in [vips(MIXED), vips(EMPTY)].concat() {
                pod.expect_closed(at(vip, 80)).context(what)?;
            }
        }
        ensure!(
            tracked(lab, &[&lab.a, &bridged])?.is_empty(),
            "{:?}",
            tracked(lab, &[&lab.a, &bridged])?
        );

        // Without DNS rules the node's translation is all that there is.
        for server in vips(DNS) {
            for _ in 0..TRIES {
                lab.b
                    .ask(&Query::a("www.bad.test", server))?
                    .expect(web4(11))?;
                lab.b
                    .ask(&Query::a("www.bad.test", server).tcp())?
                    .expect(web4(11))?;
            }
        }
        ensure!(!tracked(lab, &[&lab.b])?.is_empty());
        lab.b.expect_closed(at(vips(DB)[0], 80))?;

        // The pod behind a Service reaches itself through the Service: the packets come from the
        // node's address.
        reaches(&db, 80, 7000).context("hairpin")?;

        let status = lab.agent(&["status"])?;
        for part in [
            "Service default/mixed is closed to endpoint",
            "8080/TCP",
            "app=old",
        ] {
            ensure!(status.contains(part), "{part}: {status}");
        }
        is_explained(lab)?;
        node_local_cache(lab, &[&lab.a, &bridged])?;
        backends_change(lab, &services[1], &db, far)
    });
}

/// Checks that `why` and `observe` name the pods behind a Service.
fn is_explained(lab: &Lab) -> Result<()> {
    let id = lab.endpoint_id(&lab.a)?.to_string();
    for (host, parts) in [
        (
            DB,
            [
                "Service default/db",
                "10.77.0.21 (app=db) at 8080/TCP: allowed",
                "CiliumNetworkPolicy/default/web spec.egress[0]",
            ],
        ),
        (
            MIXED,
            [
                "Service default/mixed",
                "(app=old) at 8080/TCP: no rule allows it",
                "not allowed",
            ],
        ),
    ] {
        let vip = at(vips(host)[0], 80).to_string();
        let text = lab
            .agent(&["why", &id, &vip])
            .unwrap_or_else(|e| format!("{e:#}"));
        for part in parts {
            ensure!(text.contains(part), "{part}: {text}");
        }
    }
    let seen = lab.agent(&["observe"])?;
    for part in [
        "Service/default/db",
        "Service/default/mixed",
        "Service/default/dns",
    ] {
        ensure!(seen.contains(part), "{part}: {seen}");
    }
    Ok(())
}

/// NodeLocal DNSCache listens on an address of the node that stands for the DNS Service.
fn node_local_cache(lab: &Lab, pods: &[&Pod]) -> Result<()> {
    lab.node.batch("link add nodelocaldns type bridge\naddress add 169.254.20.10/32 dev nodelocaldns\nlink set nodelocaldns up")?;
    let cache = DnsServer::start(&lab.node, &[NODE_LOCAL], &lab.zone)?;
    for pod in pods {
        is_judged(lab, pod, &[NODE_LOCAL]).context("NodeLocal DNSCache")?;
    }
    ensure!(!cache.take_askers().is_empty());
    Ok(())
}

/// A pod with other labels joins, and then gets the labels of the other pods: the Service closes
/// and opens. Only the documents change.
fn backends_change(lab: &Lab, db: &Service<'_>, pod: &Pod, far: [IpAddr; 2]) -> Result<()> {
    let vip: SocketAddr = at(vips(DB)[0], 80);
    lab.write_policy(
        "z-later.yaml",
        &pod_document("db-2", "old", [web4(14), web6(14)]),
    )?;
    let more = [
        ("db-0", both(pod)),
        ("db-1", far),
        ("db-2", [web4(14), web6(14)]),
    ];
    let wider = Service {
        backends: &more,
        ..*db
    };
    let cluster = std::fs::read_to_string(lab.policy_dir().join("cluster.yaml"))?;
    let replaced = cluster.replace(&db.documents(), &wider.documents());
    ensure!(replaced != cluster);
    lab.write_policy("cluster.yaml", &replaced)?;
    eventually("the Service is closed", SOON, || lab.a.expect_closed(vip))?;
    lab.write_policy(
        "z-later.yaml",
        &pod_document("db-2", "db", [web4(14), web6(14)]),
    )?;
    eventually("the Service is open", SOON, || lab.a.expect_open(vip))?;
    let node = NODE4;
    lab.b.expect_closed(at(node, 80))
}
