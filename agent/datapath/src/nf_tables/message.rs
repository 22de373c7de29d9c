//! Messages about one table and the objects in it (`linux/netfilter/nf_tables.h`).

use std::fmt;

use netpol::render::ruleset::TableFamily;

use super::attribute::Attribute;

/// `NFNL_SUBSYS_NFTABLES`.
pub(super) const NFTABLES: u16 = 10;
/// Bytes of `nlmsghdr` and of `nfgenmsg`.
pub(super) const HEADER: usize = 16;
pub(super) const FAMILY_HEADER: usize = 4;

/// `NLM_F_REQUEST`, `NLM_F_CREATE`, `NLM_F_APPEND`.
const REQUEST: u16 = 0x1;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

/// `NFT_MSG_*`.
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const GET_CHAIN: u16 = 4;
const DELETE_CHAIN: u16 = 5;
const NEW_RULE: u16 = 6;
const GET_RULE: u16 = 7;
const DELETE_RULE: u16 = 8;
const NEW_SET: u16 = 9;
const GET_SET: u16 = 10;
const DELETE_SET: u16 = 11;
const NEW_ELEMENTS: u16 = 12;
const GET_ELEMENTS: u16 = 13;
const DELETE_ELEMENTS: u16 = 14;
const NEW_OBJECT: u16 = 18;
const GET_OBJECT: u16 = 19;
const DELETE_OBJECT: u16 = 20;

/// `NFTA_*_TABLE` and `NFTA_TABLE_NAME`.
pub(super) const OF_TABLE: u16 = 1;
/// `NFTA_TABLE_FLAGS`.
pub(crate) const TABLE_FLAGS: u16 = 2;
/// `NFTA_CHAIN_NAME`, `_HOOK`, `_POLICY`, `_TYPE`; `NFTA_HOOK_HOOKNUM`, `_PRIORITY`.
const CHAIN_NAME: u16 = 3;
pub(super) const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
/// `NF_ACCEPT`.
const ACCEPT: u32 = 1;
/// `NFTA_RULE_CHAIN`, `_EXPRESSIONS`.
pub(super) const RULE_CHAIN: u16 = 2;
pub(crate) const RULE_EXPRESSIONS: u16 = 4;
/// `NFTA_SET_NAME`, `_FLAGS`, `_KEY_TYPE`, `_KEY_LEN`, `_DATA_TYPE`, `_DATA_LEN`, `_ID`, `_USERDATA`.
const SET_NAME: u16 = 2;
pub(super) const SET_FLAGS: u16 = 3;
pub(super) const SET_KEY_TYPE: u16 = 4;
pub(super) const SET_KEY_LENGTH: u16 = 5;
pub(super) const SET_DATA_TYPE: u16 = 6;
const SET_ID: u16 = 10;
pub(super) const SET_USERDATA: u16 = 13;
/// `NFTA_SET_ELEM_LIST_SET`, `_ELEMENTS`.
const ELEMENTS_OF: u16 = 2;
pub(super) const ELEMENTS: u16 = 3;
/// `NFTA_OBJ_NAME`, `_TYPE`, `_DATA`; `NFT_OBJECT_COUNTER`.
const OBJECT_NAME: u16 = 2;
const OBJECT_TYPE: u16 = 3;
pub(super) const OBJECT_DATA: u16 = 4;
const COUNTER: u32 = 1;

/// Families of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4 and IPv6 packets, in one table.
    Inet,
    /// Frames at ports of bridges.
    Bridge,
    /// ARP for the node itself.
    Arp,
}

impl From<TableFamily> for Family {
    fn from(family: TableFamily) -> Self {
        match family {
            TableFamily::Inet => Self::Inet,
            TableFamily::Bridge => Self::Bridge,
        }
    }
}

impl Family {
    pub const ALL: [Self; 3] = [Self::Inet, Self::Bridge, Self::Arp];

    /// `NFPROTO_*`.
    const fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Arp => 3,
            Self::Bridge => 7,
        }
    }

    /// Option without which the kernel has no tables of the family.
    const fn option(self) -> &'static str {
        match self {
            Self::Inet => "CONFIG_NF_TABLES_INET",
            Self::Bridge => "CONFIG_NF_TABLES_BRIDGE",
            Self::Arp => "CONFIG_NF_TABLES_ARP",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Bridge => "bridge",
            Self::Arp => "arp",
        })
    }
}

