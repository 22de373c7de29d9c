//! The agent's eBPF programs, loaded by the agent's loader, with one packet at a time.
//!
//! Nothing is attached to an interface: `BPF_PROG_TEST_RUN` passes a frame to a loaded program and
//! returns its verdict. Maps and verifier are the kernel's.

pub mod node;
pub mod tunnel;

pub use crate::packet::MAC;

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use agent_core::datapath::{
    attachment::Attachment,
    link::Link,
    plan::{Datapath, Step, StepError},
};
use agent_datapath::{
    deny_response::DenyResponses,
    kernel::{KernelConfig, KernelDatapath, MapSizes},
    tunnel::Tunnel,
};
use anyhow::{Context, Result, bail, ensure};
use aya::{TestRun, TestRunOptions};
use nix::sched::{CloneFlags, unshare};
use shared_maps::conntrack::{self, CtKey4, CtKey6, CtValue};
use shared_maps::event::{self, Counter, Reason};
use shared_maps::ipcache::IpcacheValue;
use shared_maps::policy::{PolicyKey, PolicyValue};
use shared_maps::redirect::{self, RedirectKey, RedirectValue};
use shared_maps::user::{Access, Globals, Map, MapKind, Record, ipcache_key};
use shared_maps::{EndpointId, IdentityId};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Number of the endpoint under test.
pub const ENDPOINT: EndpointId = EndpointId(7);
/// Identity of the endpoint under test.
pub const IDENTITY: IdentityId = IdentityId(1000);
/// Host-side interface of the endpoint under test, as the programs receive it.
pub const IFINDEX: u32 = 4242;
/// The interface on which `BPF_PROG_TEST_RUN` runs programs. The programs take it for the
/// endpoint's.
pub const LOOPBACK: u32 = 1;
/// An interface that is no endpoint's.
const UPLINK: u32 = 4300;
/// IPv4 address of the pod's end.
pub const POD4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 1, 2));
/// IPv6 address of the pod's end.
pub const POD6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 1, 0, 0, 0, 0, 0, 2));
/// Link-local address that is made from [`MAC`].
pub const LINK_LOCAL: IpAddr = IpAddr::V6(Ipv6Addr::new(
    0xfe80, 0, 0, 0, 0x0042, 0x0aff, 0xfe09, 0x0102,
));
/// A peer with the ipcache entry [`PEER`].
pub const PEER4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53));
/// IPv6 address of the same peer.
pub const PEER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53));
/// Identity that the ipcache has for [`PEER4`] and [`PEER6`].
pub const PEER: u32 = 2000;
/// An address without an ipcache entry.
pub const STRANGER4: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9));
/// IPv6 address without an ipcache entry.
pub const STRANGER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 9));
/// The proxy port of redirects.
pub const PROXY_PORT: u16 = 10094;

/// Offsets of `mark` and `ingress_ifindex` in `struct __sk_buff`, and the length of the part that
/// has both, in bytes.
const MARK_AT: usize = 8;
const INGRESS_IFINDEX_AT: usize = 36;
const CONTEXT_LEN: usize = 40;

/// Programs after this one run.
const TCX_NEXT: i32 = -1;
/// The packet passes, and no other program runs.
const TCX_PASS: i32 = 0;
/// The packet is dropped, and no other program runs.
const TCX_DROP: i32 = 2;
/// The packet goes to the pod.
const TCX_REDIRECT: i32 = 7;
/// Maximum length of a reply to a packet, in bytes.
const LONGEST_REPLY: usize = 2048;

/// Verdict of a program on one packet, with its reason and mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the program did not drop the packet.
    pub pass: bool,
    /// The reason of the verdict: the one whose counter moved.
    pub reason: Reason,
    /// The mark that the packet got.
    pub mark: u32,
}

/// Origin of a packet to the pod.
#[derive(Clone, Copy, Debug)]
pub enum From {
    /// An interface that is no endpoint's.
    Outside,
    /// Like [`Self::Outside`], with this mark.
    OutsideMarked(u32),
    /// The interface with this number.
    Interface(u32),
    /// A socket of the node, with this mark.
    Local(u32),
}

