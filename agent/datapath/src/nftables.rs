//! Rules of netfilter about packets of endpoints.
//!
//! ```text
//!  table inet holdfast_v1
//!    chain judged        type filter hook prerouting priority -450
//!                        iifgroup GROUP  meta mark 0  counter drop
//!    chain unmark        type filter hook prerouting priority -449
//!                        iifgroup GROUP  meta mark 0xd00  meta mark set 0  accept
//!    chain to_proxies    type filter hook prerouting priority raw
//!                        meta mark & 0xf00 == 0x200  meta mark != 0x200  notrack
//!    chain from_proxies  type filter hook output priority raw
//!                        meta mark == 0xb00  notrack
//!  table bridge holdfast_v1
//!    chain judged, chain unmark  as above
//!  table arp holdfast_v1
//!    chain judged        type filter hook input priority -450, the rule as above
//! ```
//! `judged`: `from_pod` marks every packet that it passes. A packet without a mark, from an interface of the
//! [group](super::group) of endpoints' interfaces, has not been judged: a pod with `NET_ADMIN` can send through an
//! `ifb` device of its own, and the kernel then runs no program at the node's end. The chain runs before the
//! defragmentation, which would give all fragments the mark of one. In family bridge it also sees the frames that a
//! bridge switches. ARP of a routed pod has a hook of its own.
//!
//! `unmark` runs after `judged`. While a table is made again, a packet may pass a chain of the old table and of the
//! new one, and a packet that has lost its mark must not come to `judged` once more.
//!
//! `to_proxies`: a query to an address that the node translates (kube-proxy's ClusterIP) must reach
//! `steer` with its first destination, or `steer` finds no note of it and the query times out. NAT changes
//! tracked packets only. Mark 0x200 without a proxy port is an answer to a query that a proxy sent
//! under a pod's address (transparent mode): conntrack has seen that query and must see its answer.
//!
//! `from_proxies`: only answers of a proxy are marked 0xb00. Each would make an entry of nf_conntrack, and that entry
//! would keep the pod's next direct packet of these addresses and ports from being translated. The proxy's own
//! queries carry the identity of the pod in the same mark: they are tracked, and translated in OUTPUT.
//!
//! Only holdfast-agent makes the tables; a Cilium agent has its own rules. [`check`] and
//! [`install`] are all that a reconciler needs: both block for less than a millisecond, use the
//! network namespace of the calling thread, and may be repeated at any time.

pub(crate) mod chain;
pub(crate) mod rule;

use std::fmt;

use shared_maps::mark::{JUDGED, MAGIC_FROM_EGRESS_PROXY, MAGIC_MASK, MAGIC_TO_PROXY};

use self::{
    chain::{Chain, Fault},
    rule::{Action, Condition, Rule},
};
pub use super::nf_tables::{Family, NftablesError};
use super::{
    group::GROUP,
    nf_tables::{message::TableName, socket::Netfilter},
};

/// Name of the tables. A change of their rules that an older agent must not undo gets a new name.
pub const TABLE: &str = "holdfast_v1";

/// The table of a family, for messages to people.
pub fn table(family: Family) -> impl fmt::Display {
    name(family)
}

const fn name(family: Family) -> TableName<'static> {
    TableName(family, TABLE)
}

const fn chains(family: Family) -> &'static [Chain<'static>] {
    match family {
        Family::Inet => &[JUDGED_PACKETS, UNMARK, TO_PROXIES, FROM_PROXIES],
        Family::Bridge => &[JUDGED_PACKETS, UNMARK],
        Family::Arp => &[JUDGED_ARP],
    }
}

/// A part of a table that is not as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The table does not exist, or another program made it dormant.
    Table(Family),
    /// The chain of this name is not there, or is hooked elsewhere.
    Chain(Family, &'static str),
    /// The chain of this name has other rules than it should have.
    Rule(Family, &'static str),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(family) => write!(f, "{} is missing or dormant", name(*family)),
            Self::Chain(family, chain) => {
                let table = name(*family);
                write!(f, "chain {chain} of {table} is missing or changed")
            }
            Self::Rule(family, chain) => {
                let table = name(*family);
                write!(
                    f,
                    "the rules of chain {chain} of {table} are not as they should be"
                )
            }
        }
    }
}

