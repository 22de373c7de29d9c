//! The offsets at which the kernel's connection tracking stores a packet's source, from the kernel's type information
//! (BTF, Documentation/bpf/btf.rst).

use std::{fs, io};

use shared_maps::netfilter::Layout;

/// Types of the kernel without its modules.
const KERNEL: &str = "/sys/kernel/btf/vmlinux";
/// Types of connection tracking, where it is a module.
const MODULE: &str = "/sys/kernel/btf/nf_conntrack";

const MAGIC: u16 = 0xeb9f;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// How many levels of nested anonymous structures are searched.
const DEPTH: u32 = 8;

/// Why the offsets are not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayoutError {
    /// The file with the type information cannot be read.
    #[error("{path}: {source}; the kernel needs CONFIG_DEBUG_INFO_BTF")]
    Read {
        path: &'static str,
        source: io::Error,
    },
    /// The type information is not of the known form.
    #[error("the kernel's type information has another form than BTF of version 1")]
    Malformed,
    /// The kernel has no such field, or its offset cannot be used.
    #[error("the kernel's type information has no usable field {0}")]
    Missing(&'static str),
}

/// Reads the layout of the running kernel. If connection tracking is a module, the module's type
/// information is read, too.
pub(crate) fn read() -> Result<Layout, LayoutError> {
    let kernel = file(KERNEL)?;
    let mut types = Types::default();
    types.add(&kernel)?;
    if types.structure("nf_conn").is_some() {
        return layout(&types);
    }
    let module = file(MODULE)?;
    types.add(&module)?;
    layout(&types)
}

fn file(path: &'static str) -> Result<Vec<u8>, LayoutError> {
    fs::read(path).map_err(|source| LayoutError::Read { path, source })
}

fn layout(types: &Types<'_>) -> Result<Layout, LayoutError> {
    let member = |of: Option<u32>, name: &'static str| {
        let found = of.and_then(|id| types.member(id, name, DEPTH));
        found.ok_or(LayoutError::Missing(name))
    };
    let (entry, _) = member(types.structure("sk_buff"), "_nfct")?;
    let (flows, array) = member(types.structure("nf_conn"), "tuplehash")?;
    let (flow, size) = types
        .element(array)
        .ok_or(LayoutError::Missing("tuplehash"))?;
    let (tuple, of_tuple) = member(Some(flow), "tuple")?;
    let (source, of_source) = member(Some(of_tuple), "src")?;
    let (address, _) = member(Some(of_source), "u3")?;
    let source = flows + tuple + source + address;
    Ok(Layout {
        entry: entry
            .try_into()
            .map_err(|_| LayoutError::Missing("_nfct"))?,
        source: source.try_into().map_err(|_| LayoutError::Missing("u3"))?,
        direction: size
            .try_into()
            .map_err(|_| LayoutError::Missing("tuplehash"))?,
    })
}

/// Types by number. The numbers of a module's types follow the numbers of the kernel's types.
#[derive(Default)]
struct Types<'a> {
    types: Vec<Type<'a>>,
    /// The strings of each file, with the offset of their first byte.
    strings: Vec<(usize, &'a [u8])>,
}

/// A type: its first three words, and what follows them.
#[derive(Clone, Copy)]
struct Type<'a> {
    name: u32,
    info: u32,
    /// Size in bytes, or the number of another type.
    size_or_type: u32,
    rest: &'a [u8],
}

impl Type<'_> {
    fn kind(&self) -> u32 {
        self.info >> 24 & 0x1f
    }

    /// Bytes that follow the first three words.
    fn more(info: u32) -> Option<usize> {
        let count = usize::from(u16::try_from(info & 0xffff).ok()?);
        Some(match info >> 24 & 0x1f {
            // Integer, variable, tag of a declaration.
            1 | 14 | 17 => 4,
            // Pointer, forward declaration, name, qualifiers, function, float, tag of a type.
            2 | 7..=12 | 16 | 18 => 0,
            ARRAY => 12,
            // Structure, union, section, enumeration of 64 bits.
            STRUCT | UNION | 15 | 19 => count * 12,
            // Enumeration, parameters.
            6 | 13 => count * 8,
            _ => return None,
        })
    }
}

