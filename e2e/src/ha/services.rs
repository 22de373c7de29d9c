//! R9: Services answer while the agent is down and every pod behind them is replaced on other nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};

use super::Row;
use super::connections::Connections;
use super::setup::{LEAVES, NAMES, Setup};
use crate::dns::probe::Query;
use crate::lab::{Lab, at};
use crate::nsd;
use crate::pod::Pod;
use crate::process::Program;
use crate::service::{self, ServicePort, flows, service4, service6};
use crate::traffic::names as zone;
use crate::wait::eventually;
use crate::web::Web;

/// Numbers of the DNS Service and of the web Service among the lab's Services.
pub(super) const DNS: u8 = 10;
pub(super) const SHOP: u8 = 20;
/// Port of the web Service, and of the pods behind it.
pub(super) const SHOP_PORT: u16 = 80;
const SHOP_TARGET: u16 = 8080;
/// How long a pod answers after it began to end: `lameduck 5s` in kubeadm's CoreDNS.
const LAMEDUCK: Duration = Duration::from_secs(5);
/// The address of the first pod of another node ends in this.
const FIRST: u8 = 31;

/// IPv4 and IPv6 address of a Service, which end in `host`.
pub(super) const fn vips(host: u8) -> [IpAddr; 2] {
    [service4(host), service6(host)]
}

/// Replaces all backends of both Services while the agent is down, then starts the agent.
pub(super) fn replaced(setup: &Setup) -> Result<Vec<Row>> {
    let lab = &setup.lab;
    let all = (0..=setup.size.faults).map(|round| Backends::start(lab, round));
    let mut all = all.collect::<Result<Vec<_>>>()?.into_iter();
    let mut backends = all.next().context("the first pods")?;
    backends.enter(lab)?;
    let mut agent = setup.agent(&setup.agent_options())?;
    let _replica = setup.replica(1)?;
    let load = setup.load()?;
    let connections = Connections::start(setup.clients(), vips(SHOP), SHOP_PORT)?;
    for next in all {
        load.flows()?;
        connections.flow()?;
        agent.kill_9()?;
        next.enter(lab)?;
        std::mem::replace(&mut backends, next).leave(lab)?;
        load.flows()?;
        connections.flow()?;
        agent = lab.start_agent(&setup.agent_options())?;
        lab.proxies_in_step()?;
    }
    load.flows()?;
    connections.flow()?;
    let opened = connections.finish()?;
    let report = load.finish()?;
    let note = format!(
        "{} times; {} connections to the web Service, {} of them failed; {}",
        setup.size.faults,
        opened.tried,
        opened.failed,
        setup.drops()?
    );
    let mut row = Row::none_lost(String::new(), &report, note);
    row.holds &= opened.failed == 0;
    row.samples.extend(opened.samples);
    Ok(vec![row])
}

/// One pod behind each Service, on another node: the agent of this node has no endpoint for it.
struct Backends {
    round: u32,
    nsd: Program,
    _web: Web,
    dns: Pod,
    shop: Pod,
}

impl Backends {
    /// Starts pods with addresses of their own. No Service leads to them yet.
    fn start(lab: &Lab, round: u32) -> Result<Self> {
        let host = FIRST + 2 * u8::try_from(round)?;
        let dns = lab.add_pod(&format!("dns{round}"), host)?;
        let shop = lab.add_pod(&format!("shop{round}"), host + 1)?;
        let (name, records) = (format!("nsd-{round}"), zone::zone_file(&NAMES));
        let addresses = both(&dns);
        let nsd = nsd::start_in(lab, &dns.netns, &name, &addresses, zone::ZONE, &records)?;
        let web = Web::start(&shop.netns, &[], &[SHOP_TARGET], &[])?;
        Ok(Self {
            round,
            nsd,
            _web: web,
            dns,
            shop,
        })
    }

