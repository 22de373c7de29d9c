//! Pods that a container runtime starts through the CNI plugin are under policy from their first
//! packet on, and do not start while no agent answers.
use std::collections::BTreeSet;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::cni::{CniError, Runtime, Sandbox};
use holdfast_e2e::lab::{UDP_PORT, at, web4};
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually, policy, with_lab};
use parking_lot::Mutex;
use serde_json::json;

const SOON: Duration = Duration::from_secs(20);
/// A port of the world that no policy allows.
const FORBIDDEN: u16 = 7999;

/// Web may reach one server by UDP and TCP, and nothing else.
fn allow() -> String {
    let rules = format!("- toCIDR: [\"{}/32\"]\n", web4(10));
    policy::egress("web", "web", &rules)
}

fn document(name: &str, uid: &str, labels: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default, uid: {uid}, labels: {{{labels}}}}}\n---\n"
    )
}

/// Pod documents, with the uids that the sandboxes have.
fn describe(lab: &Lab, names: &[String]) -> Result<()> {
    let documents: String = names
        .iter()
        .map(|name| document(name, &format!("uid-{name}"), "app: web"))
        .collect();
    lab.write_policy("pods.yaml", &documents)
}

fn start_agent(lab: &Lab) -> Result<Program> {
    let socket = format!("--cni-socket={}", lab.cni_socket().display());
    lab.start_agent(&AgentOptions::default().flag(&socket))
}

fn endpoints(lab: &Lab) -> Result<BTreeSet<String>> {
    let list = lab.agent_json(&["endpoint", "list"])?;
    let list = list.as_array().context("no list")?;
    let keys = list.iter().filter_map(|endpoint| endpoint["key"].as_str());
    Ok(keys.map(str::to_owned).collect())
}

/// Addresses from which a forbidden packet reached the world.
struct Leaks {
    seen: Arc<Mutex<BTreeSet<IpAddr>>>,
    stop: Arc<AtomicBool>,
}

impl Leaks {
    fn watch(lab: &Lab) -> Result<Self> {
        let socket = lab
            .world
            .enter(|| UdpSocket::bind(("0.0.0.0", FORBIDDEN)))??;
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (of_thread, stopped) = (Arc::clone(&seen), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((_, from)) = socket.recv_from(&mut buffer) {
                    of_thread.lock().insert(from.ip());
                }
            }
        });
        Ok(Self { seen, stop })
    }

    fn of(&self, pod: &Pod) -> bool {
        self.seen.lock().contains(&IpAddr::from(pod.v4))
    }
}

impl Drop for Leaks {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Sends at once, as a container may: forbidden packets, then an allowed one. Waits for the echo of the
/// allowed one, so that the forbidden ones have had time to arrive.
fn sends_at_once(pod: &Pod) -> Result<()> {
    pod.netns.enter(|| -> Result<()> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        for _ in 0..20 {
            socket.send_to(b"leak", at(web4(11), FORBIDDEN))?;
        }
        Ok(())
    })??;
    pod.datagram(at(web4(10), UDP_PORT), Duration::from_secs(2))
}

#[test]
fn the_first_packet_of_a_pod_is_judged_and_its_endpoint_goes_with_it() {
    const STARTS: u8 = 10;
    with_lab(|lab| {
        lab.write_policy("web.yaml", &allow())?;
        let names: Vec<String> = (0..STARTS).map(|n| format!("p{n}")).collect();
        describe(lab, &names)?;
        let _agent = start_agent(lab)?;
        let leaks = Leaks::watch(lab)?;
        // The probe sees a packet that no policy stops.
        lab.b.netns.enter(|| -> Result<()> {
            UdpSocket::bind("0.0.0.0:0")?.send_to(b"leak", at(web4(11), FORBIDDEN))?;
            Ok(())
        })??;
        eventually("the probe sees a packet", SOON, || {
            ensure!(leaks.of(&lab.b), "not seen");
            Ok(())
        })?;
        let runtime = Runtime::new(lab)?;
        for (n, name) in names.iter().enumerate() {
            let pod = lab.add_pod(&format!("p{n}"), 100)?;
            let sandbox = Sandbox::new(&pod, name);
            runtime.start(&sandbox)?;
            sends_at_once(&pod)?;
            ensure!(!leaks.of(&pod), "start {n}: a forbidden packet got out");
            if n == 0 {
                let check =
                    runtime.call("CHECK", &sandbox, json!({"prevResult": sandbox.result()}))?;
                ensure!(check.is_ok(), "{check:?}");
                ensure!(endpoints(lab)?.contains("cni/c0ffee-p0/eth0"), "not listed");
            }
            runtime.stop(&sandbox)?;
            ensure!(endpoints(lab)?.is_empty(), "an endpoint is left after DEL");
        }
        Ok(())
    });
}

