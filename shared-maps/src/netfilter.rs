//! Where the kernel has the source of a tracked packet before it translated it.

/// Symbol of the read-only global (`u32`) with a packed [`Layout`]; 0: not known.
pub const CONNTRACK_LAYOUT: &str = "CONNTRACK_LAYOUT";

/// Offsets in structures of the kernel, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// `_nfct` in `struct sk_buff`: address of the packet's `struct nf_conn`, with the packet's state
    /// in the low bits.
    pub entry: u16,
    /// `tuplehash[0].tuple.src.u3` in `struct nf_conn`: source of the first packet.
    pub source: u8,
    /// From there to the same field of the replies: size of `struct nf_conntrack_tuple_hash`.
    pub direction: u8,
}

impl Layout {
    /// As the programs get it.
    pub const fn pack(self) -> u32 {
        let [a, b] = self.entry.to_be_bytes();
        u32::from_be_bytes([a, b, self.source, self.direction])
    }

    /// Reads a layout that [`Self::pack`] made.
    #[inline(always)]
    pub const fn unpack(packed: u32) -> Self {
        let [a, b, source, direction] = packed.to_be_bytes();
        Self {
            entry: u16::from_be_bytes([a, b]),
            source,
            direction,
        }
    }
}
