//! Rules as lists of expressions: what a packet must be, and what becomes of it
//! (`linux/netfilter/nf_tables.h`).

use super::netlink::{Attribute, ELEMENT, RULE_EXPRESSIONS};

/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`.
const NAME: u16 = 1;
const DATA: u16 = 2;
/// `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`; `NFTA_VERDICT_CODE`.
const VALUE: u16 = 1;
const VERDICT: u16 = 2;
const CODE: u16 = 1;
/// `NFT_REG_VERDICT`, `NFT_REG_1`.
const VERDICT_REGISTER: u32 = 0;
const REGISTER: u32 = 1;
/// `NFT_META_MARK`, `NFT_META_IIFGROUP`.
const MARK: u32 = 3;
const GROUP_OF_ARRIVAL: u32 = 21;
/// `NFT_CMP_EQ`, `NFT_CMP_NEQ`.
const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;
/// `NF_DROP`, `NF_ACCEPT`.
const DROP: u32 = 0;
const ACCEPT: u32 = 1;

/// A rule of a chain.
pub(super) struct Rule {
    /// What a packet must be.
    pub(super) conditions: &'static [Condition],
    /// What is done with it.
    pub(super) action: Action,
}

/// A condition on a packet.
#[derive(Clone, Copy)]
pub(super) enum Condition {
    /// The masked mark is this.
    Masked { mask: u32, is: u32 },
    /// The whole mark is this.
    Is(u32),
    /// The whole mark is not this.
    IsNot(u32),
    /// The interface by which it came is in this group.
    CameByGroup(u32),
}

/// What is done with a packet.
#[derive(Clone, Copy)]
pub(super) enum Action {
    /// Conntrack does not see it.
    Notrack,
    /// It loses its mark, and the rest of the chain does not see it.
    Unmark,
    /// It is counted and dropped.
    Drop,
}

impl Rule {
    pub(super) fn attribute(&self) -> Attribute {
        let mut list = Vec::new();
        for condition in self.conditions {
            match *condition {
                Condition::Masked { mask, is } => {
                    list.extend([load(MARK), and(mask), compare(EQUAL, is)]);
                }
                Condition::Is(mark) => list.extend([load(MARK), compare(EQUAL, mark)]),
                Condition::IsNot(mark) => list.extend([load(MARK), compare(NOT_EQUAL, mark)]),
                Condition::CameByGroup(group) => {
                    list.extend([load(GROUP_OF_ARRIVAL), compare(EQUAL, group)]);
                }
            }
        }
        match self.action {
            Action::Notrack => list.push(expression("notrack", Vec::new())),
            Action::Unmark => list.extend([value(0), store(MARK), verdict(ACCEPT)]),
            Action::Drop => list.extend([expression("counter", Vec::new()), verdict(DROP)]),
        }
        Attribute::List(RULE_EXPRESSIONS, list)
    }
}

fn expression(name: &str, data: Vec<Attribute>) -> Attribute {
    let mut parts = vec![Attribute::text(NAME, name)];
    if !data.is_empty() {
        parts.push(Attribute::Nest(DATA, data));
    }
    Attribute::Nest(ELEMENT, parts)
}

fn data(kind: u16, value: u32) -> Attribute {
    let value = Attribute::Value(VALUE, value.to_ne_bytes().to_vec());
    Attribute::Nest(kind, vec![value])
}

/// Something about the packet goes to the register.
fn load(key: u32) -> Attribute {
    // NFTA_META_DREG, NFTA_META_KEY.
    let data = vec![Attribute::number(1, REGISTER), Attribute::number(2, key)];
    expression("meta", data)
}

/// What is in the register goes to the packet.
fn store(key: u32) -> Attribute {
    // NFTA_META_KEY, NFTA_META_SREG.
    let data = vec![Attribute::number(2, key), Attribute::number(3, REGISTER)];
    expression("meta", data)
}

/// A value goes to the register.
fn value(value: u32) -> Attribute {
    // NFTA_IMMEDIATE_DREG, NFTA_IMMEDIATE_DATA.
    let data = vec![Attribute::number(1, REGISTER), data(2, value)];
    expression("immediate", data)
}

/// The rule ends with this verdict.
fn verdict(code: u32) -> Attribute {
    let verdict = Attribute::Nest(VERDICT, vec![Attribute::number(CODE, code)]);
    // NFTA_IMMEDIATE_DREG, NFTA_IMMEDIATE_DATA.
    let data = vec![
        Attribute::number(1, VERDICT_REGISTER),
        Attribute::Nest(2, vec![verdict]),
    ];
    expression("immediate", data)
}

/// What is in the register, masked.
fn and(mask: u32) -> Attribute {
    // NFTA_BITWISE_SREG, _DREG, _LEN, _MASK, _XOR.
    let data = vec![
        Attribute::number(1, REGISTER),
        Attribute::number(2, REGISTER),
        Attribute::number(3, 4),
        data(4, mask),
        data(5, 0),
    ];
    expression("bitwise", data)
}

/// The rule goes on if the register compares so with `value`.
fn compare(how: u32, value: u32) -> Attribute {
    // NFTA_CMP_SREG, _OP, _DATA.
    let data = vec![
        Attribute::number(1, REGISTER),
        Attribute::number(2, how),
        data(3, value),
    ];
    expression("cmp", data)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWERS: Rule = Rule {
        conditions: &[Condition::Is(0xb00)],
        action: Action::Notrack,
    };

    #[test]
    fn a_rule_with_another_condition_or_action_is_another_rule() {
        let bytes = |rule: &Rule| rule.attribute().bytes();
        assert!(ANSWERS.attribute().is_in(&bytes(&ANSWERS)));
        let other = |conditions, action| Rule { conditions, action };
        for changed in [
            other(&[Condition::Is(0xc00)], Action::Notrack),
            other(&[Condition::IsNot(0xb00)], Action::Notrack),
            other(&[Condition::CameByGroup(0xb00)], Action::Notrack),
            other(&[], Action::Notrack),
            other(&[Condition::Is(0xb00)], Action::Drop),
            other(&[Condition::Is(0xb00)], Action::Unmark),
            other(
                &[Condition::Is(0xb00), Condition::Is(0xb00)],
                Action::Notrack,
            ),
        ] {
            assert!(!ANSWERS.attribute().is_in(&bytes(&changed)));
            assert!(!changed.attribute().is_in(&bytes(&ANSWERS)));
        }
    }
}
