//! Time from a proxy that learned an answer to the result "realised". It includes the proxy's link,
//! gRPC over a unix socket, the core's thread, the kernel's maps and files, and the way back.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use agent_core::{
    core::{Core, CoreConfig, Event, Restored},
    endpoint::spec::{EndpointSpec, PodInterface},
    policy::document::PolicyDocument,
    source_event::SourceEvent,
};
use agent_datapath::{
    deny_response::DenyResponses,
    files::{StateFiles, background::BackgroundFiles},
    kernel::{KernelConfig, KernelDatapath, MapSizes},
};
use anyhow::{Context, Result, ensure};
use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping, Realised},
    name::Fqdn,
    rule::Transport,
    table::PolicyHandle,
};
use holdfast_agent::{
    grpc::{
        peer::{self, Allowed},
        server::{About, Native},
    },
    proxies::Proxies,
    runner::{self, CoreHandle, Feeds},
};

use holdfast_e2e::eventually;
use holdfast_e2e::policy::{dns_to, egress};
use holdfast_e2e::shell;

use holdfast_sdp::link::state::LinkState;
use holdfast_sdp::mapping::{MappingSink as _, Release};
use holdfast_sdp::maps::PinnedMaps;
use holdfast_sdp::ready::Readiness;
use holdfast_sdp::sink::LinkSink;
use holdfast_sdp::{config::AgentAddress, link::Link};
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, unshare};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::report::Figure;
use super::selectors::{changing, documents};
use holdfast_e2e::in_memory::{DNS, document, web};

/// A step that takes longer is an error.
const RESULT_TIMEOUT: Duration = Duration::from_secs(120);
/// Minimum number of changes of policy during which answers are measured.
const CHANGES: usize = 50;

/// Measures in a network namespace of its own.
pub(crate) fn realised(endpoints: usize, rules: usize, samples: usize) -> Result<Vec<Figure>> {
    std::thread::scope(|scope| {
        let measured = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)
                .context("make a network namespace (this needs root)")?;
            measure(endpoints, rules, samples)
        });
        let joined = measured.join();
        joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Removes the pins when dropped.
struct Pins(PathBuf);

impl Drop for Pins {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("left behind: {}: {error}", self.0.display());
        }
    }
}

/// Agent and link, with the data that a measurement needs.
struct Bench {
    runtime: Runtime,
    core: CoreHandle,
    sink: Arc<LinkSink>,
    endpoints: Vec<EndpointInstance>,
    next: u32,
}

fn measure(endpoints: usize, rules: usize, samples: usize) -> Result<Vec<Figure>> {
    let pins = Pins(PathBuf::from(format!(
        "/sys/fs/bpf/hf-bench-{}",
        std::process::id()
    )));
    let directory = tempfile::tempdir()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
    let (core, proxies, thread) = agent(&pins.0, directory.path(), &runtime, &stop, &tasks)?;
    let names = dns_to("*", &[&format!("{DNS}/32")])
        + "- toFQDNs: [{matchPattern: \"*.known.example.com\"}]\n  toPorts: [{ports: [{port: \"443\", protocol: TCP}]}]\n";
    let mut policies = documents(rules)?;
    policies.push(document(&egress("names", "web", &names))?);
    let specs = specs(endpoints)?;
    let started = Instant::now();
    runtime.block_on(list(&core, policies, specs.clone()))?;
    let locations = runtime.block_on(core.locations())?;
    let attached = started.elapsed();
    ensure!(
        locations.len() == endpoints,
        "{} endpoints",
        locations.len()
    );
    let socket = directory.path().join("run/sdp.sock");
    let sink = link(&pins.0, socket, &runtime, &stop, &tasks);
    let instances = locations.iter().map(|location| EndpointInstance {
        id: location.id,
        client: location
            .addresses
            .first()
            .copied()
            .unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        ifindex: location.ifindex,
    });
    let endpoints = instances.collect();
    let mut bench = Bench {
        runtime,
        core,
        sink,
        endpoints,
        next: 0,
    };
    eventually("the link is up", RESULT_TIMEOUT, || {
        ensure!(bench.sink.rules_revision().is_some(), "no rules");
        let views = proxies.views();
        ensure!(views.iter().any(|p| p.kind == "mappings"), "{views:?}");
        Ok(())
    })?;
    let figures = bench.figures(attached, samples);
    stop.cancel();
    tasks.close();
    bench.runtime.block_on(tasks.wait());
    bench.runtime.block_on(thread.stop());
    figures
}

