//! Audits that the addresses of every released answer are in the ipcache. Addresses in prefixes
//! that no answer may open are not checked. Other addresses may be missing, but no more of them
//! than the number of answers that the proxies counted as released before the agent had opened
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use agent_core::fqdn::refused::RefusedPrefixes;
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::lab::Lab;
use crate::received_answers::Answer;
use crate::wait::eventually;

/// Lowest identity number of CIDR and FQDN label sets.
const LOCAL: u64 = 1 << 24;
/// Counters of a proxy for answers that it releases before the agent has plumbed them.
const EXCUSES: [&str; 4] = ["agent_away", "late", "not_realised", "held_full"];

impl Lab {
    /// Counts the addresses of valid answers for names below `zone` that have no ipcache entry with a
    /// local identity (CIDR or FQDN). Fails if they are more than the answers that the proxies with these
    /// metrics ports counted under one of [`EXCUSES`]. Returns the number of addresses.
    pub fn audit(&self, zone: &str, proxies: &[u16]) -> Result<usize> {
        // The agent does not take part, because it may be down or hang.
        let missing = self.unplumbed(zone, None)?;
        let mut excused = 0.0;
        for port in proxies {
            for excuse in EXCUSES {
                let label = format!("result=\"{excuse}\"");
                excused += self.metric(*port, "holdfast_dns_answers_total", &label)?;
            }
        }
        let number = f64::from(u32::try_from(missing.len())?);
        ensure!(
            number <= excused,
            "{missing:?} lack an entry, the proxies count {excused} exceptions"
        );
        Ok(missing.len())
    }

    /// Waits, at most `limit`, until every address has an entry. An early release excuses a missing
    /// entry only for a while.
    pub fn audit_settled(&self, zone: &str, limit: Duration) -> Result<()> {
        eventually("every answer's addresses are in the ipcache", limit, || {
            let missing = self.unplumbed(zone, Some(&self.identities()?))?;
            ensure!(missing.is_empty(), "{missing:?} lack an entry");
            Ok(())
        })
    }

    /// Names and addresses from answers to pods, if the address has no local identity or, with
    /// `labels`, no FQDN identity.
    fn unplumbed(
        &self,
        zone: &str,
        labels: Option<&BTreeMap<u64, String>>,
    ) -> Result<BTreeSet<(String, IpAddr)>> {
        // Answers first: an answer that arrives while the map is read may not be in it yet.
        let answers: Vec<Answer> = [&self.a, &self.b]
            .iter()
            .flat_map(|pod| pod.answers.valid(zone))
            .collect();
        let entries = self.ipcache()?;
        let refused = RefusedPrefixes::default();
        let mut missing = BTreeSet::new();
        for answer in answers {
            let addresses = answer.addresses.into_iter();
            for address in addresses.filter(|address| refused.covering(*address).is_none()) {
                let identity = entries.get(&address);
                let plumbed = identity.is_some_and(|identity| {
                    *identity >= LOCAL
                        && labels.is_none_or(|labels| {
                            labels
                                .get(identity)
                                .is_some_and(|labels| labels.contains("fqdn:"))
                        })
                });
                if !plumbed {
                    missing.insert((answer.name.clone(), address));
                }
            }
        }
        Ok(missing)
    }

    /// Identities of single addresses, straight from the map.
    pub fn ipcache(&self) -> Result<BTreeMap<IpAddr, u64>> {
        let listing = self.bpf_json(&["ipcache", "list"])?;
        let lines = listing.as_array().context("no list")?;
        let entry = |line: &Value| {
            let prefix = line.get("prefix")?.as_str()?;
            let (address, length) = prefix.split_once('/')?;
            let address: IpAddr = address.parse().ok()?;
            let whole = if address.is_ipv4() { "32" } else { "128" };
            let identity = line.get("identity")?.as_u64()?;
            (length == whole).then_some((address, identity))
        };
        Ok(lines.iter().filter_map(entry).collect())
    }
}
