//! The core's plans on the real kernel, one step at a time. Between any two steps, no packet passes
//! that is denied before and after the event, and none is dropped that is allowed before and after.
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use agent_core::{
    core::{
        Core, CoreConfig, Event, Restored,
        event::{MappingEvent, StreamId},
    },
    datapath::{
        attachment::Attachment,
        plan::{Datapath as _, Step},
    },
    endpoint::spec::{EndpointSpec, PodInterface},
    policy::parse::parse_documents,
    source_event::SourceEvent,
};
use anyhow::{Context, Result, ensure};
use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping},
    name::Fqdn,
    rule::Transport,
};

use holdfast_e2e::kernel::{Kernel, MAC, POD4, POD6, attachment, with_kernel};
use holdfast_e2e::packet::{Packet, SYN, tcp, udp};
use holdfast_e2e::policy::{dns_to, egress, names};
use holdfast_e2e::shell;
use nix::net::if_::if_nametoindex;
use shared_maps::EndpointId;
use shared_maps::event::Reason;
use shared_maps::policy::PolicyKey;
use shared_maps::user::Access;

use Fate::{Dropped, Passed, Proxied};

const DNS: [&str; 2] = ["198.51.100.53", "2001:db8:53::53"];
const PREFIXES: &str = "\"203.0.113.0/24\", \"2001:db8:113::/64\"";

const PORT: &str = "[{ports: [{port: \"8080\", protocol: TCP}]}]";

/// The packets that the pod sends in both families: host number, and two ports of the host. Host 53
/// is the DNS server; its port 53 is tried over UDP and TCP. Every table of fates has these rows.
const TRIED: [(u16, [u16; 2]); 4] = [
    (53, [53, 443]),
    (0x10, [80, 8080]),
    (0x11, [80, 8080]),
    (0x13, [80, 8080]),
];

/// Result of the programs for one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Proxied,
    Passed,
    Dropped,
}

/// Rows and columns as in [`TRIED`].
type Fates = [[Fate; 2]; 4];

const NOTHING: Fates = [[Dropped; 2]; 4];
const EVERYTHING: Fates = [[Passed; 2]; 4];
const FIRST: Fates = [
    [Proxied, Passed],
    [Dropped, Passed],
    [Dropped, Passed],
    [Passed, Dropped],
];
/// [`FIRST`], after host 0x10 got a name.
const FIRST_LEARNED: Fates = [
    [Proxied, Passed],
    [Passed, Passed],
    [Dropped, Passed],
    [Passed, Dropped],
];
const SECOND: Fates = [
    [Proxied, Passed],
    [Dropped, Passed],
    [Passed, Dropped],
    [Dropped, Passed],
];
const OTHER_LABELS: Fates = [
    [Dropped, Dropped],
    [Dropped, Passed],
    [Dropped, Passed],
    [Dropped, Passed],
];

/// A policy that allows names of `good.test`, port 8080 of the network, all ports of the DNS server
/// (port 53 by the proxy), and all ports of one host except 8080.
fn policy(host: u16, with_names: bool) -> String {
    let servers = DNS.map(|server| prefix(server.parse().expect("constant")));
    let [v4, v6] = web(host).map(prefix);
    let mut rules = dns_to("*.good.test", &servers.each_ref().map(String::as_str));
    if with_names {
        rules += &names("*.good.test");
    }
    let [dns4, dns6] = servers;
    rules += &format!(
        r#"
- toCIDR: ["{dns4}", "{dns6}", "{v4}", "{v6}"]
- toCIDR: [{PREFIXES}]
  toPorts: {PORT}
egressDeny:
- toCIDR: ["{v4}", "{v6}"]
  toPorts: {PORT}
"#
    );
    egress("rules", "web", &rules)
}

