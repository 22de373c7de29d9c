//! Within seconds, the agent repairs everything that enforces policy: programs, their links and
//! order, pins, routes, rules and steering. Each repair is counted and named.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use agent_datapath::nftables::{self, Family};
use anyhow::{Context, Result, ensure};
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use aya::{Ebpf, include_bytes_aligned};
use daemon::steering_program::link_pin;
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Lab, Query, eventually, with_lab};
use nix::net::if_::if_nametoindex;
use nix::sys::signal::Signal;
use shared_maps::EndpointId;
use shared_maps::pin;
use shared_maps::policy::{PolicyKey, PolicyValue};
use shared_maps::user::{Globals, Map, MapKind, detach_pinned};

/// Longest repair time that the agent guarantees.
const REPAIRED: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_secs(10);

fn repairs(lab: &Lab, part: &str) -> Result<f64> {
    let label = format!("part=\"{part}\"");
    let name = "holdfast_reconcile_differences_total";
    lab.metric(AGENT_METRICS, name, &label)
}

/// Does `harm`, waits until the agent has repaired `part` once more, and checks that policy is in
/// force.
fn repaired(lab: &Lab, part: &str, harm: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = repairs(lab, part)?;
    harm()?;
    let started = Instant::now();
    eventually(&format!("{part} repaired"), SOON, || {
        ensure!(repairs(lab, part)? > before);
        Ok(())
    })?;
    let took = started.elapsed();
    ensure!(took < REPAIRED, "{part} were repaired after {took:?} only");
    in_force(lab)
}

/// The proxy answers names, allowed addresses are open, and all others are closed.
fn in_force(lab: &Lab) -> Result<()> {
    eventually("policy is in force", SOON, || {
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        // A step that failed while the harm was done is tried again.
        let status = lab.agent(&["status"])?;
        ensure!(!status.contains("PROBLEM"), "{status}");
        Ok(())
    })
}

fn start(lab: &Lab) -> Result<(holdfast_e2e::node::Programs, EndpointId)> {
    lab.zone.set("www.good.test", &[web4(10)], 600);
    let programs = lab.start(&good_names())?;
    in_force(lab)?;
    lab.repairs.expect();
    let id = u16::try_from(lab.endpoint_id(&lab.a)?)?;
    Ok((programs, EndpointId(id)))
}

/// Removes a pin whenever it is there, until `run` has ended.
fn without<T>(pin: &Path, run: impl FnOnce() -> T) -> T {
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let _not_made_again_yet = fs::remove_file(pin);
                thread::sleep(Duration::from_millis(1));
            }
        });
        let result = run();
        ended.store(true, Ordering::Relaxed);
        result
    })
}

fn pin_of(lab: &Lab, id: EndpointId, program: &str) -> Result<PathBuf> {
    let ifindex = lab
        .node
        .enter(|| if_nametoindex(lab.a.host_side.as_str()))??;
    let links = lab.bpf_root().join(pin::LINKS).join(id.to_string());
    Ok(links.join(format!("{program}_{ifindex}")))
}

/// Programs of an interface's chain by name, in running order.
fn chain(lab: &Lab, direction: TcAttachType) -> Result<Vec<String>> {
    lab.node.enter(|| {
        let (_, programs) = SchedClassifier::query_tcx(&lab.a.host_side, direction)?;
        let names = programs
            .iter()
            .map(|p| p.name_as_str().unwrap_or_default().to_owned());
        Ok(names.collect())
    })?
}

static OBJECT: &[u8] = include_bytes_aligned!("../../../bpf/prebuilt/holdfast-bpf.o");

/// A program that drops nothing: `to_proxy`, which only handles answers for proxies.
fn pass_all(lab: &Lab) -> Result<Ebpf> {
    // The steering object has no such program. The agent's object has `to_proxy`, which passes
    // unknown packets when it is loaded without its interface's settings.
    let mut ebpf = aya::EbpfLoader::new()
        .default_map_pin_directory(Globals::new(lab.bpf_root()).dir())
        .load(OBJECT)?;
    let program: &mut SchedClassifier = ebpf
        .program_mut("to_proxy")
        .context("no such program")?
        .try_into()?;
    program.load()?;
    Ok(ebpf)
}

