//! Attributes of netlink messages.
//!
//! A number in an attribute is in network byte order. A number in a register has the machine's byte order,
//! except a number that comes from the packet, such as a port.

use rtnetlink::packet_core::NlasIterator;

/// `NLA_F_NESTED`.
const NESTED: u16 = 0x8000;
/// `NFTA_LIST_ELEM`.
pub(crate) const ELEMENT: u16 = 1;

/// A netlink attribute: its type, with a value or with nested attributes.
#[derive(Clone, Debug)]
pub(crate) enum Attribute {
    Value(u16, Vec<u8>),
    Nest(u16, Vec<Attribute>),
    /// Elements in order, each of them a nest under [`ELEMENT`].
    List(u16, Vec<Attribute>),
}

impl Attribute {
    pub(crate) fn number(kind: u16, value: u32) -> Self {
        Self::Value(kind, value.to_be_bytes().to_vec())
    }

    pub(crate) fn text(kind: u16, text: &str) -> Self {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        Self::Value(kind, bytes)
    }

    pub(super) fn emit(&self, to: &mut Vec<u8>) {
        let start = to.len();
        to.extend([0; 4]);
        let kind = match self {
            Self::Value(kind, value) => {
                to.extend(value);
                *kind
            }
            Self::Nest(kind, attributes) | Self::List(kind, attributes) => {
                for attribute in attributes {
                    attribute.emit(to);
                }
                *kind | NESTED
            }
        };
        let length = u16::try_from(to.len() - start).expect("attributes here are short");
        to[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        to[start + 2..start + 4].copy_from_slice(&kind.to_ne_bytes());
        to.resize(to.len().next_multiple_of(4), 0);
    }

    pub(super) const fn kind(&self) -> u16 {
        let (Self::Value(kind, _) | Self::Nest(kind, _) | Self::List(kind, _)) = self;
        *kind
    }

    /// Whether `bytes`, which are attributes from the kernel, contain this one. A nest of the kernel may have
    /// further attributes. A list must have as many elements, in the same order.
    pub(crate) fn is_in(&self, bytes: &[u8]) -> bool {
        match self {
            Self::Value(kind, value) => find(bytes, *kind).is_some_and(|found| found == *value),
            Self::Nest(kind, wanted) => {
                find(bytes, *kind).is_some_and(|found| wanted.iter().all(|w| w.is_in(found)))
            }
            Self::List(kind, wanted) => find(bytes, *kind).is_some_and(|found| {
                let found: Vec<Vec<u8>> = children(found)
                    .map(|(kind, value)| Self::Value(kind, value.to_vec()).bytes())
                    .collect();
                found.len() == wanted.len()
                    && wanted.iter().zip(&found).all(|(w, found)| w.is_in(found))
            }),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.emit(&mut bytes);
        bytes
    }
}

/// Attributes in `bytes`, up to the first truncated one.
pub(crate) fn children(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(bytes)
        .map_while(Result::ok)
        .map(|attribute| {
            let length = attribute.value_length();
            let value = attribute.into_inner().get(4..4 + length);
            (attribute.kind(), value.unwrap_or_default())
        })
}

pub(crate) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    children(bytes)
        .find(|(found, _)| *found == kind)
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(attributes: &[Attribute]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for attribute in attributes {
            attribute.emit(&mut bytes);
        }
        bytes
    }

    #[test]
    fn attributes_are_padded_and_their_length_is_not() {
        assert_eq!(
            bytes(&[Attribute::text(3, "pre"), Attribute::text(1, "x")]),
            [8, 0, 3, 0, b'p', b'r', b'e', 0, 6, 0, 1, 0, b'x', 0, 0, 0]
        );
    }

    #[test]
    fn the_kernel_may_return_more_attributes_but_no_other_values() {
        let wanted = Attribute::Nest(4, vec![Attribute::number(1, 7)]);
        let more = Attribute::Nest(4, vec![Attribute::number(2, 9), Attribute::number(1, 7)]);
        let other = Attribute::Nest(4, vec![Attribute::number(1, 8)]);
        assert!(wanted.is_in(&bytes(&[Attribute::number(9, 0), more])));
        assert!(!wanted.is_in(&bytes(&[other])));
        assert!(!wanted.is_in(&[]));
    }
}