struct NoFiles;

impl Datapath for NoFiles {
    fn apply(&mut self, _step: &Step) -> Result<(), StepError> {
        Ok(())
    }
}

/// Maps and programs of one endpoint below a BPF root of their own.
pub struct Kernel {
    root: Root,
    datapath: KernelDatapath,
    tunnel: Option<Tunnel>,
    counters: Map<u32, Counter>,
}

/// Removes the pins when dropped, and with them maps and programs.
struct Root(PathBuf);

impl Drop for Root {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("left behind: {}: {error}", self.0.display());
        }
    }
}

/// Runs `test` with a fresh [`Kernel`] in a network namespace of its own.
pub fn with_kernel(test: impl FnOnce(&mut Kernel) -> Result<()> + Send) {
    with_stacks(true, test);
}

/// Like [`with_kernel`]. `dual`: whether the node has both families.
pub fn with_stacks(dual: bool, test: impl FnOnce(&mut Kernel) -> Result<()> + Send) {
    with_config(|root| config(root, dual), test);
}

/// Like [`with_kernel`], with programs attached by TCX links or by tc filters.
pub(crate) fn with_attachment(tcx: bool, test: impl FnOnce(&mut Kernel) -> Result<()> + Send) {
    let config = |root: &Path| KernelConfig {
        tcx,
        ..config(root, true)
    };
    with_config(config, test);
}

/// Like [`with_kernel`]. Each endpoint may send `packets` packets per second to the proxy.
pub fn with_dns_quota(packets: u32, test: impl FnOnce(&mut Kernel) -> Result<()> + Send) {
    let config = |root: &Path| KernelConfig {
        dns_quota: packets,
        ..config(root, true)
    };
    with_config(config, test);
}

/// Like [`with_kernel`], with replies to denied packets.
pub fn with_deny_responses(
    responses: DenyResponses,
    test: impl FnOnce(&mut Kernel) -> Result<()> + Send,
) {
    let config = |root: &Path| KernelConfig {
        deny_responses: responses,
        ..config(root, true)
    };
    with_config(config, test);
}

fn with_config(
    config: impl FnOnce(&Path) -> KernelConfig + Send,
    test: impl FnOnce(&mut Kernel) -> Result<()> + Send,
) {
    in_namespace(|| test(&mut Kernel::new(config)?));
}

fn in_namespace(test: impl FnOnce() -> Result<()> + Send) {
    let result = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET)
                    .context("make a network namespace (this needs root)")?;
                test()
            })
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    if let Err(error) = result {
        panic!("{error:?}");
    }
}

