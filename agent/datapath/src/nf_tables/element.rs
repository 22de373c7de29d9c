//! Sets and their elements in the kernel's form: encoding and decoding.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, Ipv6Addr},
};

use netpol::render::ruleset::{Element, Key, Type, Value, Verdict};

use super::{
    attribute::{Attribute, ELEMENT, children, find},
    message::{SET_DATA_TYPE, SET_FLAGS, SET_KEY_LENGTH, SET_KEY_TYPE, SET_USERDATA},
};

/// `NFTA_SET_ELEM_KEY`, `_DATA`, `_FLAGS`; `NFT_SET_ELEM_INTERVAL_END`.
const KEY: u16 = 1;
const DATA: u16 = 2;
const FLAGS: u16 = 3;
const END: u32 = 1;
/// `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`; `NFTA_VERDICT_CODE`, `NFTA_VERDICT_CHAIN`.
const VALUE: u16 = 1;
const VERDICT: u16 = 2;
const CODE: u16 = 1;
const CHAIN: u16 = 2;
/// `NF_DROP`, `NF_ACCEPT`, `NFT_JUMP`, `NFT_RETURN`.
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
const JUMP: u32 = (-3_i32).cast_unsigned();
const RETURN: u32 = (-5_i32).cast_unsigned();
/// `NFT_SET_INTERVAL`, `NFT_SET_MAP`; `NFT_DATA_VERDICT`.
const INTERVAL: u32 = 0x4;
const MAP: u32 = 0x8;
const VERDICTS: u32 = 0xffff_ff00;
/// nft's note of the byte order of keys: type, length, then the byte order of the machine or of the network.
const KEY_ORDER: [u8; 2] = [0, 4];
const MACHINE: u32 = 1;
const NETWORK: u32 = 2;

/// Attributes of a set with these keys, as the kernel lists them.
pub(super) fn set(key: Key) -> Vec<Attribute> {
    let (flags, first, second) = match key {
        Key::One(of) => (0, of, None),
        Key::Pair(first, second) => (0, first, Some(second)),
        Key::Ranges(of) => (INTERVAL, of, None),
    };
    declaration(flags, first, second)
}

/// Attributes of a verdict map with these keys.
pub(super) fn map(key: Type) -> Vec<Attribute> {
    let mut attributes = declaration(MAP, key, None);
    attributes.push(Attribute::number(SET_DATA_TYPE, VERDICTS));
    attributes
}

fn declaration(flags: u32, first: Type, second: Option<Type>) -> Vec<Attribute> {
    let (number, length) = match second {
        None => (number(first), length(first)),
        Some(second) => (
            (number(first) << 6) | number(second),
            length(first).next_multiple_of(4) + length(second).next_multiple_of(4),
        ),
    };
    let length = u32::try_from(length).expect("keys are short");
    let mut attributes = vec![
        Attribute::number(SET_KEY_TYPE, number),
        Attribute::number(SET_KEY_LENGTH, length),
    ];
    // The kernel does not list the attribute if no flag is set.
    if flags != 0 {
        attributes.push(Attribute::number(SET_FLAGS, flags));
    }
    attributes
}

/// Attributes of a set to create: the attributes that identify it, and nft's note about its keys.
pub(super) fn new_set(key: Key) -> Vec<Attribute> {
    let mut attributes = set(key);
    if let Key::One(of) | Key::Ranges(of) = key {
        attributes.push(note(of));
    }
    attributes
}

/// Attributes of a verdict map to create.
pub(super) fn new_map(key: Type) -> Vec<Attribute> {
    let mut attributes = map(key);
    attributes.push(note(key));
    attributes
}

/// Byte order of the keys, as nft notes it: without it, nft lists them wrongly.
fn note(key: Type) -> Attribute {
    let order = if key == Type::Interface {
        MACHINE
    } else {
        NETWORK
    };
    let note = [&KEY_ORDER[..], &order.to_ne_bytes()].concat();
    Attribute::Value(SET_USERDATA, note)
}

/// Elements of a set. A range is two elements: its first value, and the value after its last.
pub(super) fn elements(elements: &[Element]) -> Vec<Attribute> {
    let mut attributes = Vec::new();
    for element in elements {
        match *element {
            Element::One(value) => attributes.push(member(&value_bytes(value), Vec::new())),
            Element::Pair(first, second) => {
                let mut key = value_bytes(first);
                key.resize(key.len().next_multiple_of(4), 0);
                key.extend(value_bytes(second));
                key.resize(key.len().next_multiple_of(4), 0);
                attributes.push(member(&key, Vec::new()));
            }
            Element::Range(first, last) => {
                attributes.push(member(&value_bytes(first), Vec::new()));
                let end = vec![Attribute::number(FLAGS, END)];
                let behind = last.next();
                attributes.extend(behind.map(|behind| member(&value_bytes(behind), end)));
            }
        }
    }
    attributes
}

