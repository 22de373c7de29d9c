//! The agent's side: maps, pins and links, replaced without a gap.
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Barrier;
use std::time::Duration;

use agent_core::datapath::plan::{Datapath, Step, StepError};
use agent_datapath::kernel::KernelDatapath;
use anyhow::{Context as _, Result};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{SchedClassifier, TcAttachType};
use daemon::steering_program;
use holdfast_agent::restore::policy_maps;
use holdfast_e2e::kernel::{ENDPOINT, attachment, config, with_kernel};
use holdfast_e2e::until;
use nix::fcntl::{Flock, FlockArg};
use nix::net::if_::if_nametoindex;
use shared_maps::pin;
use shared_maps::policy::{EGRESS, PolicyKey, PolicyValue};
use shared_maps::steering::{LINK_NAME, SLOTS_NAME, SOCKS_NAME};
use shared_maps::user::{Map, MapKind};

struct NoFiles;

impl Datapath for NoFiles {
    fn apply(&mut self, _step: &Step) -> Result<(), StepError> {
        Ok(())
    }
}

/// Runs `ip`; the child is in the namespace of the thread that starts it.
fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status()?;
    anyhow::ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

/// Numbers of the programs on an interface.
fn attached(interface: &str) -> Result<BTreeSet<u32>> {
    let mut ids = BTreeSet::new();
    for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
        let (_revision, programs) = SchedClassifier::query_tcx(interface, direction)?;
        ids.extend(programs.iter().map(|program| program.id()));
    }
    Ok(ids)
}

#[test]
fn attach_replace_detach() {
    with_kernel(|k| {
        ip("link add hf0 type veth peer name hf1")?;
        let ifindex = if_nametoindex("hf0")?;
        let root = k.globals().root().to_owned();
        let links = root.join(pin::LINKS);
        let names = |dir: PathBuf| -> Result<BTreeSet<String>> {
            fs::read_dir(dir)?
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect()
        };
        k.datapath().apply(&Step::Attach(attachment(ifindex)))?;
        let own = links.join(ENDPOINT.0.to_string());
        let expected = [format!("from_pod_{ifindex}"), format!("to_pod_{ifindex}")];
        assert_eq!(names(own.clone())?, expected.clone().into());
        assert!(links.join(LINK_NAME).exists());
        let first = attached("hf0")?;
        assert_eq!(first.len(), 2);

        // As after a restart of the agent: a policy that was set before is still in force.
        let key = PolicyKey::new(1, EGRESS, 6, 80, 16);
        k.policy(key, PolicyValue::allow(key))?;
        let mut again = KernelDatapath::prepare(&config(&root, true), Box::new(NoFiles))?;
        assert_eq!(again.attached()?, [ENDPOINT]);
        assert_eq!(policy_maps(&k.globals())?, [ENDPOINT]);
        again.apply(&Step::CreatePolicyMap(ENDPOINT))?;
        assert_eq!(
            k.globals()
                .policy(ENDPOINT, shared_maps::user::Access::ReadOnly)?
                .get(&key)?,
            Some(PolicyValue::allow(key))
        );
        again.apply(&Step::Attach(attachment(ifindex)))?;
        assert_eq!(names(own.clone())?, expected.into());
        let second = attached("hf0")?;
        assert_eq!(second.len(), 2, "replaced, not added to");
        assert!(first.is_disjoint(&second));

        // The interface is created again, so the old links are dead.
        ip("link del hf0")?;
        ip("link add hf0 type veth peer name hf1")?;
        let ifindex = if_nametoindex("hf0")?;
        again.apply(&Step::Attach(attachment(ifindex)))?;
        assert_eq!(attached("hf0")?.len(), 2);
        assert_eq!(
            names(own.clone())?.len(),
            2,
            "pins of the old interface are gone"
        );

        again.apply(&Step::Detach(ENDPOINT))?;
        // The kernel removes an unreferenced link after some time.
        let programs = || attached("hf0");
        let limit = Duration::from_secs(5);
        until("no program attached", limit, programs, |seen| {
            seen.is_empty()
        })?;
        assert!(!own.exists());
        again.apply(&Step::RemovePolicyMap(ENDPOINT))?;
        assert!(policy_maps(&k.globals())?.is_empty());
        again.apply(&Step::Detach(ENDPOINT))?;
        again.apply(&Step::RemovePolicyMap(ENDPOINT))?;
        Ok(())
    });
}

#[test]
fn a_dead_link_is_replaced_under_its_own_pin() {
    with_kernel(|k| {
        let add = "link add hf0 index 4711 type veth peer name hf1";
        ip(add)?;
        k.datapath().apply(&Step::Attach(attachment(4711)))?;
        let dir = k.globals().root().join(pin::LINKS);
        let dir = dir.join(ENDPOINT.0.to_string());
        ip("link del hf0")?;
        ip(add)?;
        assert!(attached("hf0")?.is_empty());
        // The state that an agent leaves if it is killed between the two halves of a replacement.
        let left = dir.join("from_pod_4711_next");
        PinnedLink::from_pin(dir.join("from_pod_4711"))?
            .unpin()?
            .pin(&left)?;
        k.datapath().apply(&Step::Attach(attachment(4711)))?;
        assert_eq!(attached("hf0")?.len(), 2);
        assert!(!left.exists());
        assert_eq!(fs::read_dir(&dir)?.count(), 2);
        Ok(())
    });
}