/// Runs `test` with one [`Kernel`] for each object, all in one network namespace. `None`: the
/// programs of this build.
pub fn with_objects(
    objects: &[Option<&'static [u8]>],
    test: impl FnOnce(&mut [Kernel]) -> Result<()> + Send,
) {
    in_namespace(|| {
        let kernels = objects.iter().map(|object| {
            let config = |root: &Path| config(root, true);
            Kernel::of_object(config, *object)
        });
        test(&mut kernels.collect::<Result<Vec<_>>>()?)
    });
}

impl Kernel {
    fn new(config: impl FnOnce(&Path) -> KernelConfig) -> Result<Self> {
        Self::of_object(config, None)
    }

    fn of_object(
        config: impl FnOnce(&Path) -> KernelConfig,
        object: Option<&'static [u8]>,
    ) -> Result<Self> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("/sys/fs/bpf/hf-kernel-{}-{number}", std::process::id());
        let root = Root(PathBuf::from(name));
        let config = config(&root.0);
        let mut programs = config.programs()?;
        if let Some(object) = object {
            programs = programs.of_object(object);
        }
        let mut datapath = KernelDatapath::prepare_warm(&config, Box::new(NoFiles), Some(programs))
            .context("prepare the datapath (this needs root and a BPF file system)")?;
        datapath.apply(&Step::CreatePolicyMap(ENDPOINT))?;
        for peer in [PEER4, PEER6] {
            datapath.apply(&identity_step(peer, PEER))?;
        }
        datapath.enter(&attachment(IFINDEX), LOOPBACK)?;
        let globals = Globals::new(&root.0);
        let counters = Map::open(
            &globals.path(event::COUNTERS_NAME),
            MapKind::PerCpuArray,
            Access::ReadOnly,
        )?;
        let mut kernel = Self {
            root,
            datapath,
            tunnel: None,
            counters,
        };
        if let Some(settings) = config.tunnel {
            kernel.prepare_tunnel(settings)?;
        }
        Ok(kernel)
    }

    /// Paths of the pinned maps under the BPF root of this test.
    pub fn globals(&self) -> Globals {
        Globals::new(&self.root.0)
    }

    /// Makes the programs judge the following packets as another endpoint's. The policy map of that
    /// endpoint must exist.
    pub fn reload(&mut self, attachment: &Attachment) -> Result<()> {
        Ok(self.datapath.enter(attachment, LOOPBACK)?)
    }

    /// The agent's datapath below this root.
    pub fn datapath(&mut self) -> &mut KernelDatapath {
        &mut self.datapath
    }

    /// Sets a policy entry of the endpoint.
    pub fn policy(&mut self, key: PolicyKey, value: PolicyValue) -> Result<()> {
        Ok(self
            .datapath
            .apply(&Step::SetPolicy(ENDPOINT, key, value))?)
    }

    /// Allows `identity` on a port.
    pub fn allow(&mut self, identity: u32, egress: u8, protocol: u8, port: u16) -> Result<()> {
        let bits = if protocol == 0 { 0 } else { 16 };
        let key = PolicyKey::new(identity, egress, protocol, port, bits);
        self.policy(key, PolicyValue::allow(key))
    }

    /// Redirects packets to port 53 of the peer.
    pub fn redirect_dns(&mut self) -> Result<()> {
        for protocol in [6, 17] {
            let key = PolicyKey::new(PEER, shared_maps::policy::EGRESS, protocol, 53, 16);
            self.policy(key, PolicyValue::dns_redirect(key, PROXY_PORT))?;
        }
        Ok(())
    }

    /// Removes an entry from the policy map of [`ENDPOINT`].
    pub fn forget(&mut self, key: PolicyKey) -> Result<()> {
        Ok(self.datapath.apply(&Step::UnsetPolicy(ENDPOINT, key))?)
    }

    /// Gives an address an identity.
    pub fn identity(&mut self, address: IpAddr, identity: u32) -> Result<()> {
        Ok(self.datapath.apply(&identity_step(address, identity))?)
    }

    /// The pod sends a frame. Fails if the verdict does not match the reason: allowed packets
    /// continue to other programs at the interface, and packets for the proxy do not.
    pub fn send(&mut self, frame: &[u8]) -> Result<Verdict> {
        self.run("from_pod", frame, 0, 0)
    }

    /// The pod sends a frame that egress policy or another check drops. Gives the reason, and the
    /// frame that the pod gets in reply.
    pub fn send_denied(&mut self, frame: &[u8]) -> Result<(Reason, Option<Vec<u8>>)> {
        let before = self.counts()?;
        let mut reply = vec![0; LONGEST_REPLY];
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut reply),
            ..TestRunOptions::default()
        };
        let programs = self.datapath.programs();
        let result = programs.with_program("from_pod", |program| program.test_run(options))??;
        let reason = moved(&before, &self.counts()?)?;
        ensure!(reason.is_drop(), "not dropped: {reason:?}");
        reply.truncate(usize::try_from(result.data_size_out)?);
        match result.return_value.cast_signed() {
            TCX_DROP => Ok((reason, None)),
            TCX_REDIRECT => Ok((reason, Some(reply))),
            other => bail!("{reason:?} gave verdict {other}"),
        }
    }

    /// Like [`Self::send`] without a check of the verdict, for floods.
    pub fn pass(&mut self, frame: &[u8]) -> Result<()> {
        self.pass_through("from_pod", frame)
    }

    /// Like [`Self::pass`], for packets to the pod from outside.
    pub fn pass_in(&mut self, frame: &[u8]) -> Result<()> {
        self.pass_through("to_pod", frame)
    }

    fn pass_through(&mut self, name: &'static str, frame: &[u8]) -> Result<()> {
        let mut context = [0; CONTEXT_LEN];
        context[INGRESS_IFINDEX_AT..].copy_from_slice(&UPLINK.to_ne_bytes());
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(&context),
            ..TestRunOptions::default()
        };
        let programs = self.datapath.programs();
        programs.with_program(name, |program| program.test_run(options))??;
        Ok(())
    }

    /// Sends a frame to the pod.
    pub fn receive(&mut self, frame: &[u8], from: From) -> Result<Verdict> {
        match from {
            From::Outside => self.run("to_pod", frame, 0, UPLINK),
            From::OutsideMarked(mark) => self.run("to_pod", frame, mark, UPLINK),
            From::Interface(interface) => self.run("to_pod", frame, 0, interface),
            From::Local(mark) => self.run("to_pod", frame, mark, 0),
        }
    }

    /// Mean nanoseconds of `from_pod` for a frame, over `repeat` runs in the kernel.
    pub fn cost(&mut self, frame: &[u8], repeat: u32) -> Result<u128> {
        self.cost_of("from_pod", frame, repeat)
    }

    /// Like [`Self::cost`], for `to_pod` and a frame from outside.
    pub fn cost_in(&mut self, frame: &[u8], repeat: u32) -> Result<u128> {
        self.cost_of("to_pod", frame, repeat)
    }

    fn cost_of(&mut self, name: &'static str, frame: &[u8], repeat: u32) -> Result<u128> {
        let mut context = [0; CONTEXT_LEN];
        if name == "to_pod" {
            context[INGRESS_IFINDEX_AT..].copy_from_slice(&1_u32.to_ne_bytes());
        }
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(&context),
            repeat,
            ..TestRunOptions::default()
        };
        let programs = self.datapath.programs();
        let result = programs.with_program(name, |program| program.test_run(options))??;
        Ok(result.duration.as_nanos())
    }

    fn run(
        &mut self,
        name: &'static str,
        frame: &[u8],
        mark: u32,
        ingress: u32,
    ) -> Result<Verdict> {
        let before = self.counts()?;
        let mut context = [0; CONTEXT_LEN];
        context[MARK_AT..MARK_AT + 4].copy_from_slice(&mark.to_ne_bytes());
        context[INGRESS_IFINDEX_AT..].copy_from_slice(&ingress.to_ne_bytes());
        let mut after_run = [0; 192];
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(&context),
            ctx_out: Some(&mut after_run),
            ..TestRunOptions::default()
        };
        let programs = self.datapath.programs();
        let result = programs.with_program(name, |program| program.test_run(options))??;
        let reason = moved(&before, &self.counts()?)?;
        let mark = after_run[MARK_AT..MARK_AT + 4].try_into()?;
        let expected = match reason {
            reason if reason.is_drop() => TCX_DROP,
            Reason::Redirected | Reason::Returned => TCX_PASS,
            _ => TCX_NEXT,
        };
        let verdict = result.return_value.cast_signed();
        ensure!(verdict == expected, "{reason:?} gave verdict {verdict}");
        Ok(Verdict {
            pass: verdict != TCX_DROP,
            reason,
            mark: u32::from_ne_bytes(mark),
        })
    }

    /// Packets of `reason` so far.
    pub fn counted(&self, reason: Reason) -> Result<u64> {
        let values = self.counters.get_per_cpu(&u32::from(reason as u8))?;
        Ok(values.iter().flatten().map(|value| value.packets).sum())
    }

    fn counts(&self) -> Result<Vec<u64>> {
        let all = Reason::ALL.into_iter();
        all.map(|reason| self.counted(reason)).collect()
    }

    /// The redirect entry of a destination.
    pub fn redirect(&self, dst: IpAddr, port: u16, protocol: u8) -> Result<Option<RedirectValue>> {
        let map: Map<RedirectKey, RedirectValue> = self.open(redirect::NAME, MapKind::LruHash)?;
        let server = shared_maps::user::lxc_key(dst);
        let pod = if dst.is_ipv4() { POD4 } else { POD6 };
        Ok(map.get(&RedirectKey {
            pod: shared_maps::user::lxc_key(pod).ip,
            server: server.ip,
            port: shared_maps::Be16::new(port),
            protocol,
            family: server.family,
        })?)
    }

    /// Conntrack map of IPv4, for TCP or for all other protocols.
    pub fn conntrack4(&self, tcp: bool) -> Result<Map<CtKey4, CtValue>> {
        let name = if tcp {
            conntrack::NAME_TCP4
        } else {
            conntrack::NAME_ANY4
        };
        self.open(name, MapKind::LruHash)
    }

    /// Conntrack map of IPv6, for TCP or for all other protocols.
    pub fn conntrack6(&self, tcp: bool) -> Result<Map<CtKey6, CtValue>> {
        let name = if tcp {
            conntrack::NAME_TCP6
        } else {
            conntrack::NAME_ANY6
        };
        self.open(name, MapKind::LruHash)
    }

    /// Opens the pinned map `name` for reading and writing.
    pub fn open<K: Record, V: Record>(&self, name: &str, kind: MapKind) -> Result<Map<K, V>> {
        Ok(Map::open(
            &self.globals().path(name),
            kind,
            Access::ReadWrite,
        )?)
    }
}