fn prefix(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

fn web(host: u16) -> [IpAddr; 2] {
    let last = u8::try_from(host).expect("small");
    [
        IpAddr::from([203, 0, 113, last]),
        IpAddr::from([0x2001, 0xdb8, 0x113, 0, 0, 0, 0, host]),
    ]
}

/// Identities of prefixes, and the policy of each identity.
#[derive(Default)]
struct MapState {
    used: BTreeSet<u32>,
    known: BTreeMap<u32, BTreeSet<(PolicyKey, u32)>>,
}

struct Plumbing<'k> {
    kernel: &'k mut Kernel,
    core: Core,
    now: BootTime,
    ifindex: u32,
    endpoint: Option<EndpointId>,
    /// Kinds of steps after which packets were tried.
    checked: Vec<&'static str>,
}

impl<'k> Plumbing<'k> {
    fn new(kernel: &'k mut Kernel) -> Result<Self> {
        shell::run("ip", &["link", "add", "hf0", "type", "veth", "peer", "hf1"])?;
        let now = BootTime::START.plus_secs(1000);
        let restored = Restored {
            now,
            ..Restored::default()
        };
        let config = CoreConfig {
            max_deferred_deletes: 0,
            // Policy changes in the smallest parts.
            work_budget: 1,
            ..CoreConfig::default()
        };
        Ok(Self {
            kernel,
            core: Core::new(config, restored),
            now,
            ifindex: if_nametoindex("hf0")?,
            endpoint: None,
            checked: Vec::new(),
        })
    }

    /// Handles one event with all its parts. After each step, every fate is as in `before` or as in
    /// `after`.
    fn event(&mut self, event: Event, before: Fates, after: Fates) -> Result<()> {
        self.part(event, before, after)?;
        while self.core.change_in_progress() {
            self.part(Event::ContinueChange, before, after)?;
        }
        if self.endpoint.is_some() {
            self.check(after, after).context("at the end")?;
        }
        Ok(())
    }

    fn part(&mut self, event: Event, before: Fates, after: Fates) -> Result<()> {
        let plan = self.core.plan(self.now, event);
        for (number, step) in plan.steps.iter().enumerate() {
            self.kernel.datapath().apply(step)?;
            match step {
                Step::CreatePolicyMap(id) if self.endpoint.is_none() => {
                    self.endpoint = Some(*id);
                    self.kernel.reload(&Attachment {
                        endpoint: *id,
                        ..attachment(self.ifindex)
                    })?;
                }
                Step::Attach(attachment) => self.kernel.reload(attachment)?,
                _ => {}
            }
            if self.endpoint.is_some() {
                self.check(before, after)
                    .with_context(|| format!("after step {number}, {step:?}"))?;
                self.checked.push(kind(step));
            }
        }
        self.core.commit(self.now, plan, &[]);
        Ok(())
    }

    fn check(&mut self, before: Fates, after: Fates) -> Result<()> {
        for (row, (host, ports)) in TRIED.into_iter().enumerate() {
            for (column, port) in ports.into_iter().enumerate() {
                let wanted = [before, after].map(|fates| fates[row][column]);
                for v6 in [false, true] {
                    self.check_packet(host, port, v6, wanted)?;
                }
            }
        }
        Ok(())
    }

    fn check_packet(&mut self, host: u16, port: u16, v6: bool, wanted: [Fate; 2]) -> Result<()> {
        let family = usize::from(v6);
        let pod = [POD4, POD6][family];
        let to = match host {
            53 => DNS[family].parse()?,
            host => web(host)[family],
        };
        let transports = [tcp(4000, port, SYN), udp(4000, port)];
        let tried = if port == 53 { 2 } else { 1 };
        for transport in transports.into_iter().take(tried) {
            let verdict = self.kernel.send(&Packet::new(pod, to, transport).frame())?;
            let fate = match (verdict.pass, verdict.reason) {
                (true, Reason::Redirected) => Proxied,
                (true, _) => Passed,
                (false, _) => Dropped,
            };
            ensure!(
                wanted.contains(&fate),
                "{to} port {port}: {fate:?} ({verdict:?}), wanted {:?} or {:?}",
                wanted[0],
                wanted[1]
            );
        }
        Ok(())
    }