impl Bench {
    fn figures(&mut self, attached: Duration, samples: usize) -> Result<Vec<Figure>> {
        let mut figures = vec![Figure::new(
            "kernel: endpoints attached",
            "s",
            attached.as_secs_f64(),
        )];
        self.ask(samples / 10, "known.example.com")?;
        let idle = self.ask(samples, "known.example.com")?;
        figures.extend(percentiles(
            ["realised, idle, p50", "realised, idle, p99"],
            idle,
        ));
        let (changing, changes) = (Arc::new(AtomicBool::new(true)), Arc::default());
        let core = self.core.clone();
        let (go_on, done) = (Arc::clone(&changing), Arc::clone(&changes));
        let task = self
            .runtime
            .spawn(async move { change(&core, &go_on, &done).await });
        let mut times = Vec::new();
        while (times.len() < samples / 10 || changes.load(Ordering::Relaxed) < CHANGES)
            && !task.is_finished()
        {
            times.extend(self.ask(1, "known.example.com")?);
        }
        changing.store(false, Ordering::Relaxed);
        self.runtime.block_on(task)??;
        figures.extend(percentiles(
            [
                "realised, policy changes, p50",
                "realised, policy changes, p99",
            ],
            times,
        ));
        // Names with a rule each, and labels that are new in that block.
        let mut new = Vec::new();
        for number in (0..50).map(|n| n * 10 + 1) {
            let address = Ipv4Addr::from_bits(0x3000_0000 + (number + 4) * 256 + 9);
            new.push(self.one(&format!("n{number}v0.example.com"), address.into())?);
        }
        figures.extend(percentiles(
            ["realised, new identity, p50", "realised, new identity, p99"],
            new,
        ));
        Ok(figures)
    }

    /// Measures one answer after another, each with a new address.
    fn ask(&mut self, samples: usize, suffix: &str) -> Result<Vec<Duration>> {
        (0..samples)
            .map(|_| {
                self.next += 1;
                let name = format!("n{}.{suffix}", self.next % 1000);
                self.one(&name, Ipv4Addr::from_bits(0x0a80_0000 + self.next).into())
            })
            .collect()
    }

    fn one(&mut self, name: &str, address: IpAddr) -> Result<Duration> {
        let index = self.next as usize % self.endpoints.len();
        let mapping = Mapping {
            endpoint: *self.endpoints.get(index).context("no endpoint")?,
            name: Fqdn::normalise(name),
            addresses: vec![address],
            ttl: 3600,
            seen_at: BootTime::now(),
            rcode: 0,
            server: format!("{DNS}:53").parse()?,
            transport: Transport::Udp,
            replayed: false,
        };
        let (sender, results) = mpsc::channel();
        let start = Instant::now();
        let release = self.sink.learn(
            mapping,
            Box::new(move |realised| {
                let _gone = sender.send((realised, Instant::now()));
            }),
        );
        ensure!(release == Release::Held, "{name}: {release:?}");
        let (realised, at) = results
            .recv_timeout(RESULT_TIMEOUT)
            .context("no result arrived")?;
        ensure!(realised == Realised::Yes, "{name}: {realised:?}");
        Ok(at - start)
    }
}

