//! An attachment of an endpoint's programs that ends halfway: nothing is open for the endpoint,
//! nothing is lost, and the next agent completes the attachment.
use std::fs;
use std::process::Command;
use std::time::Duration;

use agent_core::datapath::plan::{Datapath, Step, StepError};
use agent_datapath::{
    closed::{ClosedInterfaces, DocumentHash, Gate as _, Why},
    kernel::{KernelConfig, KernelDatapath},
    program::Programs,
    unclaimed::ClosedNames,
};
use anyhow::{Context as _, Result};
use aya::programs::links::{FdLink, PinnedLink};
use holdfast_e2e::kernel::{ENDPOINT, attachment, config, with_kernel};
use holdfast_e2e::until;
use nix::net::if_::if_nametoindex;
use shared_maps::pin;
use shared_maps::policy::{self, PolicyKey, PolicyValue};
use shared_maps::steering::LINK_NAME;
use shared_maps::user::{Direction, Globals, Map, MapKind, program_name, tcx_chain};

/// Key of the endpoint's document.
const KEY: &str = "dir/pod.yaml";

struct NoFiles;

impl Datapath for NoFiles {
    fn apply(&mut self, _step: &Step) -> Result<(), StepError> {
        Ok(())
    }
}

/// Makes a pair of interfaces. Returns the index of the host side.
fn pair() -> Result<u32> {
    let arguments = "link add hf0 type veth peer name hf1".split(' ');
    let status = Command::new("ip").args(arguments).status()?;
    anyhow::ensure!(status.success(), "ip: {status}");
    Ok(if_nametoindex("hf0")?)
}

/// Names of the programs at an interface, in the order in which they see packets.
fn programs(ifindex: u32, direction: Direction) -> Result<Vec<String>> {
    let chain = tcx_chain(ifindex, direction)?;
    let names = chain.iter().map(|attached| program_name(attached.program));
    Ok(names.collect::<Result<_, _>>()?)
}

#[test]
fn an_attach_that_ends_between_its_links_leaves_the_interface_closed_until_the_next_agent_ends_it()
{
    with_kernel(|k| {
        let ifindex = pair()?;
        let root = k.globals().root().to_owned();
        let own = root.join(pin::LINKS).join(ENDPOINT.0.to_string());
        let gate_of = |datapath: &KernelDatapath| {
            ClosedInterfaces::new(
                datapath.programs().clone(),
                Globals::new(&root),
                ClosedNames::default(),
            )
        };
        let mut gate = gate_of(k.datapath());
        gate.close(KEY, ifindex, Why::NotFound)?;
        // The second link cannot be made: a link of another kind is pinned in its place.
        let in_the_way = own.join(format!("from_pod_{ifindex}"));
        fs::create_dir_all(&own)?;
        FdLink::from(PinnedLink::from_pin(root.join(pin::LINKS).join(LINK_NAME))?)
            .pin(&in_the_way)?;
        let attach = Step::Attach(attachment(ifindex));
        let failed = k
            .datapath()
            .apply(&attach)
            .err()
            .context("it was attached")?;
        assert!(failed.to_string().contains("from_pod"), "{failed}");
        assert_eq!(programs(ifindex, Direction::Ingress)?, ["closed"]);
        assert_eq!(programs(ifindex, Direction::Egress)?, ["to_pod", "closed"]);
        assert!(!gate.is_under_policy(ifindex));

        // The agent is killed at this point. Its successor finds the interface closed, and
        // completes the work.
        fs::remove_file(&in_the_way)?;
        let mut next = KernelDatapath::prepare(&config(&root, true), Box::new(NoFiles))?;
        let mut gate = gate_of(&next);
        let closed = gate.closed()?;
        let interfaces = closed.get(&DocumentHash::of(KEY)).context("not closed")?;
        assert_eq!(interfaces.get(&ifindex), Some(&Why::NotFound));
        gate.close(KEY, ifindex, Why::NotFound)?;
        assert_eq!(programs(ifindex, Direction::Ingress)?, ["closed"]);
        assert_eq!(next.attached()?, [ENDPOINT]);
        next.apply(&Step::CreatePolicyMap(ENDPOINT))?;
        next.apply(&attach)?;
        assert!(gate.is_under_policy(ifindex));
        // The kernel removes a link without a pin some time later.
        let all = || -> Result<[Vec<String>; 2]> {
            Ok([
                programs(ifindex, Direction::Ingress)?,
                programs(ifindex, Direction::Egress)?,
            ])
        };
        until(
            "only the programs are there",
            Duration::from_secs(5),
            all,
            |seen| *seen == [vec!["from_pod".to_owned()], vec!["to_pod".to_owned()]],
        )?;
        assert!(gate.closed()?.is_empty());
        Ok(())
    });
}

#[test]
fn a_filter_that_takes_the_place_of_a_link_is_the_first_while_the_kernel_still_has_the_link() {
    with_kernel(|k| {
        let ifindex = pair()?;
        let attach = Step::Attach(attachment(ifindex));
        k.datapath().apply(&attach)?;
        assert_eq!(programs(ifindex, Direction::Ingress)?, ["from_pod"]);
        // A second name holds each link. Without it, a busy kernel has the link for a while.
        let root = k.globals().root().to_owned();
        let own = root.join(pin::LINKS).join(ENDPOINT.0.to_string());
        for name in ["from_pod", "to_pod"] {
            fs::hard_link(own.join(format!("{name}_{ifindex}")), root.join(name))?;
        }
        let without_tcx = KernelConfig {
            tcx: false,
            ..config(&root, true)
        };
        let mut next = KernelDatapath::prepare(&without_tcx, Box::new(NoFiles))?;
        next.apply(&Step::CreatePolicyMap(ENDPOINT))?;
        next.apply(&attach)?;
        for direction in [Direction::Ingress, Direction::Egress] {
            assert_eq!(tcx_chain(ifindex, direction)?, []);
        }
        let faults = Programs::faults(&k.globals(), ENDPOINT, ifindex, None);
        assert_eq!(faults, []);
        Ok(())
    });
}

#[test]
fn settings_that_cannot_be_written_take_no_place_of_later_endpoints() {
    with_kernel(|k| {
        let ifindex = pair()?;
        let programs = k.datapath().programs().clone();
        // Policy maps are tries: the kernel refuses any other map in a slot.
        let other: Map<PolicyKey, PolicyValue> =
            Map::create("hf_test", MapKind::Hash, 16, policy::FLAGS)?;
        let failed = programs.attach(&attachment(ifindex), &other).err();
        let failed = failed.context("it was attached")?;
        let lost = || Ok(programs.lost_slots()?);
        until(
            &format!("nothing is lost ({failed})"),
            Duration::from_secs(5),
            lost,
            |lost| *lost == 0,
        )?;
        // The failure has changed nothing, and the next settings are accepted.
        k.datapath().apply(&Step::Attach(attachment(ifindex)))?;
        assert!(programs.has_settings(ENDPOINT)?);
        until("nothing is lost", Duration::from_secs(5), lost, |lost| {
            *lost == 0
        })?;
        Ok(())
    });
}