/// The start of a proxy under another agent.
#[test]
fn steering_is_provided_where_something_is_missing() {
    with_kernel(|k| {
        let globals = &k.globals();
        let link = steering_program::link_pin(globals);
        let steers = || -> Result<u32> {
            let link = FdLink::from(PinnedLink::from_pin(&link)?);
            Ok(link.info()?.program_id())
        };
        let first = steers()?;
        steering_program::provide(globals, 0)?;
        assert_eq!(steers()?, first, "all is there: it stays");

        for name in [SLOTS_NAME, SOCKS_NAME] {
            fs::remove_file(globals.path(name))?;
        }
        steering_program::provide(globals, 0)?;
        let second = steers()?;
        assert_ne!(second, first, "it used maps without pins");
        steering_program::provide(globals, 0)?;
        assert_eq!(steers()?, second);

        fs::remove_file(&link)?;
        // Every user that may open the directory can lock it.
        let dir = fs::File::open(globals.root().join(pin::LINKS))?;
        let _locked = Flock::lock(dir, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
        steering_program::provide(globals, 0)?;
        steers()?;
        Ok(())
    });
}

#[test]
fn processes_that_make_a_map_at_once_get_the_same() {
    with_kernel(|k| {
        let start = Barrier::new(8);
        for round in 0..20 {
            let path = k.globals().path(&format!("hf_test_{round}"));
            let make = || {
                start.wait();
                Map::<u32, u32>::open_or_create(&path, MapKind::Hash, 4, 0).map(|map| map.id())
            };
            let ids: BTreeSet<u32> = std::thread::scope(|scope| {
                let makers: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
                let ids = makers
                    .into_iter()
                    .map(|maker| maker.join().expect("no panic"));
                ids.collect::<Result<_, _>>()
            })?;
            assert_eq!(ids.len(), 1);
        }
        Ok(())
    });
}

#[test]
fn a_link_that_cannot_be_updated_is_reported_and_stays() {
    with_kernel(|k| {
        ip("link add hf0 type veth peer name hf1")?;
        let ifindex = if_nametoindex("hf0")?;
        let links = k.globals().root().join(pin::LINKS);
        let path = links.join(format!("{ENDPOINT}/to_pod_{ifindex}"));
        fs::create_dir_all(path.parent().context("a directory")?)?;
        // A live link of another kind is in the way.
        let alive = FdLink::from(PinnedLink::from_pin(links.join(LINK_NAME))?);
        let id = alive.info()?.id();
        alive.pin(&path)?;
        let error = k
            .datapath()
            .apply(&Step::Attach(attachment(ifindex)))
            .expect_err("not ours to replace")
            .to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
        let there = FdLink::from(PinnedLink::from_pin(&path)?);
        assert_eq!(there.info()?.id(), id, "it is where it was");
        // Packets from the pod are still restricted.
        assert_eq!(attached("hf0")?.len(), 1);
        Ok(())
    });
}

#[test]
fn a_missing_interface_is_named() {
    with_kernel(|k| {
        let error = k
            .datapath()
            .apply(&Step::Attach(attachment(999_999)))
            .expect_err("no such interface")
            .to_string();
        assert!(error.contains("interface 999999"), "{error}");
        assert!(error.contains("endpoint 7"), "{error}");
        Ok(())
    });
}

#[test]
fn a_pin_of_another_shape_is_refused_by_name() {
    with_kernel(|k| {
        let root = k.globals().root().to_owned();
        let path = k.globals().path(shared_maps::redirect::NAME);
        fs::remove_file(&path)?;
        Map::<u32, u64>::open_or_create(&path, MapKind::Hash, 4, 0)?;
        let error = KernelDatapath::prepare(&config(&root, true), Box::new(NoFiles))
            .err()
            .context("another layout must be refused")?
            .to_string();
        for part in [
            shared_maps::redirect::NAME,
            "LruHash",
            "36-byte keys",
            "Hash with 4-byte",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        Ok(())
    });
}

#[test]
fn a_full_policy_map_is_an_error_and_keeps_its_entries() {
    with_kernel(|k| {
        let path = k.globals().policy_path(ENDPOINT);
        fs::remove_file(&path)?;
        let mut small = config(k.globals().root(), true);
        small.sizes.policy = 2;
        let mut datapath = KernelDatapath::prepare(&small, Box::new(NoFiles))?;
        datapath.apply(&Step::CreatePolicyMap(ENDPOINT))?;
        let key = |port| PolicyKey::new(1, EGRESS, 6, port, 16);
        let mut set = |port| {
            datapath.apply(&Step::SetPolicy(
                ENDPOINT,
                key(port),
                PolicyValue::allow(key(port)),
            ))
        };
        set(1)?;
        set(2)?;
        let error = set(3).expect_err("full");
        assert!(
            matches!(
                error,
                StepError::Map(shared_maps::user::MapError::Full { .. })
            ),
            "{error}"
        );
        set(2)?;
        let map = k
            .globals()
            .policy(ENDPOINT, shared_maps::user::Access::ReadOnly)?;
        assert_eq!(map.entries()?.found.len(), 2);
        Ok(())
    });
}

#[test]
fn routes_deliver_marked_packets_and_may_be_set_twice() {
    with_kernel(|_| {
        ip("link set lo up")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        for _ in 0..2 {
            runtime.block_on(agent_datapath::routing::install(true, true))?;
        }
        for family in ["-4", "-6"] {
            let shown = |arguments: &[&str]| -> Result<String> {
                let output = Command::new("ip").arg(family).args(arguments).output()?;
                Ok(String::from_utf8(output.stdout)?)
            };
            let rules = shown(&["rule", "show"])?;
            let ours = rules.matches("fwmark 0x200/0xf00 lookup 2004").count();
            assert_eq!(ours, 1, "{rules}");
            assert!(rules.contains("9:"), "{rules}");
            let routes = shown(&["route", "show", "table", "2004"])?;
            assert!(routes.contains("local default dev lo"), "{routes}");
        }
        Ok(())
    });
}