/// Elements of a verdict map.
pub(super) fn verdicts(pairs: &[(Value, Verdict)]) -> Vec<Attribute> {
    let pairs = pairs.iter();
    let attributes = pairs.map(|(value, verdict)| {
        let data = vec![verdict_attribute(DATA, verdict)];
        member(&value_bytes(*value), data)
    });
    attributes.collect()
}

fn member(key: &[u8], more: Vec<Attribute>) -> Attribute {
    let key = vec![Attribute::Value(VALUE, key.to_vec())];
    let mut parts = vec![Attribute::Nest(KEY, key)];
    parts.extend(more);
    Attribute::Nest(ELEMENT, parts)
}

/// A verdict as data of a rule or of an element.
pub(super) fn verdict_attribute(kind: u16, verdict: &Verdict) -> Attribute {
    let (code, chain) = match verdict {
        Verdict::Accept => (ACCEPT, None),
        Verdict::Drop => (DROP, None),
        Verdict::Return => (RETURN, None),
        Verdict::Jump(chain) => (JUMP, Some(chain)),
    };
    let mut parts = vec![Attribute::number(CODE, code)];
    parts.extend(chain.map(|chain| Attribute::text(CHAIN, chain)));
    Attribute::Nest(kind, vec![Attribute::Nest(VERDICT, parts)])
}

/// A value as a register has it.
pub(super) fn value_bytes(value: Value) -> Vec<u8> {
    match value {
        Value::Interface(index) => index.to_ne_bytes().to_vec(),
        Value::Ipv4(address) => address.octets().to_vec(),
        Value::Ipv6(address) => address.octets().to_vec(),
        Value::Port(number) | Value::EtherType(number) => number.to_be_bytes().to_vec(),
    }
}

fn value(of: Type, bytes: &[u8]) -> Option<Value> {
    match of {
        Type::Interface => Some(Value::Interface(u32::from_ne_bytes(bytes.try_into().ok()?))),
        Type::Ipv4 => Some(Value::Ipv4(<[u8; 4]>::try_from(bytes).ok()?.into())),
        Type::Ipv6 => Some(Value::Ipv6(<[u8; 16]>::try_from(bytes).ok()?.into())),
        Type::Port => Some(Value::Port(u16::from_be_bytes(bytes.try_into().ok()?))),
        Type::EtherType => Some(Value::EtherType(u16::from_be_bytes(bytes.try_into().ok()?))),
    }
}

/// nft's numbers of the types.
const fn number(of: Type) -> u32 {
    match of {
        Type::Ipv4 => 7,
        Type::Ipv6 => 8,
        Type::EtherType => 10,
        Type::Port => 13,
        Type::Interface => 20,
    }
}

/// Bytes of a value.
const fn length(of: Type) -> usize {
    match of {
        Type::Ipv4 | Type::Interface => 4,
        Type::Ipv6 => 16,
        Type::Port | Type::EtherType => 2,
    }
}

/// The elements in the kernel's lists; `None` if an element does not have the type of the set.
pub(super) fn read<'a>(
    key: Key,
    lists: impl Iterator<Item = &'a [u8]>,
) -> Option<BTreeSet<Element>> {
    let members = lists.flat_map(children).map(|(_, member)| member);
    match key {
        Key::One(of) => members
            .map(|member| Some(Element::One(value(of, key_of(member)?)?)))
            .collect(),
        Key::Pair(first, second) => members
            .map(|member| read_pair(first, second, key_of(member)?))
            .collect(),
        Key::Ranges(of) => read_ranges(of, members),
    }
}

fn read_pair(first: Type, second: Type, key: &[u8]) -> Option<Element> {
    let (head, rest) = key.split_at_checked(length(first).next_multiple_of(4))?;
    let first = value(first, head.get(..length(first))?)?;
    let second = value(second, rest.get(..length(second))?)?;
    Some(Element::Pair(first, second))
}

