//! Expressions of rules: from a packet to registers, and from registers to a verdict.

use super::{
    attribute::{Attribute, ELEMENT},
    element::verdict_attribute,
};
use netpol::render::ruleset::Verdict;

/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`.
const NAME: u16 = 1;
const DATA: u16 = 2;
/// `NFTA_DATA_VALUE`.
const VALUE: u16 = 1;
/// `NFT_REG_VERDICT`.
const VERDICT_REGISTER: u32 = 0;

/// A place for values. [`FIRST`] is enough for one value.
#[derive(Clone, Copy)]
pub(crate) struct Register(u32);

/// `NFT_REG_1`.
pub(crate) const FIRST: Register = Register(1);

impl Register {
    /// The place that is `words` four-byte words after the first, by the kernel's number: a register of 16 bytes if
    /// one begins there (`NFT_REG_1` …), or else one of four bytes (`NFT_REG32_00` …).
    pub(super) const fn behind(words: u32) -> Self {
        if words.is_multiple_of(4) {
            Self(1 + words / 4)
        } else {
            Self(8 + words)
        }
    }

    fn attribute(self, kind: u16) -> Attribute {
        Attribute::number(kind, self.0)
    }
}

/// Keys of `meta`: `NFT_META_*`.
#[derive(Clone, Copy)]
pub(crate) enum Meta {
    Mark = 3,
    Interface = 4,
    OutInterface = 5,
    InterfaceName = 6,
    OutInterfaceName = 7,
    Family = 15,
    Protocol = 16,
    BridgeName = 17,
    OutBridgeName = 18,
    InterfaceGroup = 21,
    OutInterfaceGroup = 22,
    InterfaceKind = 26,
    OutInterfaceKind = 27,
}

/// How a register compares with a value: `NFT_CMP_*`.
#[derive(Clone, Copy)]
pub(crate) enum Is {
    Equal = 0,
    NotEqual = 1,
    AtMost = 3,
    AtLeast = 5,
}

/// Part of a packet, counted from the start of a header: `NFT_PAYLOAD_*`.
#[derive(Clone, Copy)]
pub(super) enum Header {
    Link = 0,
    Network = 1,
    Transport = 2,
}

/// Keys of `ct`: `NFT_CT_*`.
#[derive(Clone, Copy)]
pub(super) enum Connection {
    State = 0,
    Direction = 1,
    Source4 = 19,
    Source6 = 21,
}

/// A direction of a connection: `IP_CT_DIR_*`.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    Original = 0,
    Reply = 1,
}

/// An expression by its name, for expressions without a function in this module.
pub(crate) fn expression(name: &str, data: Vec<Attribute>) -> Attribute {
    let mut parts = vec![Attribute::text(NAME, name)];
    if !data.is_empty() {
        parts.push(Attribute::Nest(DATA, data));
    }
    Attribute::Nest(ELEMENT, parts)
}

fn data(kind: u16, value: &[u8]) -> Attribute {
    Attribute::Nest(kind, vec![Attribute::Value(VALUE, value.to_vec())])
}

/// Loads a property of the packet into a register.
pub(crate) fn meta(key: Meta, to: Register) -> Attribute {
    // NFTA_META_DREG, NFTA_META_KEY.
    let data = vec![to.attribute(1), Attribute::number(2, key as u32)];
    expression("meta", data)
}

/// Stores the first register as a property of the packet.
pub(crate) fn set_meta(key: Meta) -> Attribute {
    // NFTA_META_KEY, NFTA_META_SREG.
    let data = vec![Attribute::number(2, key as u32), FIRST.attribute(3)];
    expression("meta", data)
}

/// Loads bytes of the packet into a register.
pub(super) fn payload(header: Header, offset: u32, length: u32, to: Register) -> Attribute {
    // NFTA_PAYLOAD_DREG, _BASE, _OFFSET, _LEN.
    let data = vec![
        to.attribute(1),
        Attribute::number(2, header as u32),
        Attribute::number(3, offset),
        Attribute::number(4, length),
    ];
    expression("payload", data)
}

/// Loads a property of the packet's connection into the first register.
pub(super) fn connection(key: Connection) -> Attribute {
    // NFTA_CT_DREG, NFTA_CT_KEY.
    let data = vec![FIRST.attribute(1), Attribute::number(2, key as u32)];
    expression("ct", data)
}

/// Loads an address of one direction of the packet's connection into a register.
pub(super) fn connection_address(key: Connection, of: Direction, to: Register) -> Attribute {
    // NFTA_CT_DREG, NFTA_CT_KEY, NFTA_CT_DIRECTION.
    let data = vec![
        to.attribute(1),
        Attribute::number(2, key as u32),
        Attribute::Value(3, vec![of as u8]),
    ];
    expression("ct", data)
}

/// Loads a value into the first register.
pub(crate) fn immediate(value: u32) -> Attribute {
    // NFTA_IMMEDIATE_DREG, NFTA_IMMEDIATE_DATA.
    let data = vec![FIRST.attribute(1), data(2, &value.to_ne_bytes())];
    expression("immediate", data)
}

/// The rule ends with this verdict.
pub(crate) fn verdict(verdict: &Verdict) -> Attribute {
    // NFTA_IMMEDIATE_DREG, NFTA_IMMEDIATE_DATA.
    let data = vec![
        Attribute::number(1, VERDICT_REGISTER),
        verdict_attribute(2, verdict),
    ];
    expression("immediate", data)
}

/// Masks the first register, which has four bytes.
pub(crate) fn and(mask: u32) -> Attribute {
    masked(&mask.to_ne_bytes())
}

/// Masks the first register, which has as many bytes as the mask.
pub(super) fn masked(mask: &[u8]) -> Attribute {
    let bytes = u32::try_from(mask.len()).expect("a register is short");
    // NFTA_BITWISE_SREG, _DREG, _LEN, _MASK, _XOR.
    let data = vec![
        FIRST.attribute(1),
        FIRST.attribute(2),
        Attribute::number(3, bytes),
        data(4, mask),
        data(5, &vec![0; mask.len()]),
    ];
    expression("bitwise", data)
}

/// The rule goes on if the first register compares with `value` as `is` says.
pub(crate) fn compare(is: Is, value: &[u8]) -> Attribute {
    // NFTA_CMP_SREG, _OP, _DATA.
    let data = vec![
        FIRST.attribute(1),
        Attribute::number(2, is as u32),
        data(3, value),
    ];
    expression("cmp", data)
}

/// The rule goes on if the registers are in the set, or if they are not.
pub(super) fn lookup(set: &str, is_inverted: bool) -> Attribute {
    // NFTA_LOOKUP_SET, _SREG, _FLAGS.
    let data = vec![
        Attribute::text(1, set),
        FIRST.attribute(2),
        Attribute::number(5, u32::from(is_inverted)),
    ];
    expression("lookup", data)
}

/// The rule ends with the verdict that the map has for the first register, if it has one.
pub(super) fn verdict_of(map: &str) -> Attribute {
    // NFTA_LOOKUP_SET, _SREG, _DREG, _FLAGS.
    let data = vec![
        Attribute::text(1, map),
        FIRST.attribute(2),
        Attribute::number(3, VERDICT_REGISTER),
        Attribute::number(5, 0),
    ];
    expression("lookup", data)
}

/// Sends a copy of the packet to a netlink group.
pub(super) fn log(text: &str, group: u16) -> Attribute {
    // NFTA_LOG_GROUP, NFTA_LOG_PREFIX.
    let data = vec![
        Attribute::Value(1, group.to_be_bytes().to_vec()),
        Attribute::text(2, text),
    ];
    expression("log", data)
}

/// A counter of this name counts the packet.
pub(super) fn count(counter: &str) -> Attribute {
    // NFTA_OBJREF_IMM_TYPE (NFT_OBJECT_COUNTER), NFTA_OBJREF_IMM_NAME.
    let data = vec![Attribute::number(1, 1), Attribute::text(2, counter)];
    expression("objref", data)
}