/// A table: its family and its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableName<'a>(pub(crate) Family, pub(crate) &'a str);

impl fmt::Display for TableName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nftables table {} {}", self.0, self.1)
    }
}

/// A message about a table or an object in it.
pub(crate) struct Message {
    family: Family,
    /// The object and its table, as an error names them.
    pub(super) what: String,
    /// Option of the kernel without which it refuses the message.
    pub(super) option: &'static str,
    kind: u16,
    flags: u16,
    /// Encoded attributes: the smallest form, because there may be many elements.
    attributes: Vec<u8>,
}

/// The kinds of objects that have names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chain,
    /// A set or a map: no map has the name of a set.
    Set,
    Counter,
}

impl Kind {
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Chain => "chain",
            Self::Set => "set",
            Self::Counter => "counter",
        }
    }

    pub(super) const fn name(self) -> u16 {
        match self {
            Self::Chain => CHAIN_NAME,
            Self::Set => SET_NAME,
            Self::Counter => OBJECT_NAME,
        }
    }
}

impl TableName<'_> {
    pub(crate) fn create(self) -> Message {
        let flags = vec![Attribute::number(TABLE_FLAGS, 0)];
        self.message("the head", NEW_TABLE, CREATE, flags)
    }

    pub(crate) fn delete(self) -> Message {
        self.message("the removal", DELETE_TABLE, 0, Vec::new())
    }

    pub(crate) fn get(self) -> Message {
        self.message("the reading", GET_TABLE, 0, Vec::new())
    }

    /// Creates a chain that only other chains jump to, or a chain with a hook (see [`base_chain`]).
    pub(crate) fn create_chain(self, name: &str, attributes: Vec<Attribute>) -> Message {
        self.named(Kind::Chain, name, NEW_CHAIN, CREATE, attributes)
    }

    pub(crate) fn get_chain(self, name: &str) -> Message {
        self.named(Kind::Chain, name, GET_CHAIN, 0, Vec::new())
    }

    /// Adds a rule after the others of its chain. `option`: what the kernel needs for its expressions.
    pub(crate) fn append_rule(
        self,
        chain: &str,
        expressions: Attribute,
        option: &'static str,
    ) -> Message {
        let attributes = vec![Attribute::text(RULE_CHAIN, chain), expressions];
        let what = format!("a rule of chain {chain}");
        let message = self.message(&what, NEW_RULE, CREATE | APPEND, attributes);
        Message { option, ..message }
    }

    pub(super) fn delete_rules(self, chain: &str) -> Message {
        let attributes = vec![Attribute::text(RULE_CHAIN, chain)];
        self.message(
            &format!("the rules of chain {chain}"),
            DELETE_RULE,
            0,
            attributes,
        )
    }

    /// The rules of a chain, or of all chains.
    pub(crate) fn list_rules(self, chain: Option<&str>) -> Message {
        let chain = chain.map(|chain| Attribute::text(RULE_CHAIN, chain));
        let attributes = chain.into_iter().collect();
        self.message("the list of rules", GET_RULE, 0, attributes)
    }

    /// Creates a set. `id` differs from that of each other set of the batch.
    pub(super) fn create_set(self, name: &str, id: u32, attributes: Vec<Attribute>) -> Message {
        let mut all = vec![Attribute::number(SET_ID, id)];
        all.extend(attributes);
        self.named(Kind::Set, name, NEW_SET, CREATE, all)
    }

    pub(super) fn create_elements(self, set: &str, elements: Vec<Attribute>) -> Message {
        self.elements(set, NEW_ELEMENTS, CREATE, Some(elements))
    }

    pub(super) fn delete_elements(self, set: &str, elements: Vec<Attribute>) -> Message {
        self.elements(set, DELETE_ELEMENTS, 0, Some(elements))
    }

    pub(super) fn list_elements(self, set: &str) -> Message {
        self.elements(set, GET_ELEMENTS, 0, None)
    }

    pub(super) fn create_counter(self, name: &str) -> Message {
        let attributes = vec![counter_type(), Attribute::Nest(OBJECT_DATA, Vec::new())];
        let message = self.named(Kind::Counter, name, NEW_OBJECT, CREATE, attributes);
        let option = "CONFIG_NFT_COUNTER (before Linux 5.18)";
        Message { option, ..message }
    }

    pub(super) fn delete_named(self, kind: Kind, name: &str) -> Message {
        let (message, attributes) = match kind {
            Kind::Chain => (DELETE_CHAIN, Vec::new()),
            Kind::Set => (DELETE_SET, Vec::new()),
            Kind::Counter => (DELETE_OBJECT, vec![counter_type()]),
        };
        self.named(kind, name, message, 0, attributes)
    }

    /// All objects of a kind. The kernel also gives chains of other tables of the family.
    pub(super) fn list(self, kind: Kind) -> Message {
        let message = match kind {
            Kind::Chain => GET_CHAIN,
            Kind::Set => GET_SET,
            Kind::Counter => GET_OBJECT,
        };
        self.message(
            &format!("the list of {}s", kind.text()),
            message,
            0,
            Vec::new(),
        )
    }

    fn elements(
        self,
        set: &str,
        kind: u16,
        flags: u16,
        elements: Option<Vec<Attribute>>,
    ) -> Message {
        let mut attributes = vec![Attribute::text(ELEMENTS_OF, set)];
        attributes.extend(elements.map(|elements| Attribute::List(ELEMENTS, elements)));
        self.message(&format!("elements of set {set}"), kind, flags, attributes)
    }

    fn named(
        self,
        kind: Kind,
        name: &str,
        message: u16,
        flags: u16,
        attributes: Vec<Attribute>,
    ) -> Message {
        let mut all = vec![Attribute::text(kind.name(), name)];
        all.extend(attributes);
        self.message(&format!("{} {name}", kind.text()), message, flags, all)
    }

    fn message(self, what: &str, kind: u16, flags: u16, attributes: Vec<Attribute>) -> Message {
        let mut bytes = Vec::new();
        Attribute::text(OF_TABLE, self.1).emit(&mut bytes);
        for attribute in attributes {
            attribute.emit(&mut bytes);
        }
        Message {
            family: self.0,
            what: format!("{what} of {self}"),
            option: self.0.option(),
            kind: (NFTABLES << 8) | kind,
            flags,
            attributes: bytes,
        }
    }
}

