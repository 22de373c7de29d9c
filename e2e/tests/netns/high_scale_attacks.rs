//! What happens to the tunnel when agents are killed, when its device or its state is taken away, when a second agent
//! comes, and when a node leaves.
use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::config::program;
use holdfast_e2e::fleet::{Fleet, with_fleet};
use holdfast_e2e::lab::at;
use holdfast_e2e::policy::CLIENT;
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::shell;
use holdfast_e2e::web::Web;
use holdfast_e2e::{Lab, Program, eventually};

use super::high_scale::{
    NEVER, PORT, Pods, SOON, add_endpoints, add_pods, connects, documents, is_ipv4, options,
    refused, stop, wrapped, wraps,
};
use super::high_scale_migration::{Traffic, echo};
use super::high_scale_traffic::seen;

/// Agents of both nodes, and the client's server.
struct Nodes {
    pods: Pods,
    one: Option<Program>,
    two: Option<Program>,
    _server: Web,
}

fn start(fleet: &Fleet<'_>) -> Result<Nodes> {
    let pods = add_pods(fleet)?;
    let server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
    for lab in [fleet.one, fleet.two] {
        documents(lab)?;
    }
    let forced = options("full").flag("--high-scale-force=true");
    let one = Some(fleet.one.start_agent(&forced)?);
    let two = Some(fleet.two.start_agent(&forced)?);
    add_endpoints(fleet, &pods)?;
    for lab in [fleet.one, fleet.two] {
        lab.status_has(SOON, &["wraps packets of at most 1450 bytes"])?;
    }
    Ok(Nodes {
        pods,
        one,
        two,
        _server: server,
    })
}

/// The web server is admitted and the other pod is not.
fn is_judged(pods: &Pods) -> Result<()> {
    super::high_scale::is_judged(&pods.web, &pods.other, &pods.client)
}

fn cleanup(lab: &Lab) -> Result<()> {
    let program = program("holdfast-agent")?;
    let mut command = lab.node.command(&program.display().to_string());
    command.args(["cleanup", "--bpf-root"]).arg(lab.bpf_root());
    command
        .arg("--state-dir")
        .arg(lab.directory().join("state"));
    command.arg("--cni-conf-dir").arg(lab.directory());
    shell::finish(&mut command)?;
    Ok(())
}

fn is_from(frame: &[u8], source: Ipv4Addr) -> bool {
    frame.get(26..30) == Some(&source.octets())
}

fn has_device(lab: &Lab) -> Result<bool> {
    let links = lab.node.run("ip", &["-o", "link"])?;
    Ok(links.contains("hf_vxlan:"))
}

#[test]
fn high_scale_agents_killed_under_traffic_lose_no_connection() {
    with_fleet(|fleet| {
        let mut nodes = start(fleet)?;
        let pods = &nodes.pods;
        echo(&pods.client)?;
        let to = at(pods.client.v4.into(), PORT);
        let traffic = Traffic::start(&pods.web, pods.client.v4)?;
        for _ in 0..2 {
            for (lab, agent) in [(fleet.one, &mut nodes.one), (fleet.two, &mut nodes.two)] {
                agent.take().expect("it runs").kill_9()?;
                ensure!(connects(&pods.web, to, SOON)?, "without an agent");
                ensure!(!connects(&pods.other, to, NEVER)?, "open without an agent");
                *agent = Some(lab.start_agent(&options("full"))?);
                is_judged(pods)?;
            }
        }
        ensure!(wraps(fleet, pods, to)?, "packets are not wrapped any more");
        traffic.end()
    });
}

#[test]
fn high_scale_the_tunnel_s_device_comes_back_and_nothing_is_plain_meanwhile() {
    with_fleet(|fleet| {
        let nodes = start(fleet)?;
        let pods = &nodes.pods;
        is_judged(pods)?;
        for lab in [fleet.one, fleet.two] {
            let wire = RawFrames::open(fleet.router())?;
            lab.node.batch("link delete hf_vxlan")?;
            eventually("the device is made again", SOON, || {
                ensure!(has_device(lab)?, "no hf_vxlan");
                Ok(())
            })?;
            is_judged(pods)?;
            let (wrapped, plain) = seen(&wire)?;
            ensure!(
                wrapped > 0 && plain == 0,
                "{wrapped} wrapped, {plain} plain"
            );
        }
        drop(nodes);
        Ok(())
    });
}

#[test]
fn high_scale_a_second_agent_with_another_mode_changes_nothing() {
    with_fleet(|fleet| {
        let nodes = start(fleet)?;
        let second = options("off").flag("--high-scale-force=true");
        let output = fleet.one.agent_command(&second)?.output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success(), "a second agent started");
        ensure!(error.contains("another agent (pid"), "{error}");
        is_judged(&nodes.pods)?;
        let to = at(nodes.pods.client.v4.into(), PORT);
        ensure!(
            wraps(fleet, &nodes.pods, to)?,
            "packets are not wrapped any more"
        );
        drop(nodes);
        Ok(())
    });
}

#[test]
fn high_scale_a_lost_stage_is_named_and_the_tunnel_goes_on_meanwhile() {
    with_fleet(|fleet| {
        let mut nodes = start(fleet)?;
        let file = fleet.one.directory().join("state/state/high_scale.json");
        stop(&mut nodes.one)?;
        fs::remove_file(&file)?;
        let error = refused(fleet.one, "full")?;
        ensure!(
            error.contains("this node was unset, and off comes before full"),
            "{error}"
        );
        ensure!(error.contains("--high-scale-force"), "{error}");
        is_judged(&nodes.pods)?;
        let forced = options("full").flag("--high-scale-force=true");
        nodes.one = Some(fleet.one.start_agent(&forced)?);
        is_judged(&nodes.pods)?;
        ensure!(file.exists(), "the stage is not written again");
        drop(nodes);
        Ok(())
    });
}

#[test]
fn high_scale_a_node_that_leaves_gets_no_plain_packets_and_leaves_nothing() {
    with_fleet(|fleet| {
        let mut nodes = start(fleet)?;
        let pods = &nodes.pods;
        let to = at(pods.client.v4.into(), PORT);
        is_judged(pods)?;
        stop(&mut nodes.two)?;
        cleanup(fleet.two)?;
        ensure!(!has_device(fleet.two)?, "cleanup leaves hf_vxlan");
        for name in agent_datapath::tunnel::PINS {
            ensure!(!fleet.two.pin(name).exists(), "cleanup leaves {name}");
        }
        // The first node still wraps, and no program unwraps there.
        let wire = RawFrames::open(fleet.router())?;
        ensure!(!connects(&pods.web, to, NEVER)?, "who unwraps?");
        let mut count = 0;
        while let Some(frame) = wire.next(Duration::from_millis(200))? {
            let is_plain = is_ipv4(&frame) && wrapped(&frame).is_none();
            // The client's kernel answers that its port 8472 is closed.
            ensure!(!is_plain || !is_from(&frame, pods.web.v4), "a plain packet");
            count += u32::from(wrapped(&frame).is_some());
        }
        ensure!(count > 0, "no packet is wrapped");
        // It comes back.
        nodes.two = Some(
            fleet
                .two
                .start_agent(&options("full").flag("--high-scale-force=true"))?,
        );
        fleet.two.add_endpoint(&pods.client, CLIENT)?;
        is_judged(pods)?;
        drop(nodes);
        Ok(())
    });
}
