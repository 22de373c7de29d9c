//! Compile-time checks of every layout in this crate.

use core::mem::{offset_of, size_of};

use crate::{
    conntrack::{CtKey4, CtKey6, CtValue},
    endpoint::EndpointConfig,
    event::{Counter, Event},
    fragment::{FragmentKey, FragmentValue},
    ipcache::{IpcacheKey, IpcacheValue, IpcacheValueV1},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
    policystats::{PolicyStatsKey, PolicyStatsValue},
    quota::QuotaKey,
    redirect::{RedirectKey, RedirectValue},
    sources::{SourceKey, SourceValue},
    steering::Slot,
    tunnel::TunnelConfig,
    world::WorldKey,
};

/// Checks a type's size and the offsets of its named fields.
macro_rules! layout {
    ($type:ty, size $size:literal, $($field:ident @ $offset:literal),* $(,)?) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(offset_of!($type, $field) == $offset);)*
        };
    };
}

layout!(LxcKey, size 20, ip @ 0, family @ 16, key @ 17, cluster_id @ 18);
layout!(LxcValue, size 48, ifindex @ 0, unused @ 4, lxc_id @ 6, flags @ 8, rt_info @ 12,
    mac @ 16, node_mac @ 24, sec_id @ 32, parent_ifindex @ 36, pad @ 40);
layout!(IpcacheKey, size 24, prefix_len @ 0, cluster_id @ 4, pad1 @ 6, family @ 7, ip @ 8);
layout!(IpcacheValue, size 24, sec_identity @ 0, tunnel_endpoint @ 4, pad @ 20, key @ 22, flags @ 23);
layout!(IpcacheValueV1, size 12, sec_identity @ 0, tunnel_endpoint @ 4, pad @ 8, key @ 10, flags @ 11);
layout!(PolicyKey, size 12, prefix_len @ 0, sec_label @ 4, egress @ 8, protocol @ 9, dport @ 10);
layout!(PolicyValue, size 12, proxy_port @ 0, flags @ 2, auth @ 3, precedence @ 4, cookie @ 8);
layout!(PolicyStatsKey, size 12, endpoint_id @ 0, pad @ 2, prefix_len @ 3, sec_label @ 4,
    egress @ 8, protocol @ 9, dport @ 10);
layout!(PolicyStatsValue, size 16, packets @ 0, bytes @ 8);
layout!(CtKey4, size 14, daddr @ 0, saddr @ 4, dport @ 8, sport @ 10, nexthdr @ 12, flags @ 13);
layout!(CtKey6, size 38, daddr @ 0, saddr @ 16, dport @ 32, sport @ 34, nexthdr @ 36, flags @ 37);
layout!(CtValue, size 56, nat_addr @ 0, packets @ 16, bytes @ 24, lifetime @ 32, flags @ 36,
    rev_nat_index @ 38, nat_port @ 40, tx_flags_seen @ 42, rx_flags_seen @ 43, src_sec_id @ 44,
    last_tx_report @ 48, last_rx_report @ 52);
layout!(FragmentKey, size 44, saddr @ 0, daddr @ 16, id @ 32, ifindex @ 36, protocol @ 40,
    family @ 41, egress @ 42, pad @ 43);
layout!(FragmentValue, size 16, seen_at @ 0, mark @ 8, pass @ 12);
layout!(QuotaKey, size 4, endpoint @ 0, limit @ 2, pad @ 3);
layout!(RedirectKey, size 36, pod @ 0, server @ 16, port @ 32, protocol @ 34, family @ 35);
layout!(RedirectValue, size 8, proxy_port @ 0, pad @ 2, ifindex @ 4);
layout!(Slot, size 24, heartbeat @ 0, kind @ 8, owner @ 12, sockets @ 16, proxy_port @ 20);
layout!(Event, size 72, time @ 0, saddr @ 8, daddr @ 24, remote_identity @ 40, ifindex @ 44,
    len @ 48, sport @ 52, dport @ 54, endpoint @ 56, reason @ 58, family @ 59, protocol @ 60,
    egress @ 61, flags @ 62, icmp_type @ 63, pad @ 64);
layout!(Counter, size 16, packets @ 0, bytes @ 8);
layout!(EndpointConfig, size 104, identity @ 0, ifindex @ 4, ipv6 @ 8, ipv4 @ 24, id @ 28,
    mac @ 30, gateway_mac @ 36, flags @ 42, on_link_bits @ 43, bridge_mac @ 44,
    on_link_bits4 @ 50, pad @ 51, link_locals @ 56, node_link_locals @ 72);
layout!(WorldKey, size 8, prefix_len @ 0, ip @ 4);
layout!(SourceKey, size 4, ip @ 0);
layout!(SourceValue, size 8, identity @ 0, seen @ 4);
layout!(TunnelConfig, size 12, device @ 0, mtu @ 4, port @ 8, flags @ 10);