impl Message {
    pub(super) fn emit(&self, sequence: u32, flags: u16, to: &mut Vec<u8>) {
        let flags = self.flags | flags;
        put(
            to,
            self.kind,
            flags,
            sequence,
            self.family.number(),
            0,
            &self.attributes,
        );
    }
}

/// The attribute that distinguishes a counter from other objects.
pub(super) fn counter_type() -> Attribute {
    Attribute::number(OBJECT_TYPE, COUNTER)
}

/// Type, hook and policy of a chain.
pub(crate) fn base_chain(hook: u32, priority: i32) -> Vec<Attribute> {
    vec![
        Attribute::Nest(
            CHAIN_HOOK,
            vec![
                Attribute::number(HOOK_NUMBER, hook),
                Attribute::Value(HOOK_PRIORITY, priority.to_be_bytes().to_vec()),
            ],
        ),
        Attribute::number(CHAIN_POLICY, ACCEPT),
        Attribute::text(CHAIN_TYPE, "filter"),
    ]
}

/// Appends a message: `nlmsghdr`, `nfgenmsg`, attributes.
pub(super) fn put(
    to: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    sequence: u32,
    family: u8,
    resource: u16,
    attributes: &[u8],
) {
    let start = to.len();
    to.extend([0; 4]);
    to.extend(kind.to_ne_bytes());
    to.extend((flags | REQUEST).to_ne_bytes());
    to.extend(sequence.to_ne_bytes());
    to.extend([0; 4]);
    to.extend([family, 0]);
    to.extend(resource.to_be_bytes());
    to.extend(attributes);
    let length = u32::try_from(to.len() - start).expect("messages here are short");
    to[start..start + 4].copy_from_slice(&length.to_ne_bytes());
}
