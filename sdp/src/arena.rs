//! A table of values whose keys are never valid twice.

/// Key of one value. The key of a removed value finds nothing, even if another value has taken its
/// place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// The key as a number that the kernel can return.
    pub(crate) const fn to_u64(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// The key for a number that [`Self::to_u64`] returned.
    pub(crate) fn from_u64(number: u64) -> Self {
        let half = |n: u64| u32::try_from(n & 0xffff_ffff).unwrap_or_default();
        Self {
            index: half(number),
            generation: half(number >> 32),
        }
    }
}

/// Values by key. Places of removed values are used again.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
    len: usize,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            len: 0,
        }
    }
}

impl<T> Arena<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn insert(&mut self, value: T) -> Key {
        self.len += 1;
        if let Some(index) = self.free.pop()
            && let Some((generation, slot)) = slot_mut(&mut self.slots, index)
        {
            *slot = Some(value);
            return Key {
                index,
                generation: *generation,
            };
        }
        let index = u32::try_from(self.slots.len()).expect("far fewer than 2^32 values");
        self.slots.push((0, Some(value)));
        Key {
            index,
            generation: 0,
        }
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let (generation, value) = self.slots.get(usize::try_from(key.index).ok()?)?;
        value.as_ref().filter(|_| *generation == key.generation)
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, value) = slot_mut(&mut self.slots, key.index)?;
        value.as_mut().filter(|_| *generation == key.generation)
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let (generation, slot) = slot_mut(&mut self.slots, key.index)?;
        if *generation != key.generation {
            return None;
        }
        let value = slot.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(key.index);
        self.len -= 1;
        Some(value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots
            .iter()
            .zip(0_u32..)
            .filter_map(|((generation, value), index)| {
                value.as_ref().map(|v| {
                    (
                        Key {
                            index,
                            generation: *generation,
                        },
                        v,
                    )
                })
            })
    }
}

fn slot_mut<T>(slots: &mut [(u32, Option<T>)], index: u32) -> Option<(&mut u32, &mut Option<T>)> {
    let (generation, value) = slots.get_mut(usize::try_from(index).ok()?)?;
    Some((generation, value))
}

#[cfg(test)]
mod tests {
    use super::{Arena, Key};

    #[test]
    fn a_key_dies_with_its_value() {
        let mut arena = Arena::default();
        let first = arena.insert('a');
        assert_eq!(arena.remove(first), Some('a'));
        let second = arena.insert('b');
        assert_eq!(arena.get(first), None);
        assert_eq!(arena.remove(first), None);
        assert_eq!(arena.get(Key::from_u64(second.to_u64())), Some(&'b'));
        assert_eq!(arena.iter().count(), arena.len());
    }
}
