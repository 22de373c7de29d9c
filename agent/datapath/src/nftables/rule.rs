//! Rules about packets of endpoints: what a packet must be, and what becomes of it.

use netpol::render::ruleset::Verdict;

use crate::nf_tables::{
    attribute::Attribute,
    expression::{FIRST, Is, Meta, and, compare, expression, immediate, meta, set_meta, verdict},
    message::RULE_EXPRESSIONS,
};

/// A rule of a chain.
#[derive(Clone, Copy)]
pub(crate) struct Rule<'a> {
    /// What a packet must be.
    pub(crate) conditions: &'a [Condition<'a>],
    /// What is done with it.
    pub(crate) action: Action,
}

/// A condition on a packet.
#[derive(Clone, Copy)]
pub(crate) enum Condition<'a> {
    /// The masked mark is this.
    Masked { mask: u32, is: u32 },
    /// The whole mark is this.
    Is(u32),
    /// The whole mark is not this.
    IsNot(u32),
    /// The interface by which it came is in this group.
    CameByGroup(u32),
    /// Its interface, in a direction, is not in this group.
    NotOfGroup(Way, u32),
    /// Its interface has this name.
    OfInterface(Way, &'a str),
    /// Its interface is a port of the bridge of this name; frames of bridges only.
    OfBridge(Way, &'a str),
    /// Its interface is of this kind, as the kernel calls it.
    OfKind(Way, &'a str),
}

/// Which of a packet's interfaces is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Came,
    Leaves,
}

/// What is done with a packet.
#[derive(Clone, Copy)]
pub(crate) enum Action {
    /// Conntrack does not see it.
    Notrack,
    /// It loses its mark, and the rest of the chain does not see it.
    Unmark,
    /// It is counted and dropped.
    Drop,
}

impl Rule<'_> {
    pub(crate) fn attribute(&self) -> Attribute {
        let mut list = Vec::new();
        for condition in self.conditions {
            match *condition {
                Condition::Masked { mask, is } => {
                    list.extend([load(Meta::Mark), and(mask), equals(is)]);
                }
                Condition::Is(mark) => list.extend([load(Meta::Mark), equals(mark)]),
                Condition::IsNot(mark) => {
                    let is_not = compare(Is::NotEqual, &mark.to_ne_bytes());
                    list.extend([load(Meta::Mark), is_not]);
                }
                Condition::CameByGroup(group) => {
                    list.extend([load(Meta::InterfaceGroup), equals(group)]);
                }
                Condition::NotOfGroup(way, group) => {
                    let key = way.of(Meta::InterfaceGroup, Meta::OutInterfaceGroup);
                    list.extend([load(key), compare(Is::NotEqual, &group.to_ne_bytes())]);
                }
                Condition::OfInterface(way, name) => {
                    let key = way.of(Meta::InterfaceName, Meta::OutInterfaceName);
                    list.extend([load(key), is_named(name)]);
                }
                Condition::OfBridge(way, name) => {
                    let key = way.of(Meta::BridgeName, Meta::OutBridgeName);
                    list.extend([load(key), is_named(name)]);
                }
                Condition::OfKind(way, kind) => {
                    let key = way.of(Meta::InterfaceKind, Meta::OutInterfaceKind);
                    list.extend([load(key), is_named(kind)]);
                }
            }
        }
        match self.action {
            Action::Notrack => list.push(expression("notrack", Vec::new())),
            Action::Unmark => list.extend([
                immediate(0),
                set_meta(Meta::Mark),
                verdict(&Verdict::Accept),
            ]),
            Action::Drop => {
                list.extend([expression("counter", Vec::new()), verdict(&Verdict::Drop)])
            }
        }
        Attribute::List(RULE_EXPRESSIONS, list)
    }

    /// Option of the kernel that the rule needs.
    pub(crate) fn option(&self) -> &'static str {
        let of_bridge = |condition: &Condition<'_>| matches!(condition, Condition::OfBridge(..));
        match self.conditions.iter().any(of_bridge) {
            true => "CONFIG_NFT_BRIDGE_META",
            false => self.action.option(),
        }
    }
}

impl Action {
    const fn option(self) -> &'static str {
        match self {
            Self::Notrack => "CONFIG_NFT_CT",
            Self::Unmark => "CONFIG_NF_TABLES",
            Self::Drop => "CONFIG_NFT_COUNTER (before Linux 5.18)",
        }
    }
}

fn load(key: Meta) -> Attribute {
    meta(key, FIRST)
}

impl Way {
    fn of(self, came: Meta, leaves: Meta) -> Meta {
        match self {
            Self::Came => came,
            Self::Leaves => leaves,
        }
    }
}

/// The kernel has names of interfaces in `IFNAMSIZ` bytes, filled with zeros.
fn is_named(name: &str) -> Attribute {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(libc::IFNAMSIZ, 0);
    compare(Is::Equal, &bytes)
}

fn equals(value: u32) -> Attribute {
    compare(Is::Equal, &value.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWERS: Rule<'_> = Rule {
        conditions: &[Condition::Is(0xb00)],
        action: Action::Notrack,
    };

    #[test]
    fn a_rule_with_another_condition_or_action_is_another_rule() {
        let bytes = |rule: &Rule<'_>| rule.attribute().bytes();
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
