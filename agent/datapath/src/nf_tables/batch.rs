//! A change as the messages of one batch.

use netpol::render::{
    change::{Change, Step},
    ruleset::{Element, Entry},
};

use super::{
    attribute::Attribute,
    element,
    message::{Kind, Message, TableName, base_chain},
    rule,
};

/// Maximum number of elements or verdicts in one message: an attribute has at most 64 KiB, and a verdict may have the
/// long name of a chain.
const ELEMENTS: usize = 1000;
const VERDICTS: usize = 100;
/// `NF_INET_PRE_ROUTING`, `NF_INET_LOCAL_IN`, `NF_INET_FORWARD`; the numbers of `NF_BR_*` are the same.
const PRE_ROUTING: u32 = 0;
const INPUT: u32 = 1;
const FORWARD: u32 = 2;
/// `NF_IP_PRI_FILTER`.
const FILTER: i32 = 0;
/// Runs before priority `NF_BR_PRI_BRNF`, at which br_netfilter takes frames.
const FRAMES: i32 = -300;

/// The messages of a change.
pub(super) fn messages(change: &Change) -> Vec<Message> {
    let mut batch = Batch {
        table: TableName(change.family.into(), &change.table),
        sets: 0,
        messages: Vec::with_capacity(change.steps.len()),
    };
    change.steps.iter().for_each(|step| batch.push(step));
    batch.messages
}

/// Attributes of a chain: its hook, if it has one.
pub(super) fn chain(entry: Entry) -> Vec<Attribute> {
    match entry {
        Entry::Jump => Vec::new(),
        Entry::Forward => base_chain(FORWARD, FILTER),
        Entry::Input => base_chain(INPUT, FILTER),
        Entry::Arriving => base_chain(PRE_ROUTING, FRAMES),
        Entry::Leaving => base_chain(FORWARD, FRAMES),
    }
}

struct Batch<'a> {
    table: TableName<'a>,
    /// Number of sets that the batch creates.
    sets: u32,
    messages: Vec<Message>,
}

impl Batch<'_> {
    fn push(&mut self, step: &Step) {
        let table = self.table;
        let message = match step {
            Step::AddTable => table.create(),
            Step::DeleteTable => table.delete(),
            Step::AddCounter(name) => table.create_counter(name),
            Step::AddSet(name, key) => self.create_set(name, element::new_set(*key)),
            Step::AddMap(name, key) => self.create_set(name, element::new_map(*key)),
            Step::AddChain(name, entry) => table.create_chain(name, chain(*entry)),
            Step::FlushChain(name) => table.delete_rules(name),
            Step::AddRule(name, of) => {
                table.append_rule(name, rule::attribute(of), rule::option(of))
            }
            Step::DeleteChain(name) => table.delete_named(Kind::Chain, name),
            Step::DeleteMap(name) | Step::DeleteSet(name) => table.delete_named(Kind::Set, name),
            Step::DeleteCounter(name) => table.delete_named(Kind::Counter, name),
            Step::AddElements(name, elements) => {
                let parts = parts(elements).map(element::elements);
                let messages = parts.map(|part| table.create_elements(name, part));
                return self.messages.extend(messages);
            }
            Step::DeleteElements(name, elements) => {
                let parts = parts(elements).map(element::elements);
                let messages = parts.map(|part| table.delete_elements(name, part));
                return self.messages.extend(messages);
            }
            Step::AddVerdicts(name, pairs) => {
                let parts = pairs.chunks(VERDICTS).map(element::verdicts);
                let messages = parts.map(|part| table.create_elements(name, part));
                return self.messages.extend(messages);
            }
            Step::DeleteVerdicts(name, pairs) => {
                let parts = pairs.chunks(VERDICTS).map(element::verdicts);
                let messages = parts.map(|part| table.delete_elements(name, part));
                return self.messages.extend(messages);
            }
        };
        self.messages.push(message);
    }

    fn create_set(&mut self, name: &str, attributes: Vec<Attribute>) -> Message {
        self.sets += 1;
        self.table.create_set(name, self.sets, attributes)
    }
}

/// A range is two elements in the kernel, and both are in one message.
fn parts(elements: &[Element]) -> std::slice::Chunks<'_, Element> {
    let is_range = matches!(elements.first(), Some(Element::Range(..)));
    elements.chunks(if is_range { ELEMENTS / 2 } else { ELEMENTS })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use netpol::render::ruleset::{Key, TableFamily, Type, Value, Verdict};

    use super::*;

    #[test]
    fn elements_of_any_type_fit_into_their_messages() {
        let address = |n: u32| Value::Ipv6(Ipv6Addr::from_bits(u128::from(n) * 4));
        let of = |element: fn(Value) -> Element| (0..2500).map(address).map(element).collect();
        let chain = "c".repeat(255);
        let verdicts = (0..2500).map(|n| (address(n), Verdict::Jump(chain.clone())));
        let name = String::from;
        let change = Change::of(
            TableFamily::Inet,
            "t",
            vec![
                Step::AddSet(name("pairs"), Key::Pair(Type::Ipv6, Type::Ipv6)),
                Step::AddElements(name("pairs"), of(|value| Element::Pair(value, value))),
                Step::AddElements(name("ranges"), of(|value| Element::Range(value, value))),
                Step::AddVerdicts(name("map"), verdicts.collect()),
            ],
        );
        let messages = messages(&change);
        let mut bytes = Vec::new();
        messages
            .iter()
            .for_each(|message| message.emit(0, 0, &mut bytes));
        assert_eq!(messages.len(), 1 + 3 + 5 + 25);
    }
}