/// What of a family's table is missing or changed; `None` if its rules are in force.
pub fn check(family: Family) -> Result<Option<Missing>, NftablesError> {
    let found = chain::check(name(family), chains(family))?;
    Ok(found.map(|fault| match fault {
        Fault::Table => Missing::Table(family),
        Fault::Chain(chain) => Missing::Chain(family, chain),
        Fault::Rule(chain) => Missing::Rule(family, chain),
    }))
}

/// Makes the table of a family in place of what is there under its name, in one step.
pub fn install(family: Family) -> Result<(), NftablesError> {
    Netfilter::open()?.commit(&chain::table(name(family), chains(family)))
}

/// Makes the tables that are not as they should be. The others stay, so that a restart changes nothing.
pub fn install_missing() -> Result<(), NftablesError> {
    for family in Family::ALL {
        if check(family)?.is_some() {
            install(family)?;
        }
    }
    Ok(())
}

/// Removes the table of a family, as an uninstall does. Gives whether it was there.
pub fn remove(family: Family) -> Result<bool, NftablesError> {
    chain::remove(name(family))
}

/// `NF_INET_PRE_ROUTING`, `NF_INET_LOCAL_OUT`, `NF_ARP_IN`.
const PRE_ROUTING: u32 = 0;
const LOCAL_OUT: u32 = 3;
const ARP_IN: u32 = 0;

const JUDGED_PACKETS: Chain<'_> = Chain {
    name: "judged",
    hook: PRE_ROUTING,
    priority: libc::NF_IP_PRI_RAW_BEFORE_DEFRAG,
    rules: &[NOT_JUDGED],
};

const UNMARK: Chain<'_> = Chain {
    name: "unmark",
    hook: PRE_ROUTING,
    priority: libc::NF_IP_PRI_RAW_BEFORE_DEFRAG + 1,
    rules: &[Rule {
        conditions: &[Condition::CameByGroup(GROUP), Condition::Is(JUDGED)],
        action: Action::Unmark,
    }],
};

/// The mark of ARP ends here.
const JUDGED_ARP: Chain<'_> = Chain {
    name: "judged",
    hook: ARP_IN,
    priority: libc::NF_IP_PRI_RAW_BEFORE_DEFRAG,
    rules: &[NOT_JUDGED],
};

const NOT_JUDGED: Rule<'_> = Rule {
    conditions: &[Condition::CameByGroup(GROUP), Condition::Is(0)],
    action: Action::Drop,
};

const TO_PROXIES: Chain<'_> = Chain {
    name: "to_proxies",
    hook: PRE_ROUTING,
    priority: libc::NF_IP_PRI_RAW,
    rules: &[Rule {
        conditions: &[
            Condition::Masked {
                mask: MAGIC_MASK,
                is: MAGIC_TO_PROXY,
            },
            Condition::IsNot(MAGIC_TO_PROXY),
        ],
        action: Action::Notrack,
    }],
};

const FROM_PROXIES: Chain<'_> = Chain {
    name: "from_proxies",
    hook: LOCAL_OUT,
    priority: libc::NF_IP_PRI_RAW,
    rules: &[Rule {
        conditions: &[Condition::Is(MAGIC_FROM_EGRESS_PROXY)],
        action: Action::Notrack,
    }],
};

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn missing_parts_are_named_as_in_nft() {
        assert_eq!(
            Missing::Table(Family::Inet).to_string(),
            "nftables table inet holdfast_v1 is missing or dormant"
        );
        for missing in [
            Missing::Chain(Family::Bridge, "pre"),
            Missing::Rule(Family::Bridge, "pre"),
        ] {
            let text = missing.to_string();
            assert!(
                text.contains("chain pre of nftables table bridge holdfast_v1"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_refusal_names_the_part_and_what_the_kernel_needs() {
        let error = NftablesError::Refused {
            what: format!("chain pre of {}", table(Family::Inet)),
            option: "CONFIG_NFT_CT",
            source: io::Error::from_raw_os_error(libc::EOPNOTSUPP),
        };
        let text = error.to_string();
        for part in ["chain pre", TABLE, "CONFIG_NFT_CT", "CAP_NET_ADMIN"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
