//! Two netfilter rules that keep redirected queries and the proxy's answers out of the node's NAT.
//!
//! ```text
//!  table inet holdfast_v1
//!    chain pre  type filter hook prerouting priority raw
//!               meta mark & 0xf00 == 0x200  meta mark != 0x200  notrack
//!    chain out  type filter hook output priority raw
//!               meta mark == 0xb00  notrack
//! ```
//! `pre`: a query to an address that the node translates (kube-proxy's ClusterIP) must reach
//! `steer` with its first destination, or it misses the note of it and times out. NAT changes
//! tracked packets only. Mark 0x200 without a proxy port is an answer to a query that a proxy sent
//! under a pod's address (transparent mode): conntrack has seen that query and must see its answer.
//!
//! `out`: answers of a proxy are marked 0xb00 and nothing else. Each would make an entry of
//! nf_conntrack, and that entry would keep the pod's next direct packet of these addresses and
//! ports from being translated. The proxy's own queries carry the identity of the pod in the same
//! mark: they are tracked, and translated in OUTPUT.
//!
//! Only holdfast-agent makes the table; a Cilium agent has rules of its own. [`check`] and
//! [`install`] are all that a reconciler needs: both block for less than a millisecond, use the
//! network namespace of the calling thread, and may be repeated at any time.

mod netlink;

use std::{fmt, io};

use shared_maps::mark::{MAGIC_FROM_EGRESS_PROXY, MAGIC_MASK, MAGIC_TO_PROXY};

use self::netlink::{Attribute, Message, Netfilter};

/// Name of the table. A change of its rules that an older agent must not undo gets a new name.
pub const TABLE: &str = "holdfast_v1";

/// A part of the table that is not as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The table does not exist, or another program made it dormant.
    Table,
    /// The chain of this name is not there, or hooked elsewhere.
    Chain(&'static str),
    /// The chain of this name has not just the rule that it should have.
    Rule(&'static str),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table => write!(f, "nftables table inet {TABLE} is missing or dormant"),
            Self::Chain(chain) => write!(
                f,
                "chain {chain} of nftables table inet {TABLE} is missing or changed"
            ),
            Self::Rule(chain) => write!(
                f,
                "chain {chain} of nftables table inet {TABLE} does not have just its notrack rule"
            ),
        }
    }
}

/// Why the rules could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum NotrackError {
    /// No netlink socket.
    #[error("netlink socket of netfilter: {0}; the kernel needs nf_tables (CONFIG_NF_TABLES)")]
    Socket(#[from] io::Error),
    /// The kernel refused a part.
    #[error(
        "the kernel refuses {what} of nftables table inet {TABLE}: {source}; it needs \
         CONFIG_NF_TABLES_INET and CONFIG_NFT_CT, and the agent CAP_NET_ADMIN"
    )]
    Refused {
        /// The part.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel's answer is cut.
    #[error("netfilter sent an answer that cannot be decoded")]
    Malformed,
}

/// What of the table is missing or changed; none if the rules are in force.
pub fn check() -> Result<Option<Missing>, NotrackError> {
    let mut netfilter = Netfilter::open()?;
    match netfilter.get(&Message::get_table())? {
        Some(table) if table.has(&Attribute::number(netlink::TABLE_FLAGS, 0)) => {}
        _ => return Ok(Some(Missing::Table)),
    }
    for chain in &CHAINS {
        match netfilter.get(&Message::get_chain(chain.name))? {
            Some(found) if chain.attributes().iter().all(|wanted| found.has(wanted)) => {}
            _ => return Ok(Some(Missing::Chain(chain.name))),
        }
        match netfilter.rules(chain.name)?.as_slice() {
            [only] if only.has(&chain.rule()) => {}
            _ => return Ok(Some(Missing::Rule(chain.name))),
        }
    }
    Ok(None)
}

/// Makes the table, in place of what is there under its name, in one step.
pub fn install() -> Result<(), NotrackError> {
    let mut messages = vec![
        // To delete what may not be there: make it first.
        Message::new_table(),
        Message::delete_table(),
        Message::new_table(),
    ];
    for chain in &CHAINS {
        messages.push(Message::new_chain(chain.name, chain.attributes()));
        messages.push(Message::new_rule(chain.name, chain.rule()));
    }
    Netfilter::open()?.commit(&messages)
}

/// Removes the table, as an uninstall does. Gives whether it was there.
pub fn remove() -> Result<bool, NotrackError> {
    let mut netfilter = Netfilter::open()?;
    let was_there = netfilter.get(&Message::get_table())?.is_some();
    netfilter.commit(&[Message::new_table(), Message::delete_table()])?;
    Ok(was_there)
}

/// A chain with its one rule.
struct Chain {
    name: &'static str,
    /// `enum nf_inet_hooks`.
    hook: u32,
    /// What the mark must be for a packet to pass unseen.
    conditions: &'static [Condition],
}

/// A condition on the packet's mark.
#[derive(Clone, Copy)]
enum Condition {
    /// The masked mark is this.
    Masked { mask: u32, is: u32 },
    /// The whole mark is this.
    Is(u32),
    /// The whole mark is not this.
    IsNot(u32),
}

/// `NF_INET_PRE_ROUTING`, `NF_INET_LOCAL_OUT`.
const PRE_ROUTING: u32 = 0;
const LOCAL_OUT: u32 = 3;

const CHAINS: [Chain; 2] = [
    Chain {
        name: "pre",
        hook: PRE_ROUTING,
        conditions: &[
            Condition::Masked {
                mask: MAGIC_MASK,
                is: MAGIC_TO_PROXY,
            },
            Condition::IsNot(MAGIC_TO_PROXY),
        ],
    },
    Chain {
        name: "out",
        hook: LOCAL_OUT,
        conditions: &[Condition::Is(MAGIC_FROM_EGRESS_PROXY)],
    },
];

impl Chain {
    fn attributes(&self) -> Vec<Attribute> {
        netlink::base_chain(self.hook, libc::NF_IP_PRI_RAW)
    }

    fn rule(&self) -> Attribute {
        let mut expressions = Vec::new();
        for condition in self.conditions {
            expressions.push(netlink::load_mark());
            match *condition {
                Condition::Masked { mask, is } => {
                    expressions.push(netlink::and(mask));
                    expressions.push(netlink::compare(netlink::EQUAL, is));
                }
                Condition::Is(mark) => {
                    expressions.push(netlink::compare(netlink::EQUAL, mark));
                }
                Condition::IsNot(mark) => {
                    expressions.push(netlink::compare(netlink::NOT_EQUAL, mark));
                }
            }
        }
        expressions.push(netlink::notrack());
        netlink::expressions(expressions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_parts_are_named_as_in_nft() {
        assert_eq!(
            Missing::Table.to_string(),
            "nftables table inet holdfast_v1 is missing or dormant"
        );
        for missing in [Missing::Chain("pre"), Missing::Rule("pre")] {
            let text = missing.to_string();
            assert!(
                text.starts_with("chain pre of nftables table inet holdfast_v1"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_refusal_names_the_part_and_what_the_kernel_needs() {
        let error = NotrackError::Refused {
            what: "chain pre",
            source: io::Error::from_raw_os_error(libc::EOPNOTSUPP),
        };
        let text = error.to_string();
        for part in ["chain pre", TABLE, "CONFIG_NFT_CT", "CAP_NET_ADMIN"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
