//! Ranges of ports, and sets of them.

use std::fmt;

use crate::policy::Numbers;

/// Ports from `first` to `last`. A narrower range orders before a wider one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    first: u16,
    last: u16,
}

impl Span {
    /// Every port.
    pub const ALL: Self = Self {
        first: 0,
        last: u16::MAX,
    };

    /// One port.
    pub const fn one(port: u16) -> Self {
        Self {
            first: port,
            last: port,
        }
    }

    /// Ports from `first` to `last`; `None` if `last` is lower than `first`.
    pub const fn new(first: u16, last: u16) -> Option<Self> {
        if last < first {
            return None;
        }
        Some(Self { first, last })
    }

    /// Lowest port.
    pub const fn first(self) -> u16 {
        self.first
    }

    /// Highest port.
    pub const fn last(self) -> u16 {
        self.last
    }

    /// Number of ports, at least 1.
    pub const fn len(self) -> u32 {
        self.last as u32 - self.first as u32 + 1
    }

    /// Always false, because a range has at least one port.
    pub const fn is_empty(self) -> bool {
        false
    }

    /// Whether the range has this port.
    pub const fn contains(self, port: u16) -> bool {
        self.first <= port && port <= self.last
    }

    /// Whether the range has every port of another range.
    pub const fn covers(self, other: Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    fn common(self, other: Self) -> Option<Self> {
        Self::new(self.first.max(other.first), self.last.min(other.last))
    }
}

impl From<Numbers> for Span {
    fn from(numbers: Numbers) -> Self {
        Self {
            first: numbers.first(),
            last: numbers.last(),
        }
    }
}

impl Ord for Span {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let key = |span: &Self| (span.len(), span.first);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Span {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ALL => f.write_str("any"),
            Self { first, last } if first == last => write!(f, "{first}"),
            Self { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

/// A set of ports: ascending ranges that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PortSet(Vec<Span>);

impl PortSet {
    /// Every port.
    pub(crate) fn all() -> Self {
        Self(vec![Span::ALL])
    }

    /// The ranges in ascending order.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.0.iter().copied()
    }

    /// Whether the set has every port of another set.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        other
            .spans()
            .all(|part| self.spans().any(|span| span.covers(part)))
    }

    /// The ports that are in both sets.
    pub(crate) fn common(&self, other: &Self) -> Self {
        let pairs = self
            .spans()
            .flat_map(|a| other.spans().map(move |b| a.common(b)));
        Self(pairs.flatten().collect())
    }
}

impl FromIterator<Span> for PortSet {
    fn from_iter<I: IntoIterator<Item = Span>>(spans: I) -> Self {
        let mut spans: Vec<Span> = spans.into_iter().collect();
        spans.sort_unstable_by_key(|span| (span.first, span.last));
        let mut merged: Vec<Span> = Vec::new();
        for span in spans {
            match merged.last_mut() {
                Some(last) if span.first <= last.last.saturating_add(1) => {
                    last.last = last.last.max(span.last);
                }
                _ => merged.push(span),
            }
        }
        Self(merged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(spans: &[(u16, u16)]) -> PortSet {
        let spans = spans
            .iter()
            .map(|(first, last)| Span::new(*first, *last).unwrap());
        spans.collect()
    }

    #[test]
    fn ranges_that_overlap_or_touch_are_one() {
        assert_eq!(
            set(&[(80, 90), (1, 2), (91, 95), (85, 86), (97, 97)])
                .0
                .len(),
            3
        );
        assert_eq!(set(&[(80, 80), (81, 81)]), set(&[(80, 81)]));
        assert_eq!(set(&[(65535, 65535), (0, 65535)]), PortSet::all());
    }

    #[test]
    fn sets_compare_and_intersect_by_their_ports() {
        let (few, many) = (set(&[(80, 81), (443, 443)]), set(&[(1, 100), (440, 450)]));
        assert!(many.covers(&few) && !few.covers(&many));
        assert!(PortSet::all().covers(&many) && few.covers(&PortSet::default()));
        assert_eq!(many.common(&few), few);
        assert_eq!(few.common(&set(&[(81, 443)])), set(&[(81, 81), (443, 443)]));
        assert_eq!(few.common(&set(&[(82, 442)])), PortSet::default());
    }

    #[test]
    fn a_narrower_range_orders_first() {
        let spans = [Span::one(443), Span::new(80, 81).unwrap(), Span::ALL];
        assert!(spans.is_sorted());
        assert_eq!(spans.map(|span| span.to_string()), ["443", "80-81", "any"]);
    }
}