#[test]
fn removed_links_are_created_again() {
    with_lab(|lab| {
        let (_programs, id) = start(lab)?;
        for program in ["from_pod", "to_pod"] {
            let pin = pin_of(lab, id, program)?;
            repaired(lab, "programs", || Ok(fs::remove_file(&pin)?))?;
            repaired(lab, "programs", || Ok(detach_pinned(&pin)?))?;
        }
        // All links at once, as a clean-up script would remove them.
        let links = lab.bpf_root().join(pin::LINKS).join(id.to_string());
        repaired(lab, "programs", || Ok(fs::remove_dir_all(&links)?))?;
        let status = lab.agent(&["status"])?;
        ensure!(status.contains("5 programs"), "{status}");
        Ok(())
    });
}

#[test]
fn a_program_before_ours_is_overtaken_and_named_if_it_returns() {
    with_lab(|lab| {
        let (_programs, _id) = start(lab)?;
        let direction = TcAttachType::Ingress;
        let squeeze = || -> Result<Ebpf> {
            lab.node.enter(|| {
                let mut other = pass_all(lab)?;
                let program: &mut SchedClassifier = other
                    .program_mut("to_proxy")
                    .context("program")?
                    .try_into()?;
                let order = TcAttachOptions::TcxOrder(LinkOrder::first());
                program.attach_with_options(&lab.a.host_side, direction, order)?;
                Ok(other)
            })?
        };
        let mut others = Vec::new();
        repaired(lab, "programs", || {
            others.push(squeeze()?);
            Ok(())
        })?;
        let order = chain(lab, direction)?;
        ensure!(order == ["from_pod", "to_proxy"], "{order:?}");

        // The agent names a program that returns repeatedly, and stops removing it.
        eventually(
            "the other program is named",
            Duration::from_secs(20),
            || {
                if chain(lab, direction)?
                    .first()
                    .is_some_and(|first| first == "from_pod")
                {
                    others.push(squeeze()?);
                }
                let status = lab.agent(&["status"])?;
                ensure!(
                    status.contains("PROBLEM") && status.contains("runs before from_pod"),
                    "{status}"
                );
                Ok(())
            },
        )?;
        let why = lab.agent(&["why", "10.77.0.11", "203.0.113.12:80"]);
        let why = format!("{why:?}");
        ensure!(why.contains("runs before from_pod"), "{why}");
        Ok(())
    });
}

#[test]
fn what_no_program_judges_is_dropped_and_why_says_so() {
    with_lab(|lab| {
        let (programs, id) = start(lab)?;
        let why = |lab: &Lab| lab.agent(&["why", "10.77.0.11", "203.0.113.12:80"]);
        let closed = format!("{:?}", why(lab));
        ensure!(
            closed.contains("before all others") && closed.contains("dropped"),
            "{closed}"
        );

        // While the agent is stopped, nothing repairs the program: netfilter drops what the pod
        // sends.
        let pin = pin_of(lab, id, "from_pod")?;
        programs.agent.signal(Signal::SIGSTOP)?;
        fs::remove_file(&pin)?;
        eventually("the program is gone", SOON, || {
            lab.a.expect_closed(at(web4(10), 80))
        })?;
        lab.a.expect_closed(at(web4(12), 80))?;
        programs.agent.signal(Signal::SIGCONT)?;
        in_force(lab)?;

        // The agent repairs it quickly, so it is removed without pause while `why` runs.
        eventually("why says so", SOON, || {
            let closed = without(&pin, || format!("{:?}", why(lab)));
            let reason = "is dropped because no program judges it";
            ensure!(closed.contains(reason), "{closed}");
            Ok(())
        })?;
        in_force(lab)
    });
}

#[test]
fn removed_and_replaced_pins_are_restored() {
    with_lab(|lab| {
        let (_programs, id) = start(lab)?;
        let globals = Globals::new(lab.bpf_root());
        let policy = globals.policy_path(id);
        repaired(lab, "programs", || Ok(fs::remove_file(&policy)?))?;
        // A map that allows everything replaces the endpoint's.
        repaired(lab, "programs", || {
            fs::remove_file(&policy)?;
            let forged = Map::<PolicyKey, PolicyValue>::open_or_create(
                &policy,
                MapKind::LpmTrie,
                16,
                shared_maps::policy::FLAGS,
            )?;
            let any = PolicyKey::new(0, shared_maps::policy::EGRESS, 0, 0, 0);
            Ok(forged.set(&any, &PolicyValue::allow(any))?)
        })?;
        for name in [
            shared_maps::ipcache::NAME,
            shared_maps::redirect::NAME,
            shared_maps::steering::SLOTS_NAME,
        ] {
            repaired(lab, "pins", || Ok(fs::remove_file(globals.path(name))?))?;
        }
        Ok(())
    });
}