/// The reason whose counter moved.
fn moved(before: &[u64], after: &[u64]) -> Result<Reason> {
    let moved: Vec<Reason> = Reason::ALL
        .into_iter()
        .zip(before.iter().zip(after))
        // Entries that the packet displaces are counted in addition to the packet.
        .filter(|(reason, (before, after))| before != after && !reason.is_trouble())
        .map(|(reason, _)| reason)
        .collect();
    ensure!(moved.len() == 1, "counters that moved: {moved:?}");
    Ok(moved[0])
}

/// Configuration below `root`, with small maps.
pub fn config(root: &Path, dual: bool) -> KernelConfig {
    KernelConfig {
        bpf_root: root.to_owned(),
        ipv4: true,
        ipv6: dual,
        sizes: MapSizes {
            conntrack_tcp: 8192,
            conntrack_any: 8192,
            policy_stats: 1024,
            ..MapSizes::default()
        },
        transparent: false,
        // As for agents that tests start.
        tcx: crate::config::variable("HOLDFAST_ENABLE_TCX").as_deref() != Some("false"),
        dns_quota: 0,
        deny_responses: DenyResponses::default(),
        tunnel: None,
        sdp_group: 0,
    }
}

/// The endpoint under test on interface `ifindex`.
pub fn attachment(ifindex: u32) -> Attachment {
    let (IpAddr::V4(ipv4), IpAddr::V6(ipv6)) = (POD4, POD6) else {
        unreachable!("constants")
    };
    Attachment {
        endpoint: ENDPOINT,
        identity: IDENTITY,
        ifindex,
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        mac: MAC,
        gateway_mac: None,
        link: Link {
            node: vec![Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1)],
            ..Link::default()
        },
    }
}

fn identity_step(address: IpAddr, identity: u32) -> Step {
    let bits = if address.is_ipv4() { 32 } else { 128 };
    Step::SetIpcache(
        ipcache_key(address, bits),
        IpcacheValue {
            sec_identity: identity,
            ..IpcacheValue::default()
        },
    )
}
