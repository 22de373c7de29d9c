//! Hops from an address to the entry of the policy map that decides.

use std::net::IpAddr;

use agent_core::{
    core::why::{AddressFound, outcome::Outcome, peer_found::PeerFound},
    policy::trace::{
        FlowDirection, Port, RuleView, Verdict, after_tier, port_range, protocol_name,
    },
};
use shared_maps::policy::{PolicyKey, PolicyValue};

use super::{
    End, STATUS, Walk,
    elsewhere::{node_port_unchecked, not_checked},
    hop,
    service::Judged,
};
use crate::admin::{
    model::{Hop, HopState},
    why::{AddressRead, Entries, Read, Receiver, backends::opposite},
};

impl Walk<'_> {
    pub(super) fn ipcache(&self, found: &AddressFound, read: &AddressRead) -> Hop {
        let at = found.address;
        let hop = |state, text: String, remedy: &str| hop("ipcache", Some(at), state, text, remedy);
        if let Some(carried) = &read.carried {
            let text = format!(
                "source of identity {}, which came by the tunnel {} ms ago and counts in the place of the ipcache's",
                carried.identity, carried.age_ms
            );
            return hop(HopState::Found, text, "");
        }
        let shall = match &found.prefix {
            Some(prefix) => format!(
                "{} by {prefix} of {}",
                found.wanted,
                found.owners.join(", ")
            ),
            None => format!("{}, the world", found.world),
        };
        let has = match &read.ipcache {
            Ok(has) => has.unwrap_or(found.world),
            Err(why) => {
                let text = format!("{why}; the agent wants identity {shall}");
                return hop(HopState::Unknown, text, "");
            }
        };
        let wanted = if found.prefix.is_some() {
            found.wanted
        } else {
            found.world
        };
        if found.limited && has == wanted {
            let text = format!(
                "cilium_ipcache_v2 has identity {shall}, of some of the address's names only: \
                 their combination got no identity of its own (circuit breaker)"
            );
            let remedy = "fewer overlapping names in policy, or a higher --tofqdns-max-identities";
            return hop(HopState::Missing, text, remedy);
        }
        if found.unresolved && !found.limited {
            let text = format!(
                "cilium_ipcache_v2 has identity {has}, older than the address's labels: they got \
                 no identity"
            );
            let remedy = "local identities are used up: `status`";
            return hop(HopState::Missing, text, remedy);
        }
        if has == wanted {
            let text = format!("cilium_ipcache_v2 has identity {shall}");
            return hop(HopState::Found, text, "");
        }
        let text = format!("cilium_ipcache_v2 has identity {has}; the intended one is {shall}");
        let remedy = if found.given == Some(wanted) {
            "the entry was written, and is gone: another program changes the map"
        } else {
            STATUS
        };
        hop(HopState::Missing, text, remedy)
    }

    pub(super) fn identity(&self, found: &AddressFound, read: &AddressRead) -> Hop {
        let at = Some(found.address);
        let Some(labels) = &read.peer.labels else {
            let text = format!(
                "{} has no owner: the agent has no labels for it",
                read.identity
            );
            let remedy = "the map's entry is of an earlier run, or of another program";
            return hop("identity", at, HopState::Missing, text, remedy);
        };
        let mut selectors: Vec<&str> = Vec::new();
        for rule in &read.peer.about {
            let selector = rule.selector.as_deref().unwrap_or("everyone");
            if !selectors.contains(&selector) {
                selectors.push(selector);
            }
        }
        let text = format!("{} is {}", read.identity, labels.join(","));
        if read.peer.service.is_some() {
            // Policy is about the pods behind the Service.
            return hop("identity", at, HopState::Found, text, "");
        }
        if selectors.is_empty() && self.restricted().is_some() {
            let text = format!("{text}; no selector of the policy selects it");
            if let Some(block) = read.blocks.first() {
                let remedy = format!(
                    "a block covers its address, but means no pods or nodes: {block}; add a rule \
                     with labels"
                );
                return hop("identity", at, HopState::Missing, text, &remedy);
            }
            let may_be_unread = labels.iter().any(|label| label == "reserved:unmanaged");
            if self.found.is_pruned && may_be_unread {
                let text = format!(
                    "{text}; if a pod of another node has it, its labels are not known, because this node is pruned \
                     (--high-scale-prune)"
                );
                let remedy = match self.question.direction {
                    FlowDirection::Egress => "add an egress rule with its block (toCIDR)",
                    FlowDirection::Ingress => {
                        "its labels come with its packets; ask again within two seconds of one"
                    }
                };
                return hop("identity", at, HopState::Missing, text, remedy);
            }
            let remedy = match self.question.direction {
                FlowDirection::Egress => {
                    "add an egress rule about it: by name, toCIDR, toEntities or toEndpoints"
                }
                FlowDirection::Ingress => {
                    "add an ingress rule about it: fromCIDR, fromEntities or fromEndpoints"
                }
            };
            return hop("identity", at, HopState::Missing, text, remedy);
        }
        let text = match selectors.as_slice() {
            [] => text,
            list => format!("{text}; selected by {}", list.join(", ")),
        };
        hop("identity", at, HopState::Found, text, "")
    }

    pub(super) fn policy_map(&self, found: &AddressFound, read: &AddressRead) -> Hop {
        let map = format!("cilium_policy_v2_{:05}", self.found.endpoint.id);
        let peer = format!("identity {}", read.identity);
        self.entries(
            ("policy-map", found.address),
            &map,
            &peer,
            &read.peer,
            &read.entries,
        )
    }

    pub(super) fn receiver(&self, found: &AddressFound, receiver: &Receiver) -> Hop {
        let direction = opposite(self.question.direction).as_str();
        let map = format!("cilium_policy_v2_{:05} ({direction})", receiver.endpoint.0);
        let peer = format!("identity {}", self.found.endpoint.identity);
        self.entries(
            (self.other_role(), found.address),
            &map,
            &peer,
            &receiver.peer,
            &receiver.entries,
        )
    }

    /// The hop about a side that another node judges.
    pub(super) fn unchecked_hop(&self, found: &AddressFound, read: &AddressRead) -> Option<Hop> {
        if let Some(node_port) = &read.node_port {
            return self.other_node_port(found.address, node_port);
        }
        let elsewhere = found.elsewhere.as_ref()?;
        let unchecked = self.unchecked(found.address, elsewhere, self.question.port);
        Some(self.other_node(found.address, &unchecked))
    }

    fn entries(
        &self,
        (name, at): (&str, IpAddr),
        map: &str,
        peer: &str,
        policy: &PeerFound,
        entries: &Read<Entries>,
    ) -> Hop {
        let hop = |state, text: String, remedy: &str| hop(name, Some(at), state, text, remedy);
        let entries = match entries {
            Ok(entries) => entries,
            Err(why) => return hop(HopState::Unknown, why.clone(), ""),
        };
        let Some(port) = self.question.port else {
            return if entries.open.is_empty() {
                let text = format!("{map} lets nothing pass for {peer}");
                hop(HopState::Missing, text, &self.remedy(policy, None))
            } else {
                let open = open_ports(&entries.open).join(", ");
                hop(
                    HopState::Found,
                    format!("{map} lets pass for {peer}: {open}"),
                    "",
                )
            };
        };
        let shall = policy.verdict.is_none_or(Verdict::passes);
        match &entries.decides {
            None => {
                let text = format!("{map} has no entry for {peer} and {port}");
                let remedy = if shall {
                    "policy allows it: the entry is not written yet, or another program removed it; "
                        .to_owned()
                        + STATUS
                } else {
                    self.remedy(policy, Some(port))
                };
                hop(HopState::Missing, text, &remedy)
            }
            Some((key, value)) if value.is_deny() => {
                let text = format!("{map} denies: {}", entry(*key, *value));
                let remedy = if shall {
                    "policy does not deny it: ".to_owned() + STATUS
                } else {
                    String::new()
                };
                hop(HopState::Missing, text, &remedy)
            }
            Some((key, value)) => {
                let mut text = format!("{map} lets it pass: {}", entry(*key, *value));
                if !shall {
                    text.push_str("; policy does not: ");
                    text.push_str(STATUS);
                }
                hop(HopState::Found, text, "")
            }
        }
    }

    /// What would open a port that no rule opens.
    fn remedy(&self, policy: &PeerFound, port: Option<Port>) -> String {
        let allows = policy.about.iter().filter(|rule| rule.says != "deny");
        let allows: Vec<String> = allows.map(ToString::to_string).collect();
        match (allows.is_empty(), port) {
            (false, Some(port)) => format!(
                "rules about it name other ports: {}; add {} to one of them",
                allows.join("; "),
                port
            ),
            _ => "no rule is about it: add one".to_owned(),
        }
    }

    pub(super) fn end(
        &self,
        found: &AddressFound,
        read: &AddressRead,
        backends: &[Judged<'_>],
        missing: Option<&Hop>,
    ) -> End {
        let at = found.address;
        let (sends, by) = self.passes(&read.entries, &read.peer);
        let by = match missing {
            Some(hop) if hop.hop == "ipcache" => hop.text.clone(),
            _ => by,
        };
        let text = match sends {
            None => format!("{at}: its policy map cannot be read"),
            Some(false) => format!("{at}: dropped: {by}"),
            Some(true) => format!("{at}: passes: {by}"),
        };
        let mut end = End::new(Outcome::of(sends), text);
        self.add_backends(at, &mut end, read, backends);
        if sends == Some(true) {
            self.judge_other_side(found, read, &mut end);
        }
        end
    }

    /// Adds how the other side judges packets that this side lets pass.
    fn judge_other_side(&self, found: &AddressFound, read: &AddressRead, end: &mut End) {
        let at = found.address;
        let node_port = read.node_port.as_ref();
        let other_port = node_port.and_then(|found| found.elsewhere.as_ref());
        let unchecked = match (&found.elsewhere, other_port) {
            (Some(elsewhere), _) => Some(self.unchecked(at, elsewhere, self.question.port)),
            (None, Some(node)) => Some(node_port_unchecked(at, node)),
            (None, None) => None,
        };
        if let Some(unchecked) = unchecked {
            end.outcome = Outcome::Unchecked;
            end.text = format!("{}; {}", end.text, not_checked(&unchecked));
            end.unchecked.push(unchecked);
        }
        let Some(receiver) = &read.receiver else {
            return;
        };
        let (passes, by) = self.passes(&receiver.entries, &receiver.peer);
        let id = receiver.endpoint.0;
        end.outcome = Outcome::of(passes);
        let who = self.other_role();
        match passes {
            Some(true) => {}
            Some(false) => end.text = format!("{at}: endpoint {id} drops it: {by}"),
            None => end.text = format!("{at}: the {who}'s policy map cannot be read"),
        }
    }

    /// Whether packets pass to an address of the name before its first answer.
    pub(super) fn unknown_address_passes(&self) -> bool {
        let mut sides = self.outside.iter();
        let passes = sides.all(|(peer, entries)| self.passes(entries, peer).0 == Some(true));
        // The first answer closes its addresses.
        let mut by_name = self.found.by_name.iter();
        passes && !by_name.any(RuleView::is_tier_deny)
    }

    /// Why packets to addresses outside the cluster pass, as text.
    pub(super) fn outside_passes(&self) -> String {
        if self.restricted().is_none() && !self.found.has_tier {
            return format!("{} is not restricted", self.direction());
        }
        let sides = self.outside.iter();
        let mut said: Vec<String> = sides
            .map(|(peer, entries)| self.passes(entries, peer).1)
            .collect();
        said.dedup();
        format!(
            "no address of it is known; addresses outside pass: {}",
            said.join("; ")
        )
    }

    /// Whether the kernel's map lets packets pass, and why.
    pub(super) fn passes(
        &self,
        entries: &Read<Entries>,
        policy: &PeerFound,
    ) -> (Option<bool>, String) {
        let Ok(entries) = entries else {
            return (None, String::new());
        };
        let passes = match policy.verdict.is_some() || self.question.port.is_some() {
            false => !entries.open.is_empty(),
            true => entries
                .decides
                .as_ref()
                .is_some_and(|(_, value)| !value.is_deny()),
        };
        let rules: Vec<String> = policy.by.iter().map(ToString::to_string).collect();
        let rules = rules.join("; ");
        let text = match policy.verdict {
            None if passes => open_ports(&entries.open).join(", "),
            None => "no rule opens a port to it".to_owned(),
            Some(verdict) => {
                let said = after_tier(policy.tier.as_ref(), said(verdict, &rules));
                match verdict.passes() == passes {
                    true => said,
                    false => format!("the kernel's map is not as policy says ({said})"),
                }
            }
        };
        (Some(passes), text)
    }
}