    /// Applies all of these policies at once to an empty node: maps, rules, identities, programs.
    fn begin(&mut self, policies: &[&str]) -> Result<()> {
        self.event(Event::StreamUp(StreamId(1)), NOTHING, NOTHING)?;
        self.event(Event::Policies(SourceEvent::Init), NOTHING, NOTHING)?;
        self.event(Event::Endpoints(SourceEvent::Init), NOTHING, NOTHING)?;
        for text in policies {
            self.policy(text, NOTHING, NOTHING)?;
        }
        self.endpoint("web", NOTHING, NOTHING)?;
        self.event(Event::Policies(SourceEvent::InitDone), NOTHING, NOTHING)?;
        self.event(Event::Endpoints(SourceEvent::InitDone), NOTHING, FIRST)
    }

    /// The contents of the maps.
    fn read_maps(&self) -> Result<MapState> {
        let globals = self.kernel.globals();
        let endpoint = self.endpoint.context("no endpoint yet")?;
        let mut maps = MapState::default();
        for (_, value) in globals.ipcache(Access::ReadOnly)?.entries()?.found {
            maps.used.insert(value.sec_identity);
        }
        for (key, value) in globals.policy(endpoint, Access::ReadOnly)?.entries()?.found {
            let known = maps.known.entry(key.sec_label).or_default();
            known.insert((key, value.precedence));
        }
        Ok(maps)
    }

    /// One event that changes no rule. Between any two of its steps, the policy map has all entries
    /// of every identity in the ipcache. Returns how often the policy map had an identity that no
    /// prefix had yet, and how often it had an identity that no prefix had any more.
    fn ordered(&mut self, event: Event) -> Result<(usize, usize)> {
        let plan = self.core.plan(self.now, event);
        let mut way = vec![self.read_maps()?];
        for step in &plan.steps {
            self.kernel.datapath().apply(step)?;
            way.push(self.read_maps()?);
        }
        self.core.commit(self.now, plan, &[]);
        let (first, last) = (&way[0], &way[way.len() - 1]);
        let (mut early, mut late) = (0, 0);
        for (number, maps) in way.iter().enumerate() {
            for id in &maps.used {
                let whole = if first.used.contains(id) { first } else { last };
                ensure!(
                    maps.known.get(id) == whole.known.get(id),
                    "after {number} steps: {id} is in use, its policy is {:?}, not {:?}",
                    maps.known.get(id),
                    whole.known.get(id)
                );
            }
            let unused = |of: &MapState| {
                let ids = of.used.iter().filter(|id| !maps.used.contains(id));
                ids.filter(|id| maps.known.contains_key(id)).count()
            };
            early += unused(last);
            late += unused(first);
        }
        Ok((early, late))
    }

    fn policy(&mut self, text: &str, before: Fates, after: Fates) -> Result<()> {
        for document in parse_documents(text, "test") {
            let event = Event::Policies(SourceEvent::Apply(document?));
            self.event(event, before, after)?;
        }
        Ok(())
    }

    fn endpoint(&mut self, app: &str, before: Fates, after: Fates) -> Result<()> {
        let spec = EndpointSpec {
            key: "pod".to_owned(),
            labels: vec![
                format!("k8s:app={app}"),
                "k8s:io.kubernetes.pod.namespace=default".to_owned(),
            ],
            interface: PodInterface {
                ifindex: self.ifindex,
                ifname: "hf0".to_owned(),
                mac: MAC,
                node_mac: MAC,
                on_bridge: false,
                link: Default::default(),
            },
            addresses: vec![POD4, POD6],
            netns: "pod".to_owned(),
            pod: None,
            pod_uid: None,
        };
        self.event(Event::Endpoints(SourceEvent::Apply(spec)), before, after)
    }

    fn learn(&mut self, name: &str, host: u16, before: Fates, after: Fates) -> Result<()> {
        let event = self.learned(name, host)?;
        self.event(event, before, after)
    }

