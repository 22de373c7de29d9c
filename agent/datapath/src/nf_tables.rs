//! nf_tables by netlink: batches of changes, listings, reports. The program `nft` is not needed.
//!
//! ```text
//!  netpol::render: Table ─► Change ─► batch ─┐
//!                                 rule, element ─► message (attribute, expression) ─► socket ─► kernel
//!  crate::nftables: rules of the programs ───┘                                          │
//!                            listing: is the kernel's table the one that should be? ◄───┘
//! ```
//! A [`Connection`] sends one batch for a change: the kernel applies all of it or nothing. Other tables
//! are not touched.

pub(crate) mod attribute;
mod batch;
mod counters;
mod element;
pub(crate) mod expression;
mod listing;
pub(crate) mod message;
mod outline;
mod probe;
mod rule;
pub(crate) mod socket;
mod table_events;

use std::{collections::BTreeMap, io};

use netpol::render::{
    change::Change,
    ruleset::{Table, TableFamily},
};

use self::socket::Netfilter;
pub use self::{listing::Difference, message::Family, table_events::TableEvents};

/// Why tables could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum NftablesError {
    /// The socket of `NETLINK_NETFILTER` cannot be opened or used.
    #[error("netlink socket of netfilter: {0}; the kernel needs nf_tables (CONFIG_NF_TABLES)")]
    Socket(#[from] io::Error),
    /// The kernel refused a part.
    #[error("the kernel refuses {what}: {source}; it needs {option}, and the agent CAP_NET_ADMIN")]
    Refused {
        /// The refused part and its table.
        what: String,
        /// Option of the kernel that the part needs.
        option: &'static str,
        source: io::Error,
    },
    /// The kernel's answer is truncated.
    #[error("netfilter sent an answer that cannot be decoded")]
    Malformed,
    /// The kernel lacks parts.
    #[error("the kernel cannot hold a table of policies: it lacks {}", .0.join(", "))]
    Lacks(Vec<&'static str>),
}

/// Changes and reads tables in the network namespace of the thread that opened
/// it. Every call blocks until the kernel has answered: less than a millisecond for a change of some
/// elements, about a second for a million.
#[derive(Debug)]
pub struct Connection(Netfilter);

impl Connection {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open() -> Result<Self, NftablesError> {
        Netfilter::open().map(Self)
    }

    /// The netlink port by which [`TableEvents`] recognises changes of this connection.
    pub const fn port(&self) -> u32 {
        self.0.port()
    }

    /// Whether the kernel can hold the table of policies of a family. Changes nothing.
    pub fn probe(&mut self, family: TableFamily) -> Result<(), NftablesError> {
        probe::probe(&mut self.0, family)
    }

    /// Makes all of these changes at once, or nothing.
    pub fn commit(&mut self, changes: &[Change]) -> Result<(), NftablesError> {
        self.0.commit(&messages(changes))
    }

    /// Whether the kernel would accept these changes. Changes nothing.
    pub fn dry_run(&mut self, changes: &[Change]) -> Result<(), NftablesError> {
        self.0.check(&messages(changes))
    }

    /// The first part of the kernel's table that differs from `wanted`; `None` if they are equal. A
    /// table that is wanted empty must not exist.
    pub fn difference(&mut self, wanted: &Table) -> Result<Option<Difference>, NftablesError> {
        listing::compare(&mut self.0, wanted)
    }

    /// Reads the kernel's table that has the name of `wanted` into a [`Table`]: everything except
    /// rules that `wanted` does not have, and objects of other types.
    pub fn outline(&mut self, wanted: &Table) -> Result<Table, NftablesError> {
        outline::read(&mut self.0, wanted)
    }

    /// Packets that each counter of a table has counted since it was made.
    pub fn counters(
        &mut self,
        family: TableFamily,
        table: &str,
    ) -> Result<BTreeMap<String, u64>, NftablesError> {
        counters::read(&mut self.0, family, table)
    }
}

fn messages(changes: &[Change]) -> Vec<message::Message> {
    changes.iter().flat_map(batch::messages).collect()
}