#[test]
fn a_pod_does_not_start_with_the_labels_of_the_one_before_it() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &allow())?;
        let old = document("db-0", "uid-of-before", "app: other");
        lab.write_policy("pods.yaml", &old)?;
        let _agent = start_agent(lab)?;
        let leaks = Leaks::watch(lab)?;
        let mut runtime = Runtime::new(lab)?;
        let pod = lab.add_pod("p", 100)?;
        let sandbox = Sandbox::new(&pod, "db-0");
        runtime.wait = 1;
        refused(lab, runtime.add(&sandbox), 11, "uid uid-db-0")?;
        let failures = "holdfast_cni_add_failures_total";
        let counted = lab.metric(9962, failures, "reason=\"policy\"")?;
        ensure!(counted == 1.0, "{counted} failures");
        // The API server's new object comes while the plugin waits.
        runtime.wait = 20;
        let started = std::thread::scope(|scope| {
            let started = scope.spawn(|| runtime.start(&sandbox));
            lab.write_policy("pods.yaml", &document("db-0", &sandbox.uid, "app: web"))?;
            started
                .join()
                .map_err(|_| anyhow::anyhow!("the runtime panicked"))?
        });
        started?;
        sends_at_once(&pod)?;
        ensure!(!leaks.of(&pod), "a forbidden packet got out");
        // The object of the next pod of that name comes while this pod runs.
        lab.write_policy("pods.yaml", &document("db-0", "uid-of-after", "app: other"))?;
        eventually("status names the pod", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(status.contains("describes another pod"), "{status}");
            Ok(())
        })?;
        sends_at_once(&pod)?;
        ensure!(!leaks.of(&pod), "a forbidden packet got out");
        Ok(())
    });
}

#[test]
fn interfaces_that_are_no_veth_pairs_and_addresses_of_other_pods_are_refused() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &allow())?;
        describe(lab, &["p", "q", "m", "t", "g"].map(str::to_owned))?;
        let _agent = start_agent(lab)?;
        let runtime = Runtime::new(lab)?;
        // Kinds that every kernel of the tests has. Ipvlan is refused in the same way. A port of
        // OVS is a veth pair with a foreign master: unit tests cover it.
        for (name, host, make) in [
            ("m", 102, "link add link veth0 name eth0 type macvlan"),
            ("t", 103, "tuntap add dev eth0 mode tun"),
            ("g", 104, "link add eth0 type bridge"),
        ] {
            let pod = lab.add_pod(name, host)?;
            pod.netns.batch(&format!(
                "link set eth0 down\nlink set eth0 name veth0\n{make}\n\
                 address add {}/32 dev eth0\nlink set eth0 up",
                pod.v4
            ))?;
            let sandbox = Sandbox {
                addresses: vec![pod.v4.into()],
                ..Sandbox::new(&pod, name)
            };
            refused(lab, runtime.add(&sandbox), 100, "veth pair")?;
        }
        let [p, q] = [("p", 100), ("q", 101)].map(|(name, host)| lab.add_pod(name, host));
        let (p, q) = (p?, q?);
        let of_p = Sandbox::new(&p, "p");
        runtime.start(&of_p)?;
        q.netns
            .batch(&format!("address add {}/32 dev eth0", p.v4))?;
        let stolen = Sandbox {
            addresses: vec![p.v4.into()],
            ..Sandbox::new(&q, "q")
        };
        let error = runtime.add(&stolen)?.err().context("ADD succeeded")?;
        ensure!(
            error.code == 100 && error.message.contains(&p.v4.to_string()),
            "{error:?}"
        );
        let failures = "holdfast_cni_add_failures_total";
        let counted = lab.metric(9962, failures, "reason=\"interface\"")?;
        ensure!(counted == 4.0, "{counted} failures");

        // The runtime lists the attachments that it has: the agent removes all others.
        let of_q = Sandbox::new(&q, "q");
        runtime.start(&of_q)?;
        let valid = json!([{"containerID": of_q.container, "ifname": "eth0"}]);
        let collected = runtime.call("GC", &of_q, json!({"cni.dev/valid-attachments": valid}))?;
        ensure!(collected.is_ok(), "{collected:?}");
        let expected = BTreeSet::from(["cni/c0ffee-q/eth0".to_owned()]);
        ensure!(endpoints(lab)? == expected, "{:?}", endpoints(lab)?);
        Ok(())
    });
}

