//! Rules of a policy table as expressions of the kernel.

use netpol::{
    policy::Protocol,
    render::ruleset::{Expression, Field, Rule, Value},
};

use super::{
    attribute::Attribute,
    element::value_bytes,
    expression::{
        Connection, Direction, FIRST, Header, Is, Meta, Register, and, compare, connection,
        connection_address as of_connection, count, log, lookup, masked, meta, payload, verdict,
        verdict_of,
    },
    message::RULE_EXPRESSIONS,
};

/// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
const IPV4: u8 = 2;
const IPV6: u8 = 10;
/// `ETH_P_IP`, `ETH_P_IPV6`.
const FRAME_OF_IPV4: u16 = 0x0800;
const FRAME_OF_IPV6: u16 = 0x86dd;
/// `IPPROTO_TCP`, `IPPROTO_ICMPV6`.
const TCP: u8 = 6;
const ICMPV6: u8 = 58;
/// Bits of `ct state`.
const ESTABLISHED: u32 = 2;
const RELATED: u32 = 4;
const NEW: u32 = 8;
/// Flags of a TCP segment.
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
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

/// Option of the kernel that a rule needs besides the options of its table.
pub(super) fn option(rule: &Rule) -> &'static str {
    let has = |is: fn(&Expression) -> bool| rule.0.iter().any(is);
    if has(|expression| {
        matches!(
            expression,
            Expression::Answer | Expression::Related | Expression::MiddleOfTcp
        )
    }) {
        "CONFIG_NFT_CT"
    } else if has(|expression| matches!(expression, Expression::Log(..))) {
        "CONFIG_NFT_LOG and CONFIG_NETFILTER_NETLINK_LOG"
    } else if has(|expression| matches!(expression, Expression::Count(_))) {
        "CONFIG_NFT_OBJREF (before Linux 6.2)"
    } else {
        "CONFIG_NF_TABLES_INET"
    }
}

/// The expressions so far, and what they have shown about the packet: a field is read only from a packet that has it.
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
                // nft also writes this condition after one that implies it.
                self.protocol = None;
                self.protocol(protocol.number());
            }
            Expression::Numbered(number) => {
                self.protocol = None;
                self.protocol(*number);
            }
            Expression::Within(field, first, last) => self.within(*field, *first, *last),
            Expression::In(field, set) => {
                self.load(&[*field]);
                self.list.push(lookup(set, false));
            }
            Expression::NotIn(field, set) => {
                self.load(&[*field]);
                self.list.push(lookup(set, true));
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
                self.state(ESTABLISHED);
            }
            Expression::Related => self.state(RELATED),
            Expression::MiddleOfTcp => self.middle_of_tcp(),
            Expression::Icmp6(kind) => {
                self.family(IPV6);
                self.protocol(ICMPV6);
                let load = payload(Header::Transport, 0, 1, FIRST);
                self.list.extend([load, compare(Is::Equal, &[*kind])]);
            }
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

    fn within(&mut self, field: Field, first: Value, last: Value) {
        self.load(&[field]);
        let (from, to) = (value_bytes(first), value_bytes(last));
        if first == last {
            self.list.push(compare(Is::Equal, &from));
        } else {
            let range = [compare(Is::AtLeast, &from), compare(Is::AtMost, &to)];
            self.list.extend(range);
        }
        self.family = match (first, last) {
            (Value::EtherType(FRAME_OF_IPV4), Value::EtherType(FRAME_OF_IPV4)) => Some(IPV4),
            (Value::EtherType(FRAME_OF_IPV6), Value::EtherType(FRAME_OF_IPV6)) => Some(IPV6),
            _ => self.family,
        };
    }

    /// The fields go to the registers, one after the other.
    fn load(&mut self, fields: &[Field]) {
        for field in fields {
            self.demand(*field);
        }
        let mut words = 0;
        for field in fields {
            let to = Register::behind(words);
            let (load, bytes) = match field {
                Field::Interface => (meta(Meta::Interface, to), 4),
                Field::OutInterface => (meta(Meta::OutInterface, to), 4),
                Field::EtherType => (payload(Header::Link, 12, 2, to), 2_u32),
                Field::Opener4 => (
                    of_connection(Connection::Source4, Direction::Original, to),
                    4,
                ),
                Field::Opener6 => (
                    of_connection(Connection::Source6, Direction::Original, to),
                    16,
                ),
                Field::Answerer4 => (of_connection(Connection::Source4, Direction::Reply, to), 4),
                Field::Answerer6 => (of_connection(Connection::Source6, Direction::Reply, to), 16),
                Field::Source4 => (payload(Header::Network, 12, 4, to), 4),
                Field::Destination4 => (payload(Header::Network, 16, 4, to), 4),
                Field::Source6 => (payload(Header::Network, 8, 16, to), 16),
                Field::Destination6 => (payload(Header::Network, 24, 16, to), 16),
                Field::Port(_) => (payload(Header::Transport, 2, 2, to), 2),
            };
            self.list.push(load);
            words += bytes.div_ceil(4);
        }
    }

    /// Lets the rule go on only with packets that have this field.
    fn demand(&mut self, field: Field) {
        match field {
            Field::Interface | Field::OutInterface | Field::EtherType => {}
            Field::Source4 | Field::Destination4 | Field::Opener4 | Field::Answerer4 => {
                self.family(IPV4);
            }
            Field::Source6 | Field::Destination6 | Field::Opener6 | Field::Answerer6 => {
                self.family(IPV6);
            }
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

    fn middle_of_tcp(&mut self) {
        self.state(NEW);
        self.protocol(TCP);
        self.list.extend([
            payload(Header::Transport, 13, 1, FIRST),
            masked(&[FIN | SYN | RST | ACK]),
            compare(Is::NotEqual, &[SYN]),
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
