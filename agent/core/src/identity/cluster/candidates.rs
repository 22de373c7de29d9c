//! Which numbers a label set may have in the cluster, from the labels alone: agents that create an object for
//! the same labels at the same time choose the same name.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use shared_maps::IdentityId;

use crate::{checksum::Sum, labels::LabelSet};

/// How many numbers a label set may have at first.
pub(crate) const CANDIDATES: u64 = 64;
/// How many further numbers it may have if other labels have all of the first ones.
const FURTHER: u64 = 1024;
/// The first of the numbers that a node gives by itself. No object has one of these numbers.
pub(crate) const NODE_FIRST: IdentityId = IdentityId(61_440);

/// The numbers that agents give to label sets, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityRange {
    first: IdentityNumber,
    last: IdentityNumber,
}

/// A number, as files of the agent have it.
type IdentityNumber = u32;

/// A text that is no range of numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "write FIRST-LAST, with 256 <= FIRST <= LAST <= 61439, for example 256-61439: numbers from 61440 on are \
     those of a node"
)]
pub struct RangeError;

impl IdentityRange {
    /// How many numbers there are.
    pub(crate) fn size(self) -> u64 {
        u64::from(self.last - self.first) + 1
    }

    /// The number at this place, which is less than the size.
    fn at(self, place: u64) -> IdentityId {
        // The size has 16 bits.
        IdentityId(self.first + u32::try_from(place).unwrap_or(0))
    }

    /// Whether agents give this number.
    pub fn contains(self, id: IdentityId) -> bool {
        (self.first..=self.last).contains(&id.0)
    }
}

/// Every number that an object may have.
impl Default for IdentityRange {
    fn default() -> Self {
        Self {
            first: IdentityId::ENDPOINT_MIN.0,
            last: NODE_FIRST.0 - 1,
        }
    }
}

impl FromStr for IdentityRange {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        let (first, last) = text.split_once('-').ok_or(RangeError)?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| RangeError);
        let (first, last) = (number(first)?, number(last)?);
        let is_range = first >= IdentityId::ENDPOINT_MIN.0 && first <= last && last < NODE_FIRST.0;
        is_range.then_some(Self { first, last }).ok_or(RangeError)
    }
}

impl fmt::Display for IdentityRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// The numbers that a label set may have, the first choice first. The sequence is the same in every version:
/// another one would give the same labels two numbers while a cluster is upgraded.
///
/// It begins with the 64-bit FNV-1a hash of source, key and value of each label, each followed by a zero byte,
/// in the order of the set. Number `k` is at this place of the range: the finalizer of SplitMix64 for the hash
/// plus `k` times SplitMix64's increment, modulo the size of the range.
pub fn candidates(
    labels: &LabelSet,
    range: IdentityRange,
) -> impl Iterator<Item = IdentityId> + use<> {
    let mut sum = Sum::default();
    for label in labels.iter() {
        for part in [label.source(), label.key(), label.value()] {
            sum.add(part.as_bytes());
            sum.add(&[0]);
        }
    }
    let hash = sum.number();
    (0..CANDIDATES)
        .map(move |k| range.at(mixed(hash.wrapping_add(k.wrapping_mul(INCREMENT))) % range.size()))
}

/// Numbers that a label set may have if other labels have all of [`candidates`]: those after its first candidate. A
/// tenant can choose labels whose numbers are the candidates of another tenant's labels. It cannot as easily have a
/// thousand numbers in a row.
pub fn further_candidates(
    labels: &LabelSet,
    range: IdentityRange,
) -> impl Iterator<Item = IdentityId> + use<> {
    let first = candidates(labels, range).next();
    let from = first.map_or(0, |first| u64::from(first.0 - range.first));
    let others = (range.size() - 1).min(FURTHER);
    (1..=others).map(move |n| range.at((from + n) % range.size()))
}

/// Increment of SplitMix64.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finalizer of SplitMix64.
fn mixed(state: u64) -> u64 {
    let mut mixed = state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
