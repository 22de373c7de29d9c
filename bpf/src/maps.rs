//! The maps. The name of a pinned map is the name of its pin.

use aya_ebpf::{
    macros::map,
    maps::{
        Array, HashMap, LpmTrie, LruHashMap, LruPerCpuHashMap, PerCpuArray, Queue, RingBuf,
        lpm_trie::Key,
    },
};
use shared_maps::{
    IdentityId,
    conntrack::{self, CtKey4, CtKey6, CtValue},
    event::{self, Counter},
    fragment::{self, FragmentKey, FragmentValue},
    ipcache::{self, IpcacheKey, IpcacheValue},
    lxc::{self, LxcKey, LxcValue},
    policy::{self, PolicyKey, PolicyValue},
    policystats::{self, PolicyStatsKey, PolicyStatsValue},
    quota::{self, QuotaKey},
    redirect::{self, RedirectKey, RedirectValue, v1},
};

use crate::{address::Address, config, packet::Packet, unanswered::Flow};

/// Key of an LPM trie without its prefix length: the type parameter of [`LpmTrie`].
pub(crate) type IpcacheSuffix = [u8; size_of::<IpcacheKey>() - 4];
pub(crate) type PolicySuffix = [u8; size_of::<PolicyKey>() - 4];

#[map(name = "cilium_lxc")]
pub(crate) static LXC: HashMap<LxcKey, LxcValue> = HashMap::pinned(lxc::MAX_ENTRIES, lxc::FLAGS);

#[map(name = "cilium_ipcache_v2")]
pub(crate) static IPCACHE: LpmTrie<IpcacheSuffix, IpcacheValue> =
    LpmTrie::pinned(ipcache::MAX_ENTRIES, ipcache::FLAGS);

/// Pinned under the endpoint's own name by the loader.
#[map(name = "POLICY")]
pub(crate) static POLICY: LpmTrie<PolicySuffix, PolicyValue> =
    LpmTrie::with_max_entries(policy::MAX_ENTRIES, policy::FLAGS);

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

/// For programs of the previous release.
#[map(name = "hf_redirect_v1")]
pub(crate) static REDIRECTS_V1: LruHashMap<v1::RedirectKey, v1::RedirectValue> =
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

/// Unanswered connections that the endpoint opened, oldest first. Not pinned: each endpoint has its
/// own. The loader sets its size, and the size of the queue of the other direction.
#[map(name = "UNANSWERED_OUT")]
pub(crate) static UNANSWERED_OUT: Queue<Flow> = Queue::with_max_entries(4096, 0);

/// The same, of those that the other side opened.
#[map(name = "UNANSWERED_IN")]
pub(crate) static UNANSWERED_IN: Queue<Flow> = Queue::with_max_entries(4096, 0);

/// Fragmented datagrams of the endpoint, oldest first; not pinned.
#[map(name = "FRAGMENTED")]
pub(crate) static FRAGMENTED: Queue<FragmentKey> =
    Queue::with_max_entries(fragment::MAX_ENTRIES / 32, 0);

/// Servers of the endpoint that have an entry in [`REDIRECTS`], oldest first; not pinned.
#[map(name = "SERVERS")]
pub(crate) static SERVERS: Queue<RedirectKey> =
    Queue::with_max_entries(redirect::MAX_ENTRIES / 64, 0);

/// When the endpoint's packets to the proxy so far would have been sent at its rate, nanoseconds;
/// not pinned.
#[map(name = "PROXY_CLOCK")]
pub(crate) static PROXY_CLOCK: Array<u64> = Array::with_max_entries(1, 0);

/// Event budget by reason; not pinned, so each endpoint has its own.
#[map(name = "BUDGET")]
pub(crate) static BUDGET: PerCpuArray<Budget> = PerCpuArray::with_max_entries(event::COUNTERS, 0);

/// Events already written within one second.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) second: u64,
    pub(crate) used: u64,
}

/// Redirected flows that [`RECENT`] has places for.
pub(crate) const RECENT_FLOWS: u32 = 1024;

/// Recent redirected flows (see [`crate::recent`]); not pinned, so each endpoint has its own.
#[map(name = "RECENT")]
pub(crate) static RECENT: Array<u64> = Array::with_max_entries(RECENT_FLOWS, 0);

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
    /// A connection that begins.
    pub(crate) flow: Flow,
    /// The item that a queue of [`crate::quota`] displaced.
    pub(crate) displaced: [u64; 8],
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
pub(crate) fn policy(key: PolicyKey) -> Option<PolicyValue> {
    // SAFETY: as in `identity_of`.
    let key = unsafe { core::mem::transmute::<PolicyKey, Key<PolicySuffix>>(key) };
    POLICY.get(key).copied()
}