fn said(verdict: Verdict, rules: &str) -> String {
    match verdict {
        Verdict::Allowed => format!("allowed by {rules}"),
        Verdict::Proxied => format!("through the DNS proxy by {rules}"),
        Verdict::Denied => format!("denied by {rules}"),
        Verdict::NoRule => "no rule allows it".to_owned(),
        Verdict::NotRestricted => "no rule denies it, and nothing else is restricted".to_owned(),
        Verdict::FromNode => "packets that the node itself makes need no rule; one that it \
             translates is judged by its first sender"
            .to_owned(),
    }
}

fn entry(key: PolicyKey, value: PolicyValue) -> String {
    let peer = match key.sec_label {
        0 => "anyone".to_owned(),
        id => format!("identity {id}"),
    };
    let through = match value.proxy_port.get() {
        0 => String::new(),
        port => format!(", to the DNS proxy at port {port}"),
    };
    format!("{peer}, {}{through}", ports(key))
}

fn ports(key: PolicyKey) -> String {
    match key.protocol {
        0 => "everything".to_owned(),
        number => format!(
            "{}/{}",
            port_range(key.dport.get(), key.lpm_len()),
            protocol_name(number)
        ),
    }
}

fn open_ports(open: &[(PolicyKey, PolicyValue)]) -> Vec<String> {
    let text = |(key, value): &(PolicyKey, PolicyValue)| match value.proxy_port.get() {
        0 => ports(*key),
        _ => format!("{} through the DNS proxy", ports(*key)),
    };
    let mut texts: Vec<String> = open.iter().map(text).collect();
    texts.dedup();
    texts
}
