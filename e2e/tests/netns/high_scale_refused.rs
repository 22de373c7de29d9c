//! Settings, devices and documents with which the tunnel between nodes cannot work: the agent says what is wrong, where, and what to do.
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::config::program;
use holdfast_e2e::fleet::{DEVICE, with_fleet};
use holdfast_e2e::lab::{at, with_lab};
use holdfast_e2e::policy::WEB;
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, eventually};

use super::high_scale::{
    PORT, SOON, add_endpoints, add_pods, documents, identities, maps, options, other_nodes, stop,
    world, wraps,
};
use super::high_scale_migration::with_known_address;

/// A list of this many blocks is read, written and followed in this time.
const LONG: Duration = Duration::from_secs(30);

/// What `holdfast-agent run` prints when it refuses to start.
fn refusal(mut command: Command) -> Result<String> {
    let output = command.output()?;
    ensure!(!output.status.success(), "it started and ended");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Flags that every agent of the tunnel has. The device is left out.
fn mode(mode: &str) -> AgentOptions {
    AgentOptions::default()
        .flag("--enable-ipv6=false")
        .flag(&format!("--high-scale-ipcache={mode}"))
}

/// A command without documents.
fn without_documents(lab: &Lab) -> Result<Command> {
    let mut command = lab
        .node
        .command(&program("holdfast-agent")?.display().to_string());
    command.arg("run");
    command.arg("--bpf-root").arg(lab.bpf_root());
    command
        .arg("--state-dir")
        .arg(lab.directory().join("state"));
    command.args(["--enable-ipv6=false", "--high-scale-ipcache=full"]);
    command.arg(format!("--high-scale-device={DEVICE}"));
    Ok(command)
}

#[test]
fn high_scale_settings_that_cannot_work_are_refused_with_a_remedy() {
    with_lab(|lab| {
        let says = |what: &str, command: Command, words: &[&str]| -> Result<()> {
            let error = refusal(command)?;
            for word in words {
                ensure!(error.contains(word), "{what}: {error}");
            }
            Ok(())
        };
        says(
            "IPv6 is on",
            lab.agent_command(&AgentOptions::default().flag("--high-scale-ipcache=off"))?,
            &[
                "--high-scale-ipcache: carries IPv4 only; add --enable-ipv6=false, with which policy of IPv6 is not enforced",
            ],
        )?;
        says(
            "neither identities of the cluster nor documents",
            without_documents(lab)?,
            &[
                "--high-scale-ipcache: full needs numbers",
                "--identity-allocation=cluster",
                "--policy-dir",
            ],
        )?;
        let named = |name: &str| mode("full").flag(&format!("--high-scale-device={name}"));
        says(
            "no such device",
            lab.agent_command(&named("up9"))?,
            &["--high-scale-device up9: there is no such device; name one that `ip link` lists"],
        )?;
        lab.node.batch("tuntap add dev tun9 mode tun")?;
        says(
            "no Ethernet",
            lab.agent_command(&named("tun9"))?,
            &[
                "--high-scale-device tun9: not an Ethernet device",
                "name the Ethernet device",
            ],
        )?;
        lab.node
            .batch("link add flannel.1 type vxlan id 1 dstport 8472")?;
        for wraps in ["decap-only", "full"] {
            says(
                "the port of another device",
                lab.agent_command(&mode(wraps).flag(&format!("--high-scale-device={DEVICE}")))?,
                &[
                    "--tunnel-port 8472: the VXLAN device flannel.1 uses this port; choose another port, the same one on all nodes",
                ],
            )?;
        }
        // Nothing of the tunnel is there, and the agent starts as the message says.
        let links = lab.node.run("ip", &["-o", "link"])?;
        ensure!(!links.contains("hf_vxlan"), "{links}");
        let other_port = named(DEVICE).flag("--tunnel-port=8473");
        let mut agent = Some(lab.start_agent(&other_port)?);
        lab.status_has(SOON, &["full, on up0, UDP port 8473"])?;
        stop(&mut agent)?;
        lab.node.batch("route delete default via 192.0.2.2")?;
        says(
            "no default route",
            lab.agent_command(&mode("full"))?,
            &[
                "--high-scale-device: is absent, and there is no default route of IPv4; name a device",
            ],
        )
    });
}

#[test]
fn high_scale_a_device_that_goes_or_a_port_that_is_taken_later_is_named() {
    with_lab(|lab| {
        documents(lab)?;
        lab.node
            .batch("link add up8 type veth peer name far8\nlink set up8 up")?;
        let options = options("full").flag("--high-scale-device=up8");
        let _agent = lab.start_agent(&options)?;
        lab.status_has(SOON, &["full, on up0, up8, UDP port 8472"])?;
        lab.node.batch("link delete up8")?;
        lab.status_has(
            SOON,
            &["the tunnel between nodes: --high-scale-device up8: there is no such device"],
        )?;
        lab.node
            .batch("link add up8 type veth peer name far8\nlink set up8 up")?;
        let recovers = || {
            eventually("no fault is left", SOON, || {
                let status = lab.agent(&["status"])?;
                ensure!(!status.contains("--high-scale-device"), "{status}");
                ensure!(!status.contains("--tunnel-port"), "{status}");
                Ok(())
            })
        };
        recovers()?;
        lab.node
            .batch("link add flannel.1 type vxlan id 1 dstport 8472 dev up0")?;
        lab.status_has(
            SOON,
            &["the tunnel between nodes: --tunnel-port 8472: the VXLAN device flannel.1 uses this port"],
        )?;
        lab.node.batch("link delete flannel.1")?;
        recovers()
    });
}

/// Blocks of one address each.
fn blocks(count: u32) -> String {
    let blocks = (0..count).map(|number| {
        let [_, _, a, b] = number.to_be_bytes();
        format!("203.1.{a}.{b}/32")
    });
    format!("[{}]", blocks.collect::<Vec<_>>().join(", "))
}

#[test]
fn high_scale_too_many_blocks_outside_are_refused_whole() {
    with_fleet(|fleet| {
        let pods = add_pods(fleet)?;
        let _server = Web::start(&pods.client.netns, &[pods.client.v4.into()], &[PORT], &[])?;
        let to = at(pods.client.v4.into(), PORT);
        with_known_address(fleet, &pods)?;
        other_nodes(fleet)?;
        // One object with too many is refused, and so is none: nothing is wrapped.
        fleet
            .one
            .write_policy("world.yaml", &world("outside", &blocks(16_385)))?;
        let _one = fleet.one.start_agent(&options("full"))?;
        let _two = fleet.two.start_agent(&options("full"))?;
        add_endpoints(fleet, &pods)?;
        let says = |texts: &[&str]| fleet.one.status_has(LONG, texts);
        says(&[
            "world.yaml (CiliumWorldCIDRs/outside): spec.cidrs: has 16385 blocks, more than 16384; write wider blocks",
            "wraps nothing, because no CiliumWorldCIDRs object is in force",
        ])?;
        assert!(!wraps(fleet, &pods, to)?, "with a refused list");
        // Two objects that have too many together.
        fleet
            .one
            .write_policy("world.yaml", &world("outside", &blocks(16_384)))?;
        let more = world("more", "[198.51.100.0/24]");
        fleet.one.write_policy("more.yaml", &more)?;
        let too_many =
            "CiliumWorldCIDRs: 16385 blocks are more than 16384, so that none of them is used";
        says(&[too_many])?;
        fleet.one.remove_policy("more.yaml")?;
        says(&["wraps packets of at most 1450 bytes; 16384 blocks outside of the cluster"])?;
        assert!(wraps(fleet, &pods, to)?, "with as many as fit");
        fleet.one.write_policy("more.yaml", &more)?;
        says(&[
            too_many,
            "and the list before stays in force; write wider blocks",
        ])?;
        let listed = maps(fleet.one, "world")?;
        ensure!(!listed.contains("198.51.100.0/24"), "a part is in force");
        let count = listed.lines().filter(|line| line.contains("/32")).count();
        ensure!(count == 16_384, "{count} blocks");
        assert!(wraps(fleet, &pods, to)?, "with the last good list");
        Ok(())
    });
}

#[test]
fn high_scale_pods_without_a_number_of_all_nodes_are_named() {
    with_lab(|lab| {
        documents(lab)?;
        lab.remove_policy("identities.yaml")?;
        let _agent = lab.start_agent(&options("full"))?;
        lab.add_endpoint(&lab.a, WEB)?;
        let carries = "packets of 1 endpoints of this node carry reserved:init, because no CiliumIdentity has their labels";
        lab.status_has(SOON, &[carries, "`holdfast-agent identity assign`"])?;
        lab.write_policy("identities.yaml", &identities())?;
        eventually("the pod has a number of all nodes", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(!status.contains("reserved:init"), "{status}");
            Ok(())
        })
    });
}

