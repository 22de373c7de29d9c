//! The walk itself: each hop in words, from what was found. It reads nothing else, so that tests can check the words.

mod asking;
mod elsewhere;
mod programs;
mod reaching;
mod service;

use std::net::IpAddr;

use agent_core::{
    core::why::{Findings, Target, outcome::Outcome},
    datapath::map_query::ProgramFault,
    policy::trace::{FlowDirection, RuleView},
};
use dns_policy::boot_time::BootTime;

use super::{AddressRead, LxcRead, Question, Read, SideRead};
use crate::admin::model::{BackendView, Hop, HopState, UncheckedView, Why};

/// The question, with all findings that the hops are judged by.
pub(super) struct Walk<'a> {
    pub question: &'a Question,
    pub found: &'a Findings,
    pub lxc: &'a Read<Vec<LxcRead>>,
    /// Faults of the endpoint's programs in the kernel.
    pub programs: &'a [ProgramFault],
    pub read: &'a [AddressRead],
    /// For a name: an unknown address outside the cluster, one for each family.
    pub outside: &'a [SideRead],
    /// Whether a DNS proxy tells the agent what it learns.
    pub learning: bool,
    pub now: BootTime,
}

/// Maximum addresses that are shown one by one, of the open ones and of the closed ones.
const SHOWN: usize = 16;

/// What becomes of packets to one address.
struct End {
    outcome: Outcome,
    text: String,
    backends: Vec<BackendView>,
    unchecked: Vec<UncheckedView>,
}

impl End {
    fn new(outcome: Outcome, text: String) -> Self {
        Self {
            outcome,
            text,
            backends: Vec::new(),
            unchecked: Vec::new(),
        }
    }
}

const STATUS: &str = "`holdfast-agent status` and the log say what could not be written";

