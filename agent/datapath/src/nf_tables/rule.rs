//! Rules of a policy table as expressions of the kernel.

use netpol::{
    policy::Protocol,
    render::ruleset::{Expression, Field, Rule},
};

use super::{
    attribute::Attribute,
    element::value_bytes,
    expression::{
        Connection, FIRST, Header, Is, Meta, Register, and, compare, connection, count, log,
        lookup, meta, payload, verdict, verdict_of,
    },
    message::RULE_EXPRESSIONS,
};

/// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
const IPV4: u8 = 2;
const IPV6: u8 = 10;
/// `IPPROTO_ICMPV6`.
const ICMPV6: u8 = 58;
/// Bits of `ct state`.
const ESTABLISHED: u32 = 2;
const RELATED: u32 = 4;
/// `IP_CT_DIR_REPLY`.
const REPLY: u8 = 1;

/// The expressions of a rule.
pub(super) fn attribute(rule: &Rule) -> Attribute {
    let mut encoder = Encoder::default();
    rule.0
        .iter()
        .for_each(|expression| encoder.push(expression));
    Attribute::List(RULE_EXPRESSIONS, encoder.list)
}

/// Option of the kernel that a rule needs besides those of its table.
pub(super) fn option(rule: &Rule) -> &'static str {
    let has = |is: fn(&Expression) -> bool| rule.0.iter().any(is);
    if has(|expression| matches!(expression, Expression::Answer | Expression::Related)) {
        "CONFIG_NFT_CT"
    } else if has(|expression| matches!(expression, Expression::Log(..))) {
        "CONFIG_NFT_LOG and CONFIG_NETFILTER_NETLINK_LOG"
    } else if has(|expression| matches!(expression, Expression::Count(_))) {
        "CONFIG_NFT_OBJREF (before Linux 6.2)"
    } else {
        "CONFIG_NF_TABLES_INET"
    }
}

/// The list so far, and what it has shown about the packet: a field is read only from a packet that has it.
#[derive(Default)]
struct Encoder {
    list: Vec<Attribute>,
    family: Option<u8>,
    protocol: Option<u8>,
}

impl Encoder {
    fn push(&mut self, expression: &Expression) {
        match expression {
            Expression::Protocol(protocol) => {
                // nft also writes it behind a condition that implies it.
                self.protocol = None;
                self.protocol(protocol.number());
            }
            Expression::Within(field, first, last) => {
                self.load(&[*field]);
                let (first, last) = (value_bytes(*first), value_bytes(*last));
                if first == last {
                    self.list.push(compare(Is::Equal, &first));
                } else {
                    let range = [compare(Is::AtLeast, &first), compare(Is::AtMost, &last)];
                    self.list.extend(range);
                }
            }
            Expression::In(field, set) => {
                self.load(&[*field]);
                self.list.push(lookup(set, false));
            }
            Expression::PairIn(first, second, set) => {
                self.load(&[*first, *second]);
                self.list.push(lookup(set, false));
            }
            Expression::PairNotIn(first, second, set) => {
                self.load(&[*first, *second]);
                self.list.push(lookup(set, true));
            }
            Expression::Answer => {
                let direction = connection(Connection::Direction);
                self.list.extend([direction, compare(Is::Equal, &[REPLY])]);
                self.state(ESTABLISHED | RELATED);
            }
            Expression::Related => self.state(RELATED),
            Expression::NeighbourDiscovery => self.neighbour_discovery(),
            Expression::Count(counter) => self.list.push(count(counter)),
            Expression::Log(text, group) => self.list.push(log(text, *group)),
            Expression::VerdictIn(field, map) => {
                self.load(&[*field]);
                self.list.push(verdict_of(map));
            }
            Expression::Verdict(of) => self.list.push(verdict(of)),
        }
    }

    /// The fields go to the registers, one behind the other.
    fn load(&mut self, fields: &[Field]) {
        for field in fields {
            self.demand(*field);
        }
        let mut words = 0;
        for field in fields {
            let to = Register::behind(words);
            let (load, bytes) = match field {
                Field::Interface => (meta(Meta::Interface, to), 4),
                Field::Source4 => (payload(Header::Network, 12, 4, to), 4),
                Field::Destination4 => (payload(Header::Network, 16, 4, to), 4),
                Field::Source6 => (payload(Header::Network, 8, 16, to), 16),
                Field::Destination6 => (payload(Header::Network, 24, 16, to), 16),
                Field::Port(_) => (payload(Header::Transport, 2, 2, to), 2_u32),
            };
            self.list.push(load);
            words += bytes.div_ceil(4);
        }
    }

    /// The rule goes on with packets only that have this field.
    fn demand(&mut self, field: Field) {
        match field {
            Field::Interface => {}
            Field::Source4 | Field::Destination4 => self.family(IPV4),
            Field::Source6 | Field::Destination6 => self.family(IPV6),
            Field::Port(protocol) => self.protocol(Protocol::number(protocol)),
        }
    }

    fn family(&mut self, family: u8) {
        if self.family.replace(family) != Some(family) {
            let load = meta(Meta::Family, FIRST);
            self.list.extend([load, compare(Is::Equal, &[family])]);
        }
    }

    fn protocol(&mut self, protocol: u8) {
        if self.protocol.replace(protocol) != Some(protocol) {
            let load = meta(Meta::Protocol, FIRST);
            self.list.extend([load, compare(Is::Equal, &[protocol])]);
        }
    }

    fn state(&mut self, any_of: u32) {
        self.list.extend([
            connection(Connection::State),
            and(any_of),
            compare(Is::NotEqual, &0_u32.to_ne_bytes()),
        ]);
    }

    fn neighbour_discovery(&mut self) {
        self.family(IPV6);
        self.protocol(ICMPV6);
        self.list.extend([
            // The type of the ICMPv6 message.
            payload(Header::Transport, 0, 1, FIRST),
            compare(Is::AtLeast, &[133]),
            compare(Is::AtMost, &[137]),
            // The hop limit.
            payload(Header::Network, 7, 1, FIRST),
            compare(Is::Equal, &[255]),
        ]);
    }
}