#[test]
fn removed_directories_of_pins_are_made_again() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        for _ in 0..2 {
            repaired(lab, "pins", || {
                // The agent may make pins again while they are removed.
                eventually("the pins are removed", SOON, || {
                    for entry in fs::read_dir(lab.bpf_root())? {
                        fs::remove_dir_all(entry?.path())?;
                    }
                    Ok(())
                })
            })?;
        }
        Ok(())
    });
}

#[test]
fn routes_rules_and_forwarding_are_set_again() {
    with_lab(|lab| {
        let (_programs, _id) = start(lab)?;
        for harm in [
            "rule delete pref 9",
            "-6 rule delete pref 9",
            "route flush table 2004",
            "-6 route flush table 2004",
            "route replace blackhole default table 2004",
        ] {
            let arguments: Vec<&str> = harm.split(' ').collect();
            repaired(lab, "routes", || lab.node.run("ip", &arguments).map(drop))?;
        }
        repaired(lab, "routes", || {
            lab.node.sysctl(&[("net.ipv4.ip_forward", "0")])
        })?;

        // A rule before ours cannot be repaired, but it is named.
        let before = [
            "rule",
            "add",
            "pref",
            "5",
            "fwmark",
            "0x200/0xf00",
            "lookup",
            "main",
        ];
        lab.node.run("ip", &before)?;
        eventually("the rule is named", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(
                status.contains("PROBLEM") && status.contains("`ip rule`"),
                "{status}"
            );
            let broken = lab.metric(AGENT_METRICS, "holdfast_datapath_broken", "routes")?;
            ensure!(broken == 1.0);
            Ok(())
        })?;
        lab.node.run("ip", &["rule", "delete", "pref", "5"])?;
        eventually("all is well", SOON, || {
            ensure!(lab.metric(AGENT_METRICS, "holdfast_datapath_broken", "routes")? == 0.0);
            Ok(())
        })?;
        in_force(lab)
    });
}

#[test]
fn removed_steering_and_netfilter_rules_are_restored() {
    with_lab(|lab| {
        let (_programs, _id) = start(lab)?;
        for family in Family::ALL {
            repaired(lab, "netfilter", || {
                lab.node.enter(move || nftables::remove(family))??;
                Ok(())
            })?;
        }
        let pin = link_pin(&Globals::new(lab.bpf_root()));
        repaired(lab, "steering", || Ok(fs::remove_file(&pin)?))?;
        repaired(lab, "steering", || Ok(detach_pinned(&pin)?))?;
        Ok(())
    });
}

#[test]
fn a_pod_whose_interface_was_made_again_under_its_name_is_restricted_again() {
    with_lab(|lab| {
        let (_programs, _id) = start(lab)?;
        let host = &lab.a.host_side;
        lab.node.batch(&format!(
            "link delete {host}\nlink add {host} type veth peer name eth0 netns {}",
            lab.a.netns.name()
        ))?;
        lab.node.batch(&format!(
            "link set {host} up\naddress add fe80::1/64 dev {host} nodad\n\
             route add {}/32 dev {host}\nroute add {}/128 dev {host}",
            lab.a.v4, lab.a.v6
        ))?;
        lab.a.netns.batch(&format!(
            "address add {}/32 dev eth0\naddress add {}/128 dev eth0 nodad\n\
             link set eth0 up\nroute add 10.77.0.1/32 dev eth0\n\
             route add default via 10.77.0.1 dev eth0\nroute add ::/0 via fe80::1 dev eth0",
            lab.a.v4, lab.a.v6
        ))?;
        eventually("policy is in force", SOON, || {
            lab.a.expect_closed(at(web4(12), 80))?;
            lab.a
                .ask(&Query::a("www.good.test", DNS4))?
                .expect(web4(10))?;
            Ok(())
        })
    });
}

#[test]
fn a_pod_with_net_admin_cannot_take_the_programs_of_its_interface_away() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let _programs = lab.start(&good_names())?;
        in_force(lab)?;
        let side = &lab.a.netns;
        for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
            let (_, programs) = side.enter(|| SchedClassifier::query_tcx("eth0", direction))??;
            ensure!(programs.is_empty(), "the pod's side has {programs:?}");
        }
        for harm in [
            "qdisc add dev eth0 clsact",
            "filter del dev eth0 ingress",
            "filter del dev eth0 egress",
            "qdisc del dev eth0 clsact",
        ] {
            let words: Vec<&str> = harm.split(' ').collect();
            side.run("tc", &words)?;
        }
        side.run("ip", &["link", "set", "dev", "eth0", "xdp", "off"])?;
        // At its end, the lab checks that the agent had nothing to repair.
        in_force(lab)
    });
}
