//! Integers whose byte order is part of the layout.

/// A `u16` kept in network byte order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Be16(u16);

impl Be16 {
    /// The number 0, equal in both byte orders.
    pub const ZERO: Self = Self(0);

    /// Stores a number that is given in host byte order.
    #[inline(always)]
    pub const fn new(host: u16) -> Self {
        Self(host.to_be())
    }

    /// Wraps a number that was read in network byte order.
    #[inline(always)]
    pub const fn from_wire(raw: u16) -> Self {
        Self(raw)
    }

    /// The number in host byte order.
    #[inline(always)]
    pub const fn get(self) -> u16 {
        u16::from_be(self.0)
    }

    /// The number as it is in memory (network order read as host order).
    #[inline(always)]
    pub const fn to_wire(self) -> u16 {
        self.0
    }
}
