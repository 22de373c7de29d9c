//! Addresses of answers.

use std::{fmt, net::IpAddr};

use proptest::prelude::*;

pub(in super::super) const ADDRESSES: [&str; 4] = ["1.1.1.1", "1.1.1.2", "2.2.2.2", "3.3.3.3"];

/// A set of [`ADDRESSES`], one bit for each.
#[derive(Clone, Copy)]
pub(in super::super) struct Addresses(u8);

impl Addresses {
    /// Every set except the empty one.
    pub(in super::super) fn any() -> impl Strategy<Value = Self> {
        (1u8..16).prop_map(Self)
    }

    /// Panics on an address that is not one of [`ADDRESSES`].
    pub(in super::super) fn of(texts: &[&str]) -> Self {
        let bit = |text: &&str| {
            let position = ADDRESSES.iter().position(|address| address == text);
            1 << position.expect("one of ADDRESSES")
        };
        Self(texts.iter().map(bit).sum())
    }

    fn texts(self) -> impl Iterator<Item = &'static str> {
        let all = ADDRESSES.into_iter().enumerate();
        all.filter_map(move |(bit, text)| (self.0 & (1 << bit) != 0).then_some(text))
    }

    pub(super) fn list(self) -> Vec<IpAddr> {
        self.texts().map(|text| text.parse().unwrap()).collect()
    }
}

impl fmt::Debug for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.texts()).finish()
    }
}
