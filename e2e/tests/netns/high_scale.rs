//! Two nodes that know nothing of each other's pods: the sender's identity comes with its packets.
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::config::program;
use holdfast_e2e::fleet::{DEVICE, Fleet, NODE_ONE, NODE_TWO, with_fleet};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{CLIENT, WEB};
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::shell;
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually};
use shared_maps::event::Reason;
use shared_maps::tunnel::{DEFAULT_PORT, vni_in};

use super::high_scale_migration::with_known_address;

pub(super) const SOON: Duration = Duration::from_secs(10);
pub(super) const NEVER: Duration = Duration::from_millis(1_500);
const OTHER: &str = "k8s:app=other,k8s:io.kubernetes.pod.namespace=default";
pub(super) const PORT: u16 = 8080;
/// Numbers that the documents give to the labels.
pub(super) const OF_WEB: u32 = 4242;
pub(super) const OF_CLIENT: u32 = 7777;
pub(super) const OF_OTHER: u32 = 5151;

pub(super) const POLICY: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client-in, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: client}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
"#;

/// A record of the node names the other pod as refused.
pub(super) fn other_is_recorded(lab: &Lab) -> Result<()> {
    eventually("the record names the other pod", SOON, || {
        let records = lab.agent(&["observe"])?;
        let of_other = format!("remote {OF_OTHER}, ");
        let line = records.lines().find(|line| line.contains(&of_other));
        let line = line.with_context(|| format!("{of_other}: {records}"))?;
        ensure!(line.contains("policy_denied"), "{line}");
        Ok(())
    })
}

/// The same numbers on every node.
pub(super) fn identities() -> String {
    let document = |number, app| {
        format!(
            "---\napiVersion: cilium.io/v2\nkind: CiliumIdentity\nmetadata: {{name: \"{number}\"}}\n\
             security-labels:\n  \"k8s:app\": {app}\n  \"k8s:io.kubernetes.pod.namespace\": default\n"
        )
    };
    document(OF_WEB, "web") + &document(OF_CLIENT, "client") + &document(OF_OTHER, "other")
}

pub(super) fn options(mode: &str) -> AgentOptions {
    AgentOptions::default()
        .flag("--enable-ipv6=false")
        .flag(&format!("--high-scale-ipcache={mode}"))
        .flag(&format!("--high-scale-device={DEVICE}"))
}

/// Blocks outside of the cluster.
const WORLD: &str = "[203.0.113.0/24, 192.0.2.0/24]";

/// An object with blocks outside of the cluster.
pub(super) fn world(name: &str, cidrs: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2alpha1\nkind: CiliumWorldCIDRs\nmetadata: {{name: {name}}}\n\
         spec: {{cidrs: {cidrs}}}\n"
    )
}

/// Tells each node the address of the other one, which unwraps packets.
pub(super) fn other_nodes(fleet: &Fleet<'_>) -> Result<()> {
    for (lab, name, address) in [(fleet.one, "two", NODE_TWO), (fleet.two, "one", NODE_ONE)] {
        lab.write_policy("nodes.yaml", &node(name, address))?;
    }
    Ok(())
}

/// The CiliumNode of a node that unwraps packets.
pub(super) fn node(name: &str, address: Ipv4Addr) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNode\n\
         metadata: {{name: {name}, annotations: {{holdfast.io/high-scale: decap-only}}}}\n\
         spec: {{addresses: [{{type: InternalIP, ip: {address}}}]}}\n"
    )
}

/// The pods of the test: on the first node a web server and another pod, on the second a client, which
/// admits web servers only, and a web server.
pub(super) struct Pods {
    pub(super) web: Pod,
    pub(super) other: Pod,
    pub(super) client: Pod,
    pub(super) near: Pod,
}

pub(super) fn add_pods(fleet: &Fleet<'_>) -> Result<Pods> {
    Ok(Pods {
        web: fleet.pod_of_one("web", 21)?,
        other: fleet.pod_of_one("other", 23)?,
        client: fleet.pod_of_two("client", 22)?,
        near: fleet.pod_of_two("near", 24)?,
    })
}

pub(super) fn documents(lab: &Lab) -> Result<()> {
    lab.write_policy("identities.yaml", &identities())?;
    lab.write_policy("world.yaml", &world("outside", WORLD))?;
    lab.write_policy("in.yaml", POLICY)
}

/// Adds all but `near`: until that is added, the second node has no pod with the web servers' labels.
pub(super) fn add_endpoints(fleet: &Fleet<'_>, pods: &Pods) -> Result<()> {
    for (lab, pod, labels) in [
        (fleet.one, &pods.web, WEB),
        (fleet.one, &pods.other, OTHER),
        (fleet.two, &pods.client, CLIENT),
    ] {
        lab.add_endpoint(pod, labels)?;
    }
    Ok(())
}