fn refused(
    lab: &Lab,
    result: Result<Result<serde_json::Value, CniError>>,
    code: u64,
    text: &str,
) -> Result<()> {
    let error = result?.err().context("ADD succeeded")?;
    ensure!(error.code == code, "{error:?}");
    ensure!(error.message.contains(text), "{error:?} lacks {text:?}");
    ensure!(endpoints(lab)?.is_empty(), "an endpoint is left");
    Ok(())
}

#[test]
fn an_interface_that_cannot_be_under_policy_is_refused_by_name() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &allow())?;
        describe(lab, &["p".to_owned()])?;
        let _agent = start_agent(lab)?;
        let mut runtime = Runtime::new(lab)?;
        let pod = lab.add_pod("p", 100)?;
        let sandbox = Sandbox::new(&pod, "p");
        let no_result = runtime.add_with(&sandbox, json!({}));
        refused(lab, no_result, 7, "there is no prevResult")?;
        let no_address = runtime.add_with(&sandbox, json!({"prevResult": {"ips": []}}));
        refused(lab, no_address, 7, "no address")?;
        let other_address = Sandbox {
            addresses: vec!["10.77.0.101".parse()?],
            ..sandbox.clone()
        };
        refused(lab, runtime.add(&other_address), 100, "10.77.0.101")?;
        let missing = Sandbox {
            netns: "/run/netns/hf-none-such".into(),
            ..sandbox.clone()
        };
        refused(lab, runtime.add(&missing), 100, "hf-none-such")?;
        // A pod that no source describes waits, and is not under policy.
        runtime.wait = 1;
        let unknown = Sandbox {
            pod: "default/unknown".to_owned(),
            ..sandbox.clone()
        };
        refused(lab, runtime.add(&unknown), 11, "default/unknown")?;
        // A second interface that leads out of the pod.
        lab.node.batch(&format!(
            "link add second type veth peer name v4if0 netns {}",
            pod.netns.name()
        ))?;
        refused(lab, runtime.add(&sandbox), 100, "v4if0")?;
        lab.node.batch("link delete second")?;
        runtime.wait = 20;
        runtime.start(&sandbox)?;
        // Such an interface that appears while the pod runs is named until it is removed.
        let names = |expected: bool| {
            eventually("status names the further interface", SOON, || {
                let status = lab.agent(&["status"])?;
                let text = "pod default/p has further interfaces to other namespaces (v4if0)";
                ensure!(status.contains(text) == expected, "{status}");
                Ok(())
            })
        };
        lab.node.batch(&format!(
            "link add second type veth peer name v4if0 netns {}",
            pod.netns.name()
        ))?;
        names(true)?;
        lab.node.batch("link delete second")?;
        names(false)
    });
}