    /// Puts these pods in place of the earlier pods, in the cluster and on the node.
    fn enter(&self, lab: &Lab) -> Result<()> {
        for address in both(&self.dns) {
            let query = Query::a(&zone::name(0), address);
            eventually("a new backend answers", LEAVES, || {
                let reply = lab.node.enter(|| query.send())??;
                reply.expect(zone::v4(0).into())
            })?;
        }
        lab.write_policy("cluster.yaml", &self.documents())?;
        let ports = [
            (DNS, "udp", 53, &self.dns, 53),
            (DNS, "tcp", 53, &self.dns, 53),
            (SHOP, "tcp", SHOP_PORT, &self.shop, SHOP_TARGET),
        ];
        let ports = ports
            .into_iter()
            .flat_map(|(host, protocol, port, pod, target)| {
                let both = vips(host).into_iter().zip(both(pod));
                both.map(move |(vip, backend)| ServicePort {
                    protocol,
                    at: at(vip, port),
                    backends: vec![at(backend, target)],
                })
            });
        service::kube_proxy(lab, &ports.collect::<Vec<_>>())
    }

    /// Ends the pods as Kubernetes does: they answer for a while after kube-proxy sends new flows
    /// elsewhere. kube-proxy removes their flows only when they are gone.
    fn leave(self, lab: &Lab) -> Result<()> {
        thread::sleep(LAMEDUCK);
        let addresses: BTreeSet<IpAddr> = both(&self.dns)
            .into_iter()
            .chain(both(&self.shop))
            .collect();
        let status = self.nsd.terminate(LEAVES)?;
        ensure!(status.success(), "the old DNS server: {status}");
        eventually("no flow leads to the old backends", LEAVES, || {
            flows::forget(lab, &addresses)
        })
    }

    fn documents(&self) -> String {
        let round = self.round;
        let dns = [("dns", "UDP", 53, 53), ("dns-tcp", "TCP", 53, 53)];
        let shop = [("http", "TCP", SHOP_PORT, SHOP_TARGET)];
        let all = [
            ("dns", DNS, &self.dns, dns.as_slice()),
            ("shop", SHOP, &self.shop, &shop),
        ];
        let all = all.into_iter().map(|(name, host, pod, ports)| {
            let list = |target: bool| {
                let ports = ports.iter().map(|(name, protocol, port, to)| {
                    let number = if target { to } else { port };
                    format!("{{name: {name}, protocol: {protocol}, port: {number}}}")
                });
                ports.collect::<Vec<_>>().join(", ")
            };
            let [four, six] = vips(host);
            let [pod4, pod6] = both(pod);
            let slices = [("IPv4", pod4), ("IPv6", pod6)].map(|(family, address)| {
                format!(
                    r#"
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}-{}, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: {family}
endpoints:
- addresses: ["{address}"]
  targetRef: {{kind: Pod, namespace: default, name: {name}-{round}}}
ports: [{}]
"#,
                    family.to_lowercase(),
                    list(true)
                )
            });
            format!(
                r#"
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}-{round}, labels: {{app: {name}}}}}
spec: {{nodeName: other-{round}}}
status: {{phase: Running, podIPs: [{{ip: {pod4}}}, {{ip: "{pod6}"}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec: {{clusterIPs: [{four}, "{six}"], ports: [{}]}}
{}"#,
                list(false),
                slices.concat()
            )
        });
        all.collect()
    }
}

fn both(pod: &Pod) -> [IpAddr; 2] {
    [pod.v4.into(), pod.v6.into()]
}

/// Egress rules of the clients, which select by the labels and ports of the pods behind the
/// Services.
pub(super) fn rules(pattern: &str) -> String {
    format!(
        r#"
- toEndpoints: [{{matchLabels: {{app: dns}}}}]
  toPorts:
  - ports: [{{port: "53", protocol: ANY}}]
    rules: {{dns: [{{matchPattern: "{pattern}"}}]}}
- toEndpoints: [{{matchLabels: {{app: shop}}}}]
  toPorts: [{{ports: [{{port: "{SHOP_TARGET}", protocol: TCP}}]}}]
"#
    )
}