/// Joins starts and ends of ranges, which the kernel lists in no fixed order.
fn read_ranges<'a>(of: Type, members: impl Iterator<Item = &'a [u8]>) -> Option<BTreeSet<Element>> {
    let mut marks = BTreeSet::new();
    for member in members {
        let is_start = find(member, FLAGS).is_none_or(|flags| flags != END.to_be_bytes());
        // At one value, the end of a range comes before the start of the next.
        marks.insert((value(of, key_of(member)?)?, is_start));
    }
    let mut ranges = BTreeSet::new();
    let mut open = None;
    for (value, is_start) in marks {
        match (open, is_start) {
            (None, true) => open = Some(value),
            (Some(first), false) => {
                ranges.insert(Element::Range(first, value.previous()?));
                open = None;
            }
            // nft puts an end before the first range.
            (None, false) => {}
            (Some(_), true) => return None,
        }
    }
    ranges.extend(open.map(|first| Element::Range(first, last(of))));
    Some(ranges)
}

const fn last(of: Type) -> Value {
    match of {
        Type::Interface => Value::Interface(u32::MAX),
        Type::Ipv4 => Value::Ipv4(Ipv4Addr::BROADCAST),
        Type::Ipv6 => Value::Ipv6(Ipv6Addr::from_bits(u128::MAX)),
        Type::Port => Value::Port(u16::MAX),
        Type::EtherType => Value::EtherType(u16::MAX),
    }
}

/// Like [`read`], for a verdict map.
pub(super) fn read_verdicts<'a>(
    key: Type,
    lists: impl Iterator<Item = &'a [u8]>,
) -> Option<BTreeMap<Value, Verdict>> {
    let members = lists.flat_map(children).map(|(_, member)| member);
    members
        .map(|member| {
            let verdict = find(find(member, DATA)?, VERDICT)?;
            Some((value(key, key_of(member)?)?, read_verdict(verdict)?))
        })
        .collect()
}

fn read_verdict(verdict: &[u8]) -> Option<Verdict> {
    let code = u32::from_be_bytes(find(verdict, CODE)?.try_into().ok()?);
    match code {
        ACCEPT => Some(Verdict::Accept),
        DROP => Some(Verdict::Drop),
        RETURN => Some(Verdict::Return),
        JUMP => {
            let chain = find(verdict, CHAIN)?.strip_suffix(&[0])?;
            Some(Verdict::Jump(String::from_utf8(chain.to_vec()).ok()?))
        }
        _ => None,
    }
}

fn key_of(member: &[u8]) -> Option<&[u8]> {
    find(find(member, KEY)?, VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(attributes: &[Attribute]) -> Vec<u8> {
        let parts = attributes.iter().map(Attribute::bytes);
        parts.collect::<Vec<_>>().concat()
    }

    fn address(last: u8) -> Value {
        Value::Ipv4(Ipv4Addr::new(255, 255, 255, last))
    }

    #[test]
    fn elements_are_read_as_they_are_written() {
        let key = Key::Pair(Type::Port, Type::Ipv6);
        let six = Value::Ipv6(Ipv6Addr::LOCALHOST);
        let pairs = BTreeSet::from([80, 443].map(|port| Element::Pair(Value::Port(port), six)));
        let written = list(&elements(&pairs.iter().copied().collect::<Vec<_>>()));
        assert_eq!(read(key, [written.as_slice()].into_iter()), Some(pairs));
        // Another type has other lengths.
        let other = Key::One(Type::Ipv6);
        assert_eq!(read(other, [written.as_slice()].into_iter()), None);
    }

    #[test]
    fn ranges_are_read_in_any_order() {
        let ranges = [(0, 0), (1, 7), (9, 9), (200, 255)];
        let ranges = ranges.map(|(first, last)| Element::Range(address(first), address(last)));
        let mut attributes = elements(&ranges);
        assert_eq!(attributes.len(), 7, "the last has no end");
        attributes.reverse();
        let written = list(&attributes);
        let found = read(Key::Ranges(Type::Ipv4), [written.as_slice()].into_iter());
        assert_eq!(found, Some(BTreeSet::from(ranges)));
        let starts = [Element::One(address(1)), Element::One(address(2))];
        let written = list(&elements(&starts));
        let found = read(Key::Ranges(Type::Ipv4), [written.as_slice()].into_iter());
        assert_eq!(found, None, "two starts without an end");
    }

    #[test]
    fn verdicts_are_read_as_they_are_written() {
        let jump = Verdict::Jump("i_a".to_owned());
        let pairs = [jump, Verdict::Accept, Verdict::Drop, Verdict::Return];
        let pairs: Vec<_> = (1..).map(address).zip(pairs).collect();
        let written = list(&verdicts(&pairs));
        let found = read_verdicts(Type::Ipv4, [written.as_slice()].into_iter());
        assert_eq!(found, Some(pairs.into_iter().collect()));
    }
}
