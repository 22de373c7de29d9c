//! Domain names in messages: labels and compression pointers (RFC 1035, 3.1 and 4.1.4).

use std::hash::{BuildHasher, Hasher};

use dns_policy::name::NameBuf;
use foldhash::quality::RandomState;

/// Maximum length of a name with its length bytes and the root, in bytes (RFC 1035, 2.3.4).
const MAX_NAME: usize = 255;
/// Maximum number of pointers in a name: one before each label and the root. [`MAX_NAME`] bytes
/// hold at most 128 of these. A chain of pointers to pointers costs time only.
const MAX_POINTERS: usize = 128;

/// One step through a name.
enum Step {
    /// A label: the position of its first byte, and its length.
    Label(usize, usize),
    /// The root label, with the position after it.
    Root(usize),
    /// A pointer to an earlier position, and the position after the pointer.
    Pointer(usize, usize),
}

fn step(message: &[u8], at: usize) -> Option<Step> {
    let length = *message.get(at)?;
    match length {
        0 => Some(Step::Root(at + 1)),
        1..=63 => Some(Step::Label(usize::from(length), at + 1)),
        0xc0.. => {
            let target = super::u16_at(message, at)? & 0x3fff;
            // A pointer must lead to an earlier position, which alone excludes loops.
            let target = usize::from(target);
            (target < at).then_some(Step::Pointer(target, at + 2))
        }
        _ => None, // extended label types are obsolete (RFC 6891, 5)
    }
}

/// Iterates over the labels of a name, and follows compression pointers.
struct Labels<'a> {
    message: &'a [u8],
    at: usize,
    lowest: usize,
    length: usize,
    pointers: usize,
}

impl<'a> Labels<'a> {
    fn new(message: &'a [u8], at: usize) -> Self {
        Self {
            message,
            at,
            lowest: at,
            length: 1,
            pointers: 0,
        }
    }

    /// The next label. The root is an empty label.
    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            #[cfg(test)]
            steps::count();
            match step(self.message, self.at)? {
                Step::Root(_) => return Some(&[]),
                Step::Label(length, start) => {
                    self.length += length + 1;
                    self.at = start + length;
                    let label = self.message.get(start..self.at)?;
                    return (self.length <= MAX_NAME).then_some(label);
                }
                Step::Pointer(target, _) => {
                    // Each pointer must lead to a lower position than all pointers before it.
                    self.pointers += 1;
                    if target >= self.lowest || self.pointers > MAX_POINTERS {
                        return None;
                    }
                    self.lowest = target;
                    self.at = target;
                }
            }
        }
    }
}

/// Position after the name at `at`. Checks the labels, but not where a pointer leads.
pub(crate) fn skip(message: &[u8], mut at: usize) -> Option<usize> {
    let start = at;
    loop {
        match step(message, at)? {
            Step::Root(end) | Step::Pointer(_, end) => return Some(end),
            Step::Label(length, label) => at = label + length,
        }
        if at - start > MAX_NAME {
            return None;
        }
    }
}

/// Position after the name at `at`, which must not be compressed, as in a question.
pub(crate) fn skip_plain(message: &[u8], mut at: usize) -> Option<usize> {
    let start = at;
    loop {
        match step(message, at)? {
            Step::Pointer(..) => return None,
            Step::Root(end) => return (end - start <= MAX_NAME).then_some(end),
            Step::Label(length, label) => at = label + length,
        }
        if at - start > MAX_NAME {
            return None;
        }
    }
}

/// Reads the name at `at` in presentation form, lower case.
pub fn read(message: &[u8], at: usize, into: &mut NameBuf) -> Option<()> {
    into.clear();
    let mut labels = Labels::new(message, at);
    loop {
        let label = labels.next()?;
        if label.is_empty() {
            into.finish();
            return Some(());
        }
        into.push_label(label);
    }
}

/// Whether the names at two positions are equal except in case (RFC 4343). A broken name equals no name.
pub(crate) fn same(message: &[u8], a: usize, b: usize) -> bool {
    let (mut a, mut b) = (Labels::new(message, a), Labels::new(message, b));
    loop {
        let (Some(left), Some(right)) = (a.next(), b.next()) else {
            return false;
        };
        if !left.eq_ignore_ascii_case(right) {
            return false;
        }
        if left.is_empty() {
            return true;
        }
    }
}

/// Hash of the name at `at`, equal for names that are the [`same`]. `None` for a broken name.
pub(crate) fn hash(message: &[u8], at: usize, state: &RandomState) -> Option<u64> {
    let mut hasher = state.build_hasher();
    let mut labels = Labels::new(message, at);
    loop {
        let label = labels.next()?;
        if label.is_empty() {
            return Some(hasher.finish());
        }
        let mut lower = [0; 63];
        let lower = lower.get_mut(..label.len())?;
        lower.copy_from_slice(label);
        lower.make_ascii_lowercase();
        hasher.write_usize(label.len());
        hasher.write(lower);
    }
}

/// Labels and pointers walked by this thread: the cost of reading names.
#[cfg(test)]
pub(crate) mod steps {
    use std::cell::Cell;

    thread_local!(static STEPS: Cell<usize> = const { Cell::new(0) });

    pub(crate) fn count() {
        STEPS.set(STEPS.get() + 1);
    }

    pub(crate) fn taken() -> usize {
        STEPS.get()
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_POINTERS, read, same, skip, skip_plain};
    use dns_policy::name::NameBuf;

    fn text(message: &[u8], at: usize) -> Option<String> {
        let mut name = NameBuf::default();
        read(message, at, &mut name).map(|()| name.as_str().to_owned())
    }

    #[test]
    fn pointers() {
        let message = b"\x03wWw\x01x\x00\xc0\x04\x01y\xc0\x04\x01X\x00";
        assert_eq!(text(message, 0).unwrap(), "www.x.");
        assert_eq!(text(message, 7).unwrap(), "x.");
        assert_eq!(text(message, 9).unwrap(), "y.x.");
        assert!(same(message, 7, 13));
        assert!(!same(message, 0, 9));
        assert_eq!(skip(message, 9), Some(13));
        assert_eq!(skip_plain(message, 9), None);
    }

    #[test]
    fn loops_and_forward_pointers_are_broken() {
        assert_eq!(text(b"\xc0\x00", 0), None);
        assert_eq!(text(b"\x01a\xc0\x00", 0), None);
        assert_eq!(text(b"\xc0\x02\x00", 0), None);
        assert_eq!(text(b"\x40a\x00", 0), None);
        assert_eq!(text(b"\x05ab", 0), None);
    }

    #[test]
    fn pointers_to_pointers_end() {
        let mut message = b"\x01x\x00".to_vec();
        let mut at = 0u16;
        for pointers in 1..=MAX_POINTERS + 1 {
            let next = u16::try_from(message.len()).unwrap();
            message.extend_from_slice(&(0xc000 | at).to_be_bytes());
            at = next;
            let expected = (pointers <= MAX_POINTERS).then(|| "x.".to_owned());
            assert_eq!(text(&message, usize::from(at)), expected);
        }
    }

    #[test]
    fn odd_bytes_are_escaped_and_long_names_refused() {
        assert_eq!(text(b"\x05a.\\\x00\xff\x00", 0).unwrap(), r"a\.\\\000\255.");
        let mut long = Vec::new();
        for _ in 0..4 {
            long.push(63);
            long.extend_from_slice(&[b'a'; 63]);
        }
        long.push(0);
        assert_eq!(text(&long, 0), None);
        assert_eq!(skip_plain(&long, 0), None);
        assert_eq!(text(b"\x00", 0).unwrap(), ".");
    }
}