impl Walk<'_> {
    pub(super) fn why(&self) -> Why {
        let mut hops = vec![self.endpoint(), self.programs(), self.policy()];
        if self.question.direction == FlowDirection::Egress {
            hops.extend(self.open_families());
        }
        let name = match &self.question.target {
            Target::Name(name) => Some(name.as_str().trim_end_matches('.')),
            Target::Address(_) => None,
        };
        let dns = name.and_then(|name| self.dns(name));
        let asks = dns
            .as_ref()
            .is_none_or(|hop| hop.state != HopState::Missing);
        hops.extend(dns);
        let early = hops.len();
        match (name, &self.found.service) {
            (Some(name), Some(service)) => hops.push(self.name_of_service(name, service)),
            _ => {
                hops.extend(name.map(|name| self.selector(name)));
                hops.push(self.names(name));
            }
        }
        let late = hops.len();
        let ends = self.addresses(&mut hops);
        let outcome = self.outcome(asks, &ends);
        let allowed = outcome.passes();
        let middle = hops.get_mut(early..late).unwrap_or_default();
        if allowed {
            calm(middle);
        } else if !asks {
            middle.iter_mut().for_each(|hop| hop.remedy = None);
        }
        let by_policy = self.verdict(asks, allowed, &ends, &hops);
        let (outcome, verdict) = self.as_programs_judge(outcome, by_policy);
        Why {
            endpoint: self.found.endpoint.id,
            key: self.found.endpoint.key.clone(),
            pod: self.found.endpoint.pod.clone(),
            direction: self.direction().to_owned(),
            target: match &self.question.target {
                Target::Name(_) => name.unwrap_or_default().to_owned(),
                Target::Address(address) => address.to_string(),
            },
            port: self.question.port.map(|port| port.to_string()),
            allowed: outcome.passes(),
            verdict,
            rules: self.rules(),
            hops,
            outcome,
            backends: ends.iter().flat_map(|end| end.backends.clone()).collect(),
            unchecked: ends.into_iter().flat_map(|end| end.unchecked).collect(),
        }
    }

    /// The outcome of the whole target is that of its worst address.
    fn outcome(&self, asks: bool, ends: &[End]) -> Outcome {
        let worst = ends.iter().map(|end| end.outcome).min();
        match (asks, worst) {
            (false, _) => Outcome::Denied,
            (true, Some(worst)) => worst,
            (true, None) => Outcome::of(Some(self.unknown_address_passes())),
        }
    }

    /// Whether packets pass, and the verdict in words. A fault of the endpoint's programs changes what
    /// policy alone gives.
    fn as_programs_judge(&self, outcome: Outcome, by_policy: String) -> (Outcome, String) {
        if let Some(unjudged) = self.unjudged() {
            let verdict = format!("{}; by policy: {by_policy}", unjudged.text);
            return (Outcome::of(Some(unjudged.passes)), verdict);
        }
        match self.overtaken() {
            Some(overtaken) => (outcome, format!("{by_policy}; but {overtaken}")),
            None => (outcome, by_policy),
        }
    }

    /// Adds the hops of each address, and what becomes of packets to it.
    fn addresses(&self, hops: &mut Vec<Hop>) -> Vec<End> {
        let mut ends = Vec::new();
        let (mut passing, mut failing) = (0, 0);
        for (found, read) in self.found.addresses.iter().zip(self.read) {
            let mut way = vec![self.ipcache(found, read), self.identity(found, read)];
            let backends = self.backends(read);
            way.extend(self.service(found.address, read, &backends));
            way.push(self.policy_map(found, read));
            way.extend(read.receiver.as_ref().map(|r| self.receiver(found, r)));
            let end = self.end(found, read, &backends, first_missing(&way));
            let passes = end.outcome.passes();
            if passes {
                calm(&mut way);
            }
            only_first_remedy(&mut way);
            way.extend(self.unchecked_hop(found, read));
            let alike = if passes { &mut passing } else { &mut failing };
            *alike += 1;
            if *alike <= SHOWN {
                hops.append(&mut way);
            }
            ends.push(end);
        }
        let more = [
            (passing, HopState::Found, "pass"),
            (failing, HopState::Missing, "do not pass, or it is unknown"),
        ];
        for (number, state, what) in more {
            if let Some(more @ 1..) = number.checked_sub(SHOWN) {
                let text = format!("packets to {more} more addresses {what}");
                hops.push(hop("policy-map", None, state, text, ""));
            }
        }
        ends
    }

    fn direction(&self) -> &'static str {
        self.question.direction.as_str()
    }

    /// Role of the other side.
    fn other_role(&self) -> &'static str {
        match self.question.direction {
            FlowDirection::Egress => "receiver",
            FlowDirection::Ingress => "sender",
        }
    }

    /// Documents that restrict the direction; `None` if it is not restricted.
    fn restricted(&self) -> Option<&[String]> {
        let endpoint = &self.found.endpoint;
        let enforced = match self.question.direction {
            FlowDirection::Egress => endpoint.egress_enforced,
            FlowDirection::Ingress => endpoint.ingress_enforced,
        };
        enforced.then_some(endpoint.policies.as_slice())
    }

    fn verdict(&self, asks: bool, allowed: bool, ends: &[End], hops: &[Hop]) -> String {
        let mut missing = hops.iter().filter(|hop| hop.state == HopState::Missing);
        let worst = ends.iter().filter(|end| !end.outcome.passes());
        let wrong = worst.min_by_key(|end| end.outcome);
        match (asks, allowed, wrong, ends.first()) {
            (false, ..) => missing
                .find(|hop| hop.hop == "dns")
                .map(|hop| hop.text.clone())
                .unwrap_or_default(),
            (_, true, _, Some(end)) if ends.len() == 1 => end.text.clone(),
            (_, true, _, Some(_)) => {
                let texts = ends.iter().take(SHOWN).map(|end| end.text.as_str());
                let texts: Vec<&str> = texts.collect();
                match ends.len().saturating_sub(SHOWN) {
                    0 => texts.join("; "),
                    more => format!("{}; and {more} more", texts.join("; ")),
                }
            }
            (_, true, ..) => self.outside_passes(),
            (_, false, Some(end), _) => end.text.clone(),
            (_, false, None, _) => missing
                .find(|hop| matches!(hop.hop.as_str(), "selector" | "names"))
                .map(|hop| hop.text.clone())
                .unwrap_or_default(),
        }
    }

    fn rules(&self) -> Vec<RuleView> {
        let mut rules: Vec<RuleView> = Vec::new();
        let receivers = self.read.iter().flat_map(|read| {
            let behind = read.ingress.iter().flatten();
            read.receiver.iter().chain(behind)
        });
        let peers = self.read.iter().map(|read| &read.peer);
        let all = peers.chain(receivers.map(|receiver| &receiver.peer));
        for rule in all.flat_map(|peer| peer.tier.iter().chain(&peer.by)) {
            if !rules.contains(rule) {
                rules.push(rule.clone());
            }
        }
        rules
    }
}

fn hop(name: &str, address: Option<IpAddr>, state: HopState, text: String, remedy: &str) -> Hop {
    Hop {
        hop: name.to_owned(),
        address: address.map(|address| address.to_string()),
        state,
        text,
        remedy: (!remedy.is_empty()).then(|| remedy.to_owned()),
    }
}

/// Turns missing hops into absent ones, because packets pass without them.
fn calm(hops: &mut [Hop]) {
    let missing = hops.iter_mut();
    for hop in missing.filter(|hop| hop.state == HopState::Missing) {
        hop.state = HopState::Absent;
        hop.remedy = None;
    }
}

fn first_missing(hops: &[Hop]) -> Option<&Hop> {
    hops.iter().find(|hop| hop.state == HopState::Missing)
}

/// Keeps the remedy of the first missing hop only: it may repair the later ones too.
fn only_first_remedy(hops: &mut [Hop]) {
    let missing = hops.iter_mut();
    let missing = missing.filter(|hop| hop.state == HopState::Missing);
    missing.skip(1).for_each(|hop| hop.remedy = None);
}