    fn learned(&self, name: &str, host: u16) -> Result<Event> {
        let mapping = Mapping {
            endpoint: EndpointInstance {
                id: self.endpoint.context("no endpoint yet")?,
                client: POD4,
                ifindex: self.ifindex,
            },
            name: Fqdn::normalise(name),
            addresses: web(host).to_vec(),
            ttl: 60,
            seen_at: self.now,
            rcode: 0,
            server: format!("{}:53", DNS[0]).parse()?,
            transport: Transport::Udp,
            replayed: false,
        };
        let event = MappingEvent {
            stream: StreamId(1),
            sequence: 1,
            mapping,
        };
        Ok(Event::Mappings(vec![event]))
    }
}

fn kind(step: &Step) -> &'static str {
    match step {
        Step::SetPolicy(_, _, value) if value.is_deny() => "deny",
        Step::SetPolicy(_, _, value) if value.proxy_port.get() != 0 => "redirect",
        Step::SetPolicy(..) => "allow",
        Step::UnsetPolicy(..) => "policy removed",
        Step::SetLxc(..) => "lxc",
        Step::SetIpcache(..) => "ipcache",
        Step::UnsetIpcache(..) => "ipcache removed",
        Step::Attach(_) => "attach",
        _ => "files",
    }
}

#[test]
fn between_two_steps_nothing_opens_or_closes_too_early() {
    with_kernel(|kernel| {
        let mut node = Plumbing::new(kernel)?;
        let other = format!("- toCIDR: [{PREFIXES}]\n  toPorts: {PORT}\n");
        let other = egress("other", "other", &other);
        node.begin(&[&other, &policy(0x13, true)])?;

        // A name gives an address of the allowed prefix an identity of its own.
        node.learn("www.good.test", 0x10, FIRST, FIRST_LEARNED)?;
        // Another name gives an identity of its own to an address that is denied in part.
        node.learn("denied.good.test", 0x13, FIRST_LEARNED, FIRST_LEARNED)?;
        // The names are removed, and the deny moves to another host.
        node.policy(&policy(0x11, false), FIRST_LEARNED, SECOND)?;
        node.policy(&policy(0x13, true), SECOND, FIRST_LEARNED)?;
        // The names expire: the prefix's own identity is back.
        node.now = node.now.plus_secs(1000);
        node.event(Event::Tick, FIRST_LEARNED, FIRST)?;
        // Another identity, other rules, new programs.
        node.endpoint("other", FIRST, OTHER_LABELS)?;
        // No policy, and policy again.
        let key = parse_documents(&other, "test").remove(0)?.key;
        let delete = Event::Policies(SourceEvent::Delete(key));
        node.event(delete, OTHER_LABELS, EVERYTHING)?;
        node.policy(&other, EVERYTHING, OTHER_LABELS)?;
        node.endpoint("web", OTHER_LABELS, FIRST)?;

        for kind in [
            "deny",
            "redirect",
            "allow",
            "policy removed",
            "lxc",
            "ipcache",
            "attach",
        ] {
            ensure!(node.checked.contains(&kind), "no step of kind {kind}");
        }
        Ok(())
    });
}

#[test]
fn the_policy_map_has_an_identity_from_before_the_first_prefix_to_after_the_last() {
    with_kernel(|kernel| {
        let mut node = Plumbing::new(kernel)?;
        node.begin(&[&policy(0x13, true)])?;
        for (name, host) in [("www.good.test", 0x10), ("denied.good.test", 0x13)] {
            let event = node.learned(name, host)?;
            let (early, _) = node.ordered(event)?;
            ensure!(early > 0, "{name}: no identity came");
        }
        // Another address with known labels adds only the prefix.
        let event = node.learned("other.good.test", 0x11)?;
        let before = node.read_maps()?;
        node.ordered(event)?;
        ensure!(
            node.read_maps()?.known == before.known,
            "the policy map changed"
        );
        node.now = node.now.plus_secs(1000);
        let (_, late) = node.ordered(Event::Tick)?;
        ensure!(late > 0, "no identity went");
        Ok(())
    });
}