impl<'a> Types<'a> {
    /// Adds the types in a file.
    fn add(&mut self, file: &'a [u8]) -> Result<(), LayoutError> {
        self.read(file).ok_or(LayoutError::Malformed)
    }

    fn read(&mut self, file: &'a [u8]) -> Option<()> {
        let half = |at: usize| Some(u16::from_ne_bytes(file.get(at..at + 2)?.try_into().ok()?));
        if half(0)? != MAGIC || *file.get(2)? != 1 {
            return None;
        }
        let header = usize::try_from(word(file, 4)?).ok()?;
        let section = |at: usize| -> Option<&'a [u8]> {
            let from = header.checked_add(usize::try_from(word(file, at)?).ok()?)?;
            let length = usize::try_from(word(file, at + 4)?).ok()?;
            file.get(from..from.checked_add(length)?)
        };
        let (mut types, strings) = (section(8)?, section(16)?);
        if self.types.is_empty() {
            // Number 0 is `void`.
            self.types.push(Type {
                name: 0,
                info: 0,
                size_or_type: 0,
                rest: &[],
            });
        }
        let first = self.strings.last().map_or(0, |(at, of)| at + of.len());
        self.strings.push((first, strings));
        while !types.is_empty() {
            let (name, info) = (word(types, 0)?, word(types, 4)?);
            let length = 12 + Type::more(info)?;
            self.types.push(Type {
                name,
                info,
                size_or_type: word(types, 8)?,
                rest: types.get(12..length)?,
            });
            types = types.get(length..)?;
        }
        Some(())
    }

    fn get(&self, id: u32) -> Option<&Type<'a>> {
        self.types.get(usize::try_from(id).ok()?)
    }

    fn name(&self, at: u32) -> Option<&'a [u8]> {
        let at = usize::try_from(at).ok()?;
        let mut parts = self.strings.iter().rev();
        let (first, strings) = parts.find(|(first, _)| *first <= at)?;
        let name = strings.get(at - first..)?;
        name.split(|byte| *byte == 0).next()
    }

    /// Number of the structure of this name.
    fn structure(&self, name: &str) -> Option<u32> {
        let found = self.types.iter().position(|of| {
            of.kind() == STRUCT && self.name(of.name).is_some_and(|own| own == name.as_bytes())
        });
        u32::try_from(found?).ok()
    }

    /// Offset in bytes and type of a member of a structure, or of an anonymous structure inside it.
    fn member(&self, of: u32, name: &str, depth: u32) -> Option<(u32, u32)> {
        let of = self.get(of)?;
        if of.kind() != STRUCT && of.kind() != UNION {
            return None;
        }
        for member in of.rest.chunks_exact(12) {
            let (own, kind, place) = (word(member, 0)?, word(member, 4)?, word(member, 8)?);
            // If the highest bit of `info` is set, the upper byte of the member's offset is the width of a bit field.
            let bits = if of.info >> 31 == 1 {
                place & 0x00ff_ffff
            } else {
                place
            };
            let own = self.name(own)?;
            if own == name.as_bytes() {
                return Some((bits / 8, kind));
            }
            if own.is_empty()
                && depth > 0
                && let Some((inner, kind)) = self.member(kind, name, depth - 1)
            {
                return Some((bits / 8 + inner, kind));
            }
        }
        None
    }

    /// Type and size of an array's elements, which are structures.
    fn element(&self, array: u32) -> Option<(u32, u32)> {
        let array = self.get(array).filter(|of| of.kind() == ARRAY)?;
        let id = word(array.rest, 0)?;
        let element = self.get(id).filter(|of| of.kind() == STRUCT)?;
        Some((id, element.size_or_type))
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes files in the kernel's format.
    #[derive(Default)]
    struct File {
        types: Vec<u8>,
        strings: Vec<u8>,
        /// Bytes of the strings in earlier files.
        before: usize,
    }

    impl File {
        fn new() -> Self {
            Self {
                strings: vec![0],
                ..Self::default()
            }
        }

        fn string(&mut self, text: &str) -> u32 {
            if text.is_empty() {
                return 0;
            }
            let at = self.before + self.strings.len();
            self.strings.extend(text.as_bytes());
            self.strings.push(0);
            at.try_into().unwrap()
        }

        fn words(&mut self, words: &[u32]) {
            self.types
                .extend(words.iter().flat_map(|w| w.to_ne_bytes()));
        }

        /// Members: name, type, offset in bytes.
        fn structure(&mut self, kind: u32, name: &str, size: u32, members: &[(&str, u32, u32)]) {
            let name = self.string(name);
            let count = u32::try_from(members.len()).unwrap();
            self.words(&[name, kind << 24 | count, size]);
            for (name, kind, offset) in members {
                let name = self.string(name);
                self.words(&[name, *kind, offset * 8]);
            }
        }

        fn bytes(&self) -> Vec<u8> {
            let mut all = MAGIC.to_ne_bytes().to_vec();
            all.extend([1, 0]);
            let (types, strings) = (self.types.len(), self.strings.len());
            let (types, strings) = (types.try_into().unwrap(), strings.try_into().unwrap());
            for word in [24_u32, 0, types, types, strings] {
                all.extend(word.to_ne_bytes());
            }
            [all, self.types.clone(), self.strings.clone()].concat()
        }
    }

    /// Types 1 to 4: a word, a union with `_nfct`, an anonymous structure with this union, and `struct sk_buff` with
    /// this structure.
    fn kernel() -> File {
        let mut file = File::new();
        let name = file.string("unsigned long");
        file.words(&[name, 1 << 24, 8, 64]);
        file.structure(UNION, "", 8, &[("other", 1, 0), ("_nfct", 1, 0)]);
        file.structure(STRUCT, "", 24, &[("first", 1, 0), ("", 2, 16)]);
        file.structure(STRUCT, "sk_buff", 232, &[("len", 1, 0), ("", 3, 88)]);
        file
    }

    /// Adds `struct nf_conn`. `next` is the number of the first type.
    fn connection_tracking(file: &mut File, next: u32) {
        file.structure(STRUCT, "nf_conntrack_man", 20, &[("u3", 1, 0)]);
        let members = [("src", next, 0), ("dst", next, 20)];
        file.structure(STRUCT, "nf_conntrack_tuple", 40, &members);
        let members = [("hnnode", 1, 0), ("tuple", next + 1, 16)];
        file.structure(STRUCT, "nf_conntrack_tuple_hash", 56, &members);
        file.words(&[0, ARRAY << 24, 0, next + 2, 1, 2]);
        let members = [("ct_general", 1, 0), ("tuplehash", next + 3, 24)];
        file.structure(STRUCT, "nf_conn", 248, &members);
    }

    const EXPECTED: Layout = Layout {
        entry: 88 + 16,
        source: 24 + 16,
        direction: 56,
    };

    fn of(files: &[Vec<u8>]) -> Result<Layout, LayoutError> {
        let mut types = Types::default();
        for file in files {
            types.add(file)?;
        }
        layout(&types)
    }

    #[test]
    fn the_places_are_found_in_the_kernel_or_in_the_module() {
        let mut whole = kernel();
        connection_tracking(&mut whole, 5);
        assert_eq!(of(&[whole.bytes()]).unwrap(), EXPECTED);

        let base = kernel();
        let mut module = File {
            before: base.strings.len(),
            ..File::default()
        };
        connection_tracking(&mut module, 5);
        assert!(matches!(
            of(&[base.bytes()]),
            Err(LayoutError::Missing("tuplehash"))
        ));
        assert_eq!(of(&[base.bytes(), module.bytes()]).unwrap(), EXPECTED);
    }

    #[test]
    fn damaged_type_information_is_an_error() {
        let mut whole = kernel();
        connection_tracking(&mut whole, 5);
        let whole = whole.bytes();
        for length in 0..whole.len() {
            assert!(of(&[whole[..length].to_vec()]).is_err(), "{length} bytes");
        }
        // Whatever a byte becomes, nothing panics.
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] = 0xff;
            let _any = of(&[damaged]);
        }
    }

    #[test]
    fn the_layout_fits_into_a_word() {
        assert_eq!(Layout::unpack(EXPECTED.pack()), EXPECTED);
    }
}
