//! `cilium_policy_v2_NNNNN`: per endpoint, (identity, direction, protocol, port) → verdict.

use crate::Be16;

/// Pin name without the endpoint id, which follows as five decimal digits.
pub const NAME_PREFIX: &str = "cilium_policy_v2_";
/// Entries of each endpoint's map by default, as in Cilium.
pub const MAX_ENTRIES: u32 = 16384;
/// Flags with which the map is created.
pub const FLAGS: u32 = crate::BPF_F_NO_PREALLOC | crate::BPF_F_RDONLY_PROG;
/// Bits that always count: identity and direction.
pub const STATIC_PREFIX_BITS: u32 = 40;
/// Bits of a key that names protocol and port in full.
pub const FULL_PREFIX_BITS: u32 = 64;

/// Direction of packets to the endpoint.
pub const INGRESS: u8 = 0;
/// Direction of packets from the endpoint.
pub const EGRESS: u8 = 1;

/// Value flag: the entry denies.
pub(crate) const FLAG_DENY: u8 = 1;
/// Shift of the wildcarding bits (`prefix_len` − 40) in [`PolicyValue::flags`].
pub const FLAG_LPM_SHIFT: u8 = 3;

/// Precedence of a deny: nothing beats it.
pub const PRECEDENCE_DENY: u32 = 0xffff_ffff;
/// Precedence of a plain allow at the default priority.
pub const PRECEDENCE_ALLOW: u32 = 0xffff_ff01;
/// Precedence of a DNS redirect at the default priority.
pub const PRECEDENCE_DNS_REDIRECT: u32 = 0xffff_ff86;

/// Key: a remote identity, a direction, a protocol and a range of ports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyKey {
    /// Bits after this field that count, [`STATIC_PREFIX_BITS`]..=[`FULL_PREFIX_BITS`].
    pub prefix_len: u32,
    /// Remote identity; 0 = any.
    pub sec_label: u32,
    /// [`INGRESS`] or [`EGRESS`].
    pub egress: u8,
    /// IP protocol; 0 = any (only with any port).
    pub protocol: u8,
    /// Destination port. Its low bits are wild if `prefix_len` excludes them.
    pub dport: Be16,
}

impl PolicyKey {
    /// Builds a key. `port_bits` (0..=16) is the number of significant bits of `dport`. With
    /// `protocol` 0 it must be 0.
    pub const fn new(sec_label: u32, egress: u8, protocol: u8, dport: u16, port_bits: u8) -> Self {
        let wild = if protocol == 0 {
            STATIC_PREFIX_BITS
        } else {
            STATIC_PREFIX_BITS + 8 + port_bits as u32
        };
        Self {
            prefix_len: wild,
            sec_label,
            egress,
            protocol,
            dport: Be16::new(dport),
        }
    }

    /// Significant bits of protocol and port, 0..=24. [`PolicyValue::flags`] repeats them.
    pub const fn lpm_len(self) -> u8 {
        #[expect(clippy::cast_possible_truncation, reason = "0..=24 by construction")]
        let len = self.prefix_len.saturating_sub(STATIC_PREFIX_BITS) as u8;
        len
    }
}

/// Value: the verdict for packets that match the key.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyValue {
    /// Port of the proxy to redirect to; 0: none.
    pub proxy_port: Be16,
    /// Bit 0 deny; bits 3..8 the key's `prefix_len` − 40.
    pub flags: u8,
    /// Bits 0..7 authentication type, bit 7 explicit.
    pub auth: u8,
    /// If several entries match, the one with the highest precedence decides.
    pub precedence: u32,
    /// Number for Cilium's policy log. Holdfast leaves it zero.
    pub cookie: u32,
}

impl PolicyValue {
    /// A plain allow for `key`.
    pub const fn allow(key: PolicyKey) -> Self {
        Self {
            proxy_port: Be16::ZERO,
            flags: key.lpm_len() << FLAG_LPM_SHIFT,
            auth: 0,
            precedence: PRECEDENCE_ALLOW,
            cookie: 0,
        }
    }

    /// A value that denies the packets of `key`.
    pub const fn deny(key: PolicyKey) -> Self {
        Self {
            proxy_port: Be16::ZERO,
            flags: (key.lpm_len() << FLAG_LPM_SHIFT) | FLAG_DENY,
            auth: 0,
            precedence: PRECEDENCE_DENY,
            cookie: 0,
        }
    }

    /// A redirect to the DNS proxy for `key`.
    pub const fn dns_redirect(key: PolicyKey, proxy_port: u16) -> Self {
        Self {
            proxy_port: Be16::new(proxy_port),
            flags: key.lpm_len() << FLAG_LPM_SHIFT,
            auth: 0,
            precedence: PRECEDENCE_DNS_REDIRECT,
            cookie: 0,
        }
    }

    /// Whether the entry denies its packets.
    #[inline(always)]
    pub const fn is_deny(self) -> bool {
        self.flags & FLAG_DENY != 0
    }
}