pub(super) fn stop(agent: &mut Option<Program>) -> Result<()> {
    let ended = agent.take().context("no agent")?.terminate(SOON)?;
    ensure!(ended.success(), "{ended}");
    Ok(())
}

pub(super) fn connects(from: &Pod, to: SocketAddr, limit: Duration) -> Result<bool> {
    let opened = from
        .netns
        .enter(|| TcpStream::connect_timeout(&to, limit))?;
    Ok(opened.is_ok())
}

/// The client admits the web server by its labels, and not the other pod.
pub(super) fn is_judged(web: &Pod, other: &Pod, client: &Pod) -> Result<()> {
    let to = at(client.v4.into(), PORT);
    eventually("the web server is admitted", SOON, || {
        ensure!(connects(web, to, NEVER)?, "refused");
        Ok(())
    })?;
    ensure!(!connects(other, to, NEVER)?, "the other is admitted");
    Ok(())
}

/// Addresses and VNI of a packet of the tunnel, if it is one and the inner addresses are the same.
pub(super) fn wrapped(frame: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr, u32)> {
    let ip = frame.get(14..).filter(|_| is_ipv4(frame))?;
    let port = u16::from_be_bytes(ip.get(22..24)?.try_into().ok()?);
    if ip.first() != Some(&0x45) || ip.get(9) != Some(&17) || port != DEFAULT_PORT {
        return None;
    }
    let address = |at: usize| {
        let octets: [u8; 4] = ip.get(at..at + 4)?.try_into().ok()?;
        Some(Ipv4Addr::from(octets))
    };
    let (source, destination) = (address(12)?, address(16)?);
    let header: [u8; 8] = ip.get(28..36)?.try_into().ok()?;
    let same = (address(62)?, address(66)?) == (source, destination);
    (same && header[0] == 8).then(|| (source, destination, vni_in(header)))
}

pub(super) fn is_ipv4(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&[8, 0])
}

#[test]
fn high_scale_policy_by_labels_needs_no_address_of_the_other_node_s_pods() {
    with_fleet(|fleet| {
        let pods = add_pods(fleet)?;
        let server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
        for lab in [fleet.one, fleet.two] {
            documents(lab)?;
        }
        other_nodes(fleet)?;
        let _one = fleet.one.start_agent(&options("full"))?;
        let _two = fleet.two.start_agent(&options("full"))?;
        add_endpoints(fleet, &pods)?;
        eventually("both nodes wrap", SOON, || {
            for lab in [fleet.one, fleet.two] {
                let status = lab.agent(&["status"])?;
                ensure!(
                    status.contains("wraps packets of at most 1450 bytes"),
                    "{status}"
                );
                ensure!(status.contains("other nodes known: 1"), "{status}");
                ensure!(!status.contains("PROBLEM"), "{status}");
            }
            Ok(())
        })?;
        let wire = RawFrames::open(fleet.router())?;
        let to = at(pods.client.v4.into(), PORT);
        ensure!(connects(&pods.web, to, SOON)?, "the web server is refused");
        eventually("the visit is counted", SOON, || {
            ensure!(server.visits(to) == 1, "{} visits", server.visits(to));
            Ok(())
        })?;
        ensure!(
            !connects(&pods.other, to, NEVER)?,
            "the other pod is admitted"
        );
        let mut seen = BTreeSet::new();
        let mut plain = 0;
        while let Some(frame) = wire.next(Duration::from_millis(200))? {
            match wrapped(&frame) {
                Some(packet) => drop(seen.insert(packet)),
                None if is_ipv4(&frame) => plain += 1,
                None => {}
            }
        }
        let (web, other, client) = (pods.web.v4, pods.other.v4, pods.client.v4);
        let expected = [
            (web, client, OF_WEB),
            (client, web, OF_CLIENT),
            (other, client, OF_OTHER),
        ];
        assert_eq!(seen, BTreeSet::from(expected), "on the wire");
        assert_eq!(plain, 0, "packets between pods that are not wrapped");
        other_is_recorded(fleet.two)?;
        ensure!(
            !fleet.two.is_plumbed(web.into())?,
            "an ipcache entry of the other node's pod"
        );

        let sources = maps(fleet.two, "sources")?;
        let of_web = format!("{}", pods.web.v4);
        let line = sources.lines().find(|line| line.starts_with(&of_web));
        let line = line.with_context(|| format!("no source {of_web}: {sources}"))?;
        ensure!(line.contains(&OF_WEB.to_string()), "{line}");
        let blocks = maps(fleet.two, "world")?;
        ensure!(blocks.contains("203.0.113.0/24"), "{blocks}");

        // Between pods of one node, and to the world, nothing is wrapped.
        fleet.two.add_endpoint(&pods.near, WEB)?;
        let before = fleet.two.counted(Reason::Wrapped)?;
        ensure!(
            connects(&pods.near, to, SOON)?,
            "a web server of the same node"
        );
        let outside = at(web4(10), 80);
        let _refused = connects(&pods.near, outside, NEVER)?;
        assert_eq!(fleet.two.counted(Reason::Wrapped)?, before, "wrapped");
        Ok(())
    });
}

