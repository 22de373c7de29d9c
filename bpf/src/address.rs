//! Addresses as four words in network order. Comparing them needs no loop over bytes.

use shared_maps::ipcache::widen;

/// An address of either family; IPv4 in the first word, the rest zero.
#[derive(Clone, Copy)]
pub(crate) struct Address(pub(crate) [u32; 4]);

impl Address {
    pub(crate) const ZERO: Self = Self([0; 4]);

    #[inline(always)]
    pub(crate) fn v4(bytes: [u8; 4]) -> Self {
        Self::v6(widen(bytes))
    }

    #[inline(always)]
    pub(crate) fn v6(bytes: [u8; 16]) -> Self {
        // SAFETY: both types are 16 bytes of plain data.
        Self(unsafe { core::mem::transmute::<[u8; 16], [u32; 4]>(bytes) })
    }

    #[inline(always)]
    pub(crate) fn bytes(self) -> [u8; 16] {
        // SAFETY: both types are 16 bytes of plain data.
        unsafe { core::mem::transmute::<[u32; 4], [u8; 16]>(self.0) }
    }

    #[inline(always)]
    pub(crate) fn v4_bytes(self) -> [u8; 4] {
        self.0[0].to_ne_bytes()
    }

    #[inline(always)]
    pub(crate) fn is(self, other: Self) -> bool {
        let (a, b) = (self.0, other.0);
        a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3]
    }

    #[inline(always)]
    pub(crate) fn is_zero(self) -> bool {
        self.is(Self::ZERO)
    }

    /// fe80::/10
    #[inline(always)]
    pub(crate) fn is_v6_link_local(self) -> bool {
        u32::from_be(self.0[0]) & 0xffc0_0000 == 0xfe80_0000
    }

    /// ff00::/8
    #[inline(always)]
    pub(crate) fn is_v6_multicast(self) -> bool {
        u32::from_be(self.0[0]) >> 24 == 0xff
    }

    /// 224.0.0.0/4 and 255.255.255.255
    #[inline(always)]
    pub(crate) fn is_v4_group(self) -> bool {
        let address = u32::from_be(self.0[0]);
        address >> 28 == 0xe || address == u32::MAX
    }

    /// ff02::/16: groups of the link.
    #[inline(always)]
    pub(crate) fn is_v6_link_multicast(self) -> bool {
        u32::from_be(self.0[0]) >> 16 == 0xff02
    }

    /// ::1, and ::ffff:127.0.0.0/104
    #[inline(always)]
    pub(crate) fn is_v6_loopback(self) -> bool {
        let w = self.0;
        w[0] == 0
            && w[1] == 0
            && ((w[2] == 0 && w[3] == 1u32.to_be())
                || (w[2] == 0xffffu32.to_be() && u32::from_be(w[3]) >> 24 == 127))
    }

    /// 127.0.0.0/8
    #[inline(always)]
    pub(crate) fn is_v4_loopback(self) -> bool {
        u32::from_be(self.0[0]) >> 24 == 127
    }
}
