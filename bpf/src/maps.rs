//! The maps. The name of a pinned map is the name of its pin.

use aya_ebpf::{
    btf_maps::{ArrayOfMaps, Queue as InnerQueue},
    macros::{btf_map, map},
    maps::{
        Array, HashMap, LpmTrie, LruHashMap, LruPerCpuHashMap, PerCpuArray, RingBuf, lpm_trie::Key,
    },
};
use shared_maps::{
    IdentityId,
    conntrack::{self, CtKey4, CtKey6, CtValue},
    endpoint::{EndpointConfig, LOW_INTERFACES, QueueItem, SLOTS},
    event::{self, Counter},
    fragment::{self, FragmentKey, FragmentValue},
    ipcache::{self, IpcacheKey, IpcacheValue},
    lxc::{self, LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
    policystats::{self, PolicyStatsKey, PolicyStatsValue},
    quota::{self, QuotaKey},
    redirect::{self, RedirectKey, RedirectValue},
    sources::{self, SourceKey, SourceValue},
    tunnel::TunnelConfig,
    world,
};

use crate::{address::Address, config, packet::Packet, policy_trie::PolicyTrie, unanswered::Flow};

/// Key of an LPM trie without its prefix length: the type parameter of [`LpmTrie`].
pub(crate) type IpcacheSuffix = [u8; size_of::<IpcacheKey>() - 4];

#[map(name = "cilium_lxc")]
pub(crate) static LXC: HashMap<LxcKey, LxcValue> = HashMap::pinned(lxc::MAX_ENTRIES, lxc::FLAGS);

#[map(name = "cilium_ipcache_v2")]
pub(crate) static IPCACHE: LpmTrie<IpcacheSuffix, IpcacheValue> =
    LpmTrie::pinned(ipcache::MAX_ENTRIES, ipcache::FLAGS);

/// Slot of the endpoint behind an interface with a low number. The maps of slots are not pinned.
#[map(name = "INTERFACES")]
pub(crate) static INTERFACES: Array<u32> = Array::with_max_entries(LOW_INTERFACES, 0);

/// The same of all other interfaces.
#[map(name = "HIGH_INTERFACES")]
pub(crate) static HIGH_INTERFACES: HashMap<u32, u32> =
    HashMap::with_max_entries(SLOTS, NO_PREALLOC);

/// Settings of endpoints, by the number of their slot.
#[map(name = "CONFIGS")]
pub(crate) static CONFIGS: Array<EndpointConfig> = Array::with_max_entries(SLOTS, 0);

/// Policy maps by slot. The agent pins each under the endpoint's own name.
#[btf_map]
pub(crate) static POLICIES: ArrayOfMaps<PolicyTrie, { SLOTS as usize }> = ArrayOfMaps::new();

/// Queues by [`shared_maps::endpoint::Queue::index`]. The agent decides about their sizes.
#[btf_map]
pub(crate) static QUEUES: ArrayOfMaps<InnerQueue<QueueItem, 1>, { SLOTS as usize * 4 }> =
    ArrayOfMaps::new();

/// `BPF_F_NO_PREALLOC`.
const NO_PREALLOC: u32 = 1;

#[map(name = "cilium_policystats")]
pub(crate) static POLICY_STATS: LruPerCpuHashMap<PolicyStatsKey, PolicyStatsValue> =
    LruPerCpuHashMap::pinned(policystats::MAX_ENTRIES, policystats::FLAGS);

#[map(name = "cilium_ct4_global")]
pub(crate) static CT_TCP4: LruHashMap<CtKey4, CtValue> =
    LruHashMap::pinned(conntrack::MAX_ENTRIES_TCP, 0);

#[map(name = "cilium_ct_any4_global")]
pub(crate) static CT_ANY4: LruHashMap<CtKey4, CtValue> =
    LruHashMap::pinned(conntrack::MAX_ENTRIES_ANY, 0);

#[map(name = "cilium_ct6_global")]
pub(crate) static CT_TCP6: LruHashMap<CtKey6, CtValue> =
    LruHashMap::pinned(conntrack::MAX_ENTRIES_TCP, 0);

#[map(name = "cilium_ct_any6_global")]
pub(crate) static CT_ANY6: LruHashMap<CtKey6, CtValue> =
    LruHashMap::pinned(conntrack::MAX_ENTRIES_ANY, 0);

#[map(name = "hf_frag_v1")]
pub(crate) static FRAGMENTS: LruHashMap<FragmentKey, FragmentValue> =
    LruHashMap::pinned(fragment::MAX_ENTRIES, 0);

#[map(name = "hf_redirect_v2")]
pub(crate) static REDIRECTS: LruHashMap<RedirectKey, RedirectValue> =
    LruHashMap::pinned(redirect::MAX_ENTRIES, 0);

#[map(name = "hf_events_v1")]
pub(crate) static EVENTS: RingBuf = RingBuf::pinned(event::RING_BYTES, 0);

#[map(name = "hf_metrics_v1")]
pub(crate) static COUNTERS: PerCpuArray<Counter> = PerCpuArray::pinned(event::COUNTERS, 0);

#[map(name = "hf_quota_v1")]
pub(crate) static QUOTAS: LruPerCpuHashMap<QuotaKey, Counter> =
    LruPerCpuHashMap::pinned(quota::MAX_ENTRIES, 0);

#[map(name = "hf_held_v1")]
pub(crate) static HELD: Array<u32> = Array::pinned(quota::HELD_ENTRIES, 0);

/// When the packets to the proxy so far would have been sent at the endpoint's rate, nanoseconds;
/// by slot.
#[map(name = "PROXY_CLOCKS")]
pub(crate) static PROXY_CLOCKS: Array<u64> = Array::with_max_entries(SLOTS, 0);

/// When the replies to denied packets so far would have been sent at their greatest rate,
/// nanoseconds; by slot.
#[map(name = "DENY_CLOCKS")]
pub(crate) static DENY_CLOCKS: Array<u64> = Array::with_max_entries(SLOTS, 0);

/// Event budget by slot and reason; not pinned.
#[map(name = "BUDGETS")]
pub(crate) static BUDGETS: LruPerCpuHashMap<u32, Budget> =
    LruPerCpuHashMap::with_max_entries(BUDGET_ENTRIES, 0);

/// Most pairs of slot and reason that have a budget at once. For a further one, the least recently
/// used is removed.
const BUDGET_ENTRIES: u32 = 8192;

/// Events already written within one second.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) second: u64,
    pub(crate) used: u64,
}