/// Changes one rule's name repeatedly, each time when the last change is in force.
async fn change(core: &CoreHandle, go_on: &AtomicBool, done: &AtomicUsize) -> Result<()> {
    while go_on.load(Ordering::Relaxed) {
        let document = changing(0, done.load(Ordering::Relaxed))?;
        core.send(Event::Policies(SourceEvent::Apply(document)))
            .await?;
        core.summary().await?;
        done.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

type Agent = (CoreHandle, Proxies, runner::CoreThread);

/// The agent's parts that a mapping passes.
fn agent(
    pins: &Path,
    directory: &Path,
    runtime: &Runtime,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Agent> {
    let files = StateFiles::open(&directory.join("state"))?;
    let epoch = holdfast_agent::epoch::begin(files.dir())?;
    let kernel = KernelConfig {
        bpf_root: pins.to_owned(),
        ipv4: true,
        ipv6: false,
        sizes: MapSizes::default(),
        transparent: false,
        tcx: true,
        dns_quota: 0,
        deny_responses: DenyResponses::default(),
        tunnel: None,
        sdp_group: 0,
    };
    let channel = runner::channel();
    let handle = channel.0.clone();
    let send = move |result| {
        let _gone = handle.send_blocking(Event::NamesKept(result));
    };
    let files = BackgroundFiles::start(files, send)?;
    let datapath = KernelDatapath::prepare(&kernel, Box::new(files))?;
    let config = CoreConfig {
        boot_id: epoch.boot_id.clone(),
        start: epoch.start,
        names_kept_later: true,
        enable_ipv6: false,
        ..CoreConfig::default()
    };
    let restored = Restored {
        now: BootTime::now(),
        ..Restored::default()
    };
    let proxies = Proxies::default();
    let core = Core::new(config, restored);
    let feeds = Feeds::default();
    let (core, thread) = runner::start(channel, core, Box::new(datapath), proxies.clone(), feeds)?;
    let about = About {
        epoch,
        proxy_port: 10094,
        min_ttl: 0,
        state_dir: directory.to_owned(),
    };
    let _inside = runtime.enter();
    let listener = peer::bind(&directory.join("run/sdp.sock"), None)?;
    let native = Native::new(
        about,
        core.clone(),
        proxies.clone(),
        tasks.clone(),
        stop.clone(),
    );
    tasks.spawn_on(
        native.serve(listener, Allowed { group: None }),
        runtime.handle(),
    );
    Ok((core, proxies, thread))
}

/// Starts the proxy's end of the link.
fn link(
    pins: &Path,
    socket: PathBuf,
    runtime: &Runtime,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Arc<LinkSink> {
    let sink = Arc::new(LinkSink::new(0, RESULT_TIMEOUT));
    let link = Link {
        addresses: vec![AgentAddress::Unix(socket)],
        instance: "bench".into(),
        proxy_port: 10094,
        policy: Arc::new(PolicyHandle::new()),
        sink: Arc::clone(&sink),
        maps: Arc::new(PinnedMaps::open(pins, false)),
        reports: Arc::default(),
        rules_journal: Arc::default(),
        state_dir: pins.to_owned(),
        state: Arc::new(LinkState::new(Readiness::default())),
    };
    tasks.spawn_on(link.run(stop.clone()), runtime.handle());
    sink
}

async fn list(
    core: &CoreHandle,
    policies: Vec<PolicyDocument>,
    endpoints: Vec<EndpointSpec>,
) -> Result<()> {
    core.send(Event::Policies(SourceEvent::Init)).await?;
    for document in policies {
        core.send(Event::Policies(SourceEvent::Apply(document)))
            .await?;
    }
    core.send(Event::Policies(SourceEvent::InitDone)).await?;
    core.send(Event::Endpoints(SourceEvent::Init)).await?;
    for spec in endpoints {
        core.send(Event::Endpoints(SourceEvent::Apply(spec)))
            .await?;
    }
    core.send(Event::Endpoints(SourceEvent::InitDone)).await?;
    // This request is queued behind all changes. A large start may take longer than readers wait.
    let begun = Instant::now();
    while core.summary().await.is_err() {
        ensure!(begun.elapsed() < RESULT_TIMEOUT, "the core is still busy");
    }
    Ok(())
}

/// Endpoints with an interface each, and labels that no other endpoint has.
fn specs(count: usize) -> Result<Vec<EndpointSpec>> {
    let mut commands = String::from("link set lo up\n");
    for n in 0..count {
        commands += &format!("link add lxc{n} type veth peer name pod{n}\n");
    }
    shell::feed(Command::new("ip").args(["-batch", "-"]), &commands)?;
    (0..count)
        .map(|n| {
            let name = format!("lxc{n}");
            let number = u32::try_from(n)?;
            let [a, b, c, d] = number.to_be_bytes();
            Ok(EndpointSpec {
                key: format!("pod{n}"),
                labels: web(Some(n)),
                interface: PodInterface {
                    ifindex: if_nametoindex(name.as_str())?,
                    ifname: name,
                    mac: [2, 0, a, b, c, d],
                    node_mac: [2, 1, a, b, c, d],
                    on_bridge: false,
                    link: Default::default(),
                },
                addresses: vec![Ipv4Addr::from_bits(0xac10_0001 + number).into()],
                netns: format!("pod{n}"),
                pod: None,
                pod_uid: None,
            })
        })
        .collect()
}

fn percentiles(names: [&str; 2], mut times: Vec<Duration>) -> Vec<Figure> {
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    let figures = names
        .into_iter()
        .zip([50, 99])
        .filter_map(|(name, percent)| {
            let time = times.get(last * percent / 100)?;
            Some(Figure::new(name, "us", time.as_secs_f64() * 1e6))
        });
    figures.collect()
}