/// Whether packets of a new connection are wrapped.
pub(super) fn wraps(fleet: &Fleet<'_>, pods: &Pods, to: SocketAddr) -> Result<bool> {
    let before = fleet.one.counted(Reason::Wrapped)?;
    ensure!(connects(&pods.web, to, SOON)?, "no connection");
    Ok(fleet.one.counted(Reason::Wrapped)? > before)
}

#[test]
fn high_scale_full_wraps_nothing_while_the_blocks_outside_are_unknown() {
    with_fleet(|fleet| {
        let pods = add_pods(fleet)?;
        let _server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
        let to = at(pods.client.v4.into(), PORT);
        with_known_address(fleet, &pods)?;
        fleet.one.remove_policy("world.yaml")?;
        let _one = fleet.one.start_agent(&options("full"))?;
        let _two = fleet.two.start_agent(&options("full"))?;
        add_endpoints(fleet, &pods)?;
        let says = |text: &str| {
            eventually(text, SOON, || {
                let status = fleet.one.agent(&["status"])?;
                ensure!(status.contains(text), "{status}");
                Ok(())
            })
        };
        says("wraps nothing, because no CiliumWorldCIDRs object is in force")?;
        assert!(!wraps(fleet, &pods, to)?, "without an object");
        // A list that cannot be read is no list.
        for (bad, field) in [
            ("[203.0.113.0/33]", "spec.cidrs[0]: `203.0.113.0/33`"),
            (
                "[203.0.113.0/24, \"2001:db8::/32\"]",
                "spec.cidrs[1]: `2001:db8::/32` is a block of IPv6; remove it",
            ),
            ("203.0.113.0/24", "spec.cidrs: "),
        ] {
            fleet
                .one
                .write_policy("world.yaml", &world("outside", bad))?;
            // The file, the object and the field.
            says(&format!("world.yaml (CiliumWorldCIDRs/outside): {field}"))?;
            let status = fleet.one.agent_json(&["status"])?;
            let refused = &status["summary"]["refused"][0];
            assert_eq!(refused["key"], "CiliumWorldCIDRs/outside", "{status}");
            assert!(!wraps(fleet, &pods, to)?, "{bad}");
        }
        fleet
            .one
            .write_policy("world.yaml", &world("outside", WORLD))?;
        says("wraps packets of at most 1450 bytes; 2 blocks outside of the cluster")?;
        assert!(wraps(fleet, &pods, to)?, "with an object");
        // The last good list stays in force.
        let bad = WORLD.replace("203.0.113.0/24", "203.0.113.0/33");
        fleet
            .one
            .write_policy("world.yaml", &world("outside", &bad))?;
        says("world.yaml (CiliumWorldCIDRs/outside): spec.cidrs[0]: `203.0.113.0/33`")?;
        assert!(wraps(fleet, &pods, to)?, "with the last good list");
        fleet.one.remove_policy("world.yaml")?;
        says("wraps nothing, because no CiliumWorldCIDRs object is in force")?;
        assert!(!wraps(fleet, &pods, to)?, "the object is gone");
        Ok(())
    });
}

/// The text of `bpf … list`, which needs no agent.
pub(super) fn maps(lab: &Lab, map: &str) -> Result<String> {
    let mut command = lab
        .node
        .command(&program("holdfast-agent")?.display().to_string());
    command.args(["bpf", map, "list", "--bpf-root"]);
    shell::finish(command.arg(lab.bpf_root()))
}

/// What an agent says that does not start.
pub(super) fn refused(lab: &Lab, mode: &str) -> Result<String> {
    let output = lab.agent_command(&options(mode))?.output()?;
    ensure!(!output.status.success(), "it started and ended");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn high_scale_steps_are_not_left_out() {
    with_fleet(|fleet| {
        documents(fleet.one)?;
        let unset = AgentOptions::default().flag("--enable-ipv6=false");
        let mut one = Some(fleet.one.start_agent(&unset)?);
        stop(&mut one)?;
        let error = refused(fleet.one, "full")?;
        ensure!(
            error.contains("this node was unset, and off comes before full"),
            "{error}"
        );
        one = Some(
            fleet
                .one
                .start_agent(&options("full").flag("--high-scale-force=true"))?,
        );
        stop(&mut one)?;
        one = Some(
            fleet
                .one
                .start_agent(&options("full").flag("--high-scale-prune=true"))?,
        );
        stop(&mut one)?;
        let error = refused(fleet.one, "decap-only")?;
        ensure!(
            error.contains("this node was pruned, and full comes before decap-only"),
            "{error}"
        );
        Ok(())
    });
}
