//! The 32-bit packet mark.
//!
//! Bits 31..16 carry the low 16 bits of an identity, or a proxy port. Bits
//! 11..8 carry the magic. Bits 7..0 carry bits 23..16 of the identity. The scope byte of
//! an identity does not fit: a node-local CIDR/FQDN identity must never be
//! put into a mark.

use crate::IdentityId;

/// Bits of a mark that hold the magic.
pub const MAGIC_MASK: u32 = 0x0f00;
/// To the proxy; the upper 16 bits hold the proxy port in network order.
pub const MAGIC_TO_PROXY: u32 = 0x0200;
/// Whole mark of a packet that `from_pod` has passed to the stack. holdfast-agent's netfilter rules
/// remove it before any other rule, and drop packets of endpoints that do not have it. Under a
/// Cilium agent no packet has it.
pub const JUDGED: u32 = 0x0d00;
/// From the egress (DNS) proxy, with the source identity.
pub const MAGIC_FROM_EGRESS_PROXY: u32 = 0x0b00;
/// Magic: the packet comes from the host itself.
pub const MAGIC_HOST: u32 = 0x0c00;
/// Magic: the mark carries an identity.
pub const MAGIC_IDENTITY: u32 = 0x0f00;

/// Routing table that delivers packets marked [`MAGIC_TO_PROXY`] locally.
pub const TO_PROXY_TABLE: u32 = 2004;
/// Preference of the routing rule for [`MAGIC_TO_PROXY`].
pub const TO_PROXY_RULE_PREF: u32 = 9;

/// Mark of a packet on its way to the proxy at `port` (host order).
#[inline(always)]
pub const fn to_proxy(port: u16) -> u32 {
    MAGIC_TO_PROXY | ((port.to_be() as u32) << 16)
}

/// Mark of packets that the DNS proxy sends on behalf of `identity`.
#[inline(always)]
pub const fn from_proxy(identity: IdentityId) -> u32 {
    MAGIC_FROM_EGRESS_PROXY | ((identity.0 & 0xffff) << 16) | ((identity.0 & 0x00ff_0000) >> 16)
}

/// Identity in a mark. Only for the magics that carry an identity.
#[inline(always)]
pub const fn identity_of(mark: u32) -> IdentityId {
    IdentityId(((mark >> 16) & 0xffff) | ((mark & 0xff) << 16))
}

/// Bits of a mark that give the meaning of its other bits.
#[inline(always)]
pub const fn magic(mark: u32) -> u32 {
    mark & MAGIC_MASK
}
