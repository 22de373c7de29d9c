//! Random numbers that are the same in every run.

/// A generator (xorshift) with its state.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % limit
    }

    /// True in `of` of `all` cases on average.
    pub(crate) fn chance(&mut self, of: usize, all: usize) -> bool {
        self.below(all) < of
    }

    pub(crate) fn one_of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    /// Up to `most` values.
    pub(crate) fn list<T>(&mut self, most: usize, mut of: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let number = self.below(most + 1);
        (0..number).map(|_| of(self)).collect()
    }
}
