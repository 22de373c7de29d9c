//! nf_tables by netlink: batches of changes, listings, reports. The program `nft` is not needed.
//!
//! ```text
//!  netpol::render: Table ─► Change ─► batch ─┐
//!                                 rule, element ─► message (attribute, expression) ─► socket ─► kernel
//!  crate::nftables: rules of the programs ───┘                                          │
//!                            listing: is the kernel's table the one that should be? ◄───┘
//! ```
//! A [`Connection`] writes one batch for a change: the kernel makes all of it or nothing. Other tables
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

use netpol::render::{change::Change, ruleset::Table};

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
    /// The kernel's answer is cut.
    #[error("netfilter sent an answer that cannot be decoded")]
    Malformed,
    /// The kernel lacks parts.
    #[error("the kernel cannot hold a table of policies: it lacks {}", .0.join(", "))]
    Lacks(Vec<&'static str>),
}

/// Changes and reads tables of family `inet` in one network namespace: that of the thread that opened
/// it. Every call blocks until the kernel has answered: less than a millisecond for a change of some
/// elements, about a second for a million.
#[derive(Debug)]
pub struct Connection(Netfilter);

impl Connection {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open() -> Result<Self, NftablesError> {
        Netfilter::open().map(Self)
    }

    /// The number by which [`TableEvents`] know changes of this connection.
    pub const fn port(&self) -> u32 {
        self.0.port()
    }

    /// Whether the kernel can hold a table of policies. Changes nothing.
    pub fn probe(&mut self) -> Result<(), NftablesError> {
        probe::probe(&mut self.0)
    }

    /// Makes all of a change, or nothing.
    pub fn commit(&mut self, change: &Change) -> Result<(), NftablesError> {
        self.0.commit(&batch::messages(change))
    }

    /// Whether the kernel would accept a change. Changes nothing.
    pub fn dry_run(&mut self, change: &Change) -> Result<(), NftablesError> {
        self.0.check(&batch::messages(change))
    }

    /// The first part of the kernel's table that differs from `wanted`; none if it is just this table.
    pub fn difference(&mut self, wanted: &Table) -> Result<Option<Difference>, NftablesError> {
        listing::compare(&mut self.0, wanted)
    }

    /// What can be read as values of the kernel's table with the name of `wanted`: everything but rules
    /// that `wanted` does not have, and objects of other types.
    pub fn outline(&mut self, wanted: &Table) -> Result<Table, NftablesError> {
        outline::read(&mut self.0, wanted)
    }

    /// Packets that each counter of a table has counted since it was made.
    pub fn counters(&mut self, table: &str) -> Result<BTreeMap<String, u64>, NftablesError> {
        counters::read(&mut self.0, table)
    }
}