#[test]
fn no_pod_starts_without_an_agent_and_those_that_run_stay_under_policy() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &allow())?;
        let names = ["p", "q", "r"].map(str::to_owned);
        describe(lab, &names)?;
        let agent = start_agent(lab)?;
        let leaks = Leaks::watch(lab)?;
        let mut runtime = Runtime::new(lab)?;
        let [p, q, r] = [("p", 100), ("q", 101), ("r", 102)].map(|(n, host)| lab.add_pod(n, host));
        let (p, q, r) = (p?, q?, r?);
        let [of_p, of_q, of_r] =
            [(&p, "p"), (&q, "q"), (&r, "r")].map(|(pod, n)| Sandbox::new(pod, n));
        runtime.start(&of_p)?;
        runtime.start(&of_r)?;
        agent.kill_9()?;
        runtime.wait = 1;
        let error = runtime
            .add(&of_q)?
            .err()
            .context("ADD without an agent succeeded")?;
        ensure!(
            error.code == 11 && error.message.contains("does not answer"),
            "{error:?}"
        );
        ensure!(
            runtime.call("STATUS", &of_q, json!({}))?.is_ok(),
            "the node would not be ready"
        );
        runtime.fail_open = vec!["default".to_owned()];
        ensure!(
            runtime.add(&of_q)?.is_ok(),
            "its namespace may start without an agent"
        );
        runtime.fail_open.clear();
        // A pod can end while the agent is away.
        runtime.stop(&of_r)?;
        drop(r);
        sends_at_once(&p)?;
        ensure!(
            !leaks.of(&p),
            "a forbidden packet got out while the agent was away"
        );
        // The agent comes back while a pod waits for it. No source describes p any more: it keeps
        // the labels that it had.
        describe(lab, &names[1..2])?;
        runtime.wait = 100;
        let waiting = runtime.clone();
        let (started, agent) = std::thread::scope(|scope| {
            let started = scope.spawn(|| waiting.start(&of_q));
            let agent = start_agent(lab);
            (started.join(), agent)
        });
        let _agent = agent?;
        started.map_err(|_| anyhow::anyhow!("the runtime panicked"))??;
        for pod in [&p, &q] {
            sends_at_once(pod)?;
            ensure!(!leaks.of(pod), "a forbidden packet got out");
        }
        let expected = BTreeSet::from(["p", "q"].map(|n| format!("cni/c0ffee-{n}/eth0")));
        eventually("the pod that ended is gone", SOON, || {
            let found = endpoints(lab)?;
            ensure!(found == expected, "{found:?}");
            Ok(())
        })
    });
}

#[test]
fn a_path_that_is_no_network_namespace_is_refused_at_once() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &allow())?;
        describe(lab, &["p0".to_owned()])?;
        let _agent = start_agent(lab)?;
        let runtime = Runtime::new(lab)?;
        let pod = lab.add_pod("p0", 100)?;
        let dir = lab.directory().join("netns");
        std::fs::create_dir(&dir)?;
        let at = |name: &str| dir.join(name);
        nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRWXU)?;
        let _socket = std::os::unix::net::UnixListener::bind(at("socket"))?;
        std::fs::write(at("file"), "text")?;
        std::os::unix::fs::symlink("pipe", at("link"))?;
        let begin = std::time::Instant::now();
        // More requests than the look-ups that the agent makes at the same time.
        for name in ["pipe", "socket", "file", "link", "pipe", "pipe", "pipe"] {
            let sandbox = Sandbox {
                netns: at(name),
                ..Sandbox::new(&pod, "p0")
            };
            let error = match runtime.add(&sandbox)? {
                Ok(result) => anyhow::bail!("{name}: {result}"),
                Err(error) => error,
            };
            let path = at(name).display().to_string();
            ensure!(
                error.message.contains(&path) && error.message.contains("is no network namespace"),
                "{name}: {error:?}"
            );
        }
        // A request that waits would take 20 s.
        let took = begin.elapsed();
        ensure!(
            took < Duration::from_secs(15),
            "seven refusals took {took:?}"
        );
        runtime.start(&Sandbox::new(&pod, "p0"))
    });
}