#[test]
fn high_scale_a_damaged_note_of_the_last_step_is_named_and_set_aside() {
    with_lab(|lab| {
        documents(lab)?;
        let mut agent = Some(lab.start_agent(&options("decap-only"))?);
        stop(&mut agent)?;
        let file = lab.directory().join("state/state/high_scale.json");
        let golden = std::fs::read_to_string(&file).context("the note of the last step")?;
        std::fs::write(&file, "{")?;
        let error = refusal(lab.agent_command(&options("full"))?)?;
        for word in [
            "this node was unset (",
            "high_scale.json.corrupt",
            "off comes before full",
        ] {
            ensure!(error.contains(word), "{error}");
        }
        // The same step again, by force: the file was not lost, and is one again.
        std::fs::write(&file, "{")?;
        let forced = options("decap-only").flag("--high-scale-force=true");
        let mut agent = Some(lab.start_agent(&forced)?);
        lab.status_has(SOON, &["high_scale.json.corrupt"])?;
        stop(&mut agent)?;
        assert_eq!(std::fs::read_to_string(&file)?, golden);
        std::fs::write(&file, golden.replace(": 1", ": 2"))?;
        let error = refusal(lab.agent_command(&options("decap-only"))?)?;
        ensure!(error.contains("run the newer release"), "{error}");
        Ok(())
    });
}