/// Redirected flows that [`RECENT`] has places for.
pub(crate) const RECENT_FLOWS: u32 = 1 << 18;

/// Recent redirected flows of all endpoints (see [`crate::recent`]); not pinned.
#[map(name = "RECENT")]
pub(crate) static RECENT: Array<u64> = Array::with_max_entries(RECENT_FLOWS, 0);

/// Blocks outside of the cluster. Like the next two, it is pinned by the agent where the tunnel has a
/// mode; elsewhere it is as small as a map can be, and no program reads it.
#[map(name = "cilium_world_cidrs4")]
pub(crate) static WORLD: LpmTrie<[u8; 4], u8> =
    LpmTrie::with_max_entries(world::MAX_ENTRIES, world::FLAGS);

#[map(name = "hf_sources_v1")]
pub(crate) static SOURCES: LruHashMap<SourceKey, SourceValue> =
    LruHashMap::with_max_entries(sources::MAX_ENTRIES, 0);

#[map(name = "hf_tunnel_v1")]
pub(crate) static TUNNEL: Array<TunnelConfig> = Array::with_max_entries(1, 0);

/// Memory for parsed packets; not pinned. The verifier does not track values in a map. With parsed
/// values on the stack it would verify the rest of the program once for each way to parse a packet.
#[map(name = "SCRATCH")]
pub(crate) static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// Values of one run of `from_pod` or `to_pod`. Neither interrupts the other on its CPU.
#[repr(C)]
pub(crate) struct Scratch {
    pub(crate) packet: Packet,
    /// The packet that an ICMP error quotes.
    pub(crate) quoted: Packet,
    /// Key of the connection that begins, for the queue of unanswered ones.
    pub(crate) flow: Flow,
    /// The item that a queue of [`crate::quota`] gets, and the one that it displaced.
    pub(crate) item: QueueItem,
    pub(crate) displaced: QueueItem,
    /// The endpoint's slot and settings.
    pub(crate) slot: u32,
    pub(crate) endpoint: EndpointConfig,
}

/// Identity of an address, if the ipcache has one.
#[inline(never)]
pub(crate) fn identity_of(address: [u8; 16], family: u8) -> Option<u32> {
    let bits = if family == shared_maps::FAMILY_IPV6 {
        128
    } else {
        32
    };
    let key = IpcacheKey {
        prefix_len: ipcache::STATIC_PREFIX_BITS + bits,
        cluster_id: 0,
        pad1: 0,
        family,
        ip: address,
    };
    // SAFETY: `Key` is the prefix length followed by the rest, packed, which
    // is the layout of `IpcacheKey`.
    let key = unsafe { core::mem::transmute::<IpcacheKey, Key<IpcacheSuffix>>(key) };
    IPCACHE.get(key).map(|value| value.sec_identity)
}

/// Identity of an address; *world* if the ipcache has none.
#[inline(always)]
pub(crate) fn identity_or_world(address: Address, family: u8) -> u32 {
    identity_of(address.bytes(), family)
        .unwrap_or(IdentityId::world_of(family, config::dual_stack()).0)
}

/// Longest match in the endpoint's policy map.
#[inline(always)]
pub(crate) fn policy(key: &PolicyKey) -> Option<&'static PolicyValue> {
    POLICIES.get(config::slot())?.get(key)
}
