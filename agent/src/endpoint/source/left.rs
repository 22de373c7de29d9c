//! Endpoints that are wanted, but whose interface is gone: their containers may be started again.
//!
//! A container that is started again has a new network namespace and a new interface. This interface is open until it
//! is an endpoint. So an interface that takes the place of the endpoint's former interface is closed until then: one
//! that has the same name, or that leads to a namespace with one of the endpoint's addresses.

use std::{collections::BTreeSet, fmt::Write as _};

use agent_core::{endpoint::spec::EndpointSpec, policy::mode::PolicyMode};

use super::{EndpointDocument, Place, State, cli, cni, dir};
use crate::endpoint::discover::{DiscoverError, Netns, successors};

impl State {
    /// Where an endpoint was found last on this boot, if it is wanted and not found now.
    pub(super) fn place_left(&self, key: &str) -> Option<&Place> {
        let document = self.documents.get(key)?;
        // An endpoint of the CNI plugin has a new key when its pod starts again. A container or an interface that a
        // document names is found by its name wherever it appears again.
        if cni::is_key(key) || document.returns_by_name() {
            return None;
        }
        let is_found = self.found.get(key).is_some_and(|found| !found.superseded);
        let stored = || self.store.place(key).filter(|_| !is_found);
        self.left.get(key).or_else(stored)
    }

    /// Records that an endpoint is no longer where it was found.
    pub(super) fn leave_place(&mut self, key: &str) {
        let document = self.documents.get(key);
        if document.is_some_and(EndpointDocument::returns_by_name) {
            return;
        }
        let found = self.found.get(key).filter(|found| !found.superseded);
        let Some(place) = found.and_then(|found| Place::of(&found.spec)) else {
            return;
        };
        // The next run of the agent must know the place. For an endpoint that was added by command, it is already
        // stored.
        if let Some(document) = self.documents.get(key).filter(|_| dir::is_key(key)) {
            self.store.set(key, document, Some(place.clone()));
        }
        self.left.insert(key.to_owned(), place);
    }

    /// Interfaces that take the place of an endpoint's interface.
    pub(super) fn successors(&self, key: &str) -> Result<BTreeSet<u32>, DiscoverError> {
        let Some(place) = self.place_left(key) else {
            return Ok(BTreeSet::new());
        };
        let known = self.found.values().filter(|found| !found.superseded);
        let known = known.map(|found| found.spec.interface.ifindex).collect();
        successors(&place.interface, &place.addresses, known)
    }

    /// Key of the endpoint that a new endpoint replaces. The replaced endpoint was added by command with the same
    /// labels, and its namespace is gone. Also, the new endpoint has the host-side interface's name or an address of
    /// the replaced one, or the replaced one was added before the boot.
    pub(super) fn replaced_by(
        &self,
        key: &str,
        document: &EndpointDocument,
        spec: &EndpointSpec,
    ) -> Option<String> {
        let content = |document: &EndpointDocument| EndpointDocument {
            netns: None,
            pid: None,
            addresses: Vec::new(),
            ..document.clone()
        };
        if !cli::is_key(key) {
            return None;
        }
        let wanted = content(document);
        let gone = self.documents.iter().filter(|(other, of_other)| {
            let is_found = self
                .found
                .get(*other)
                .is_some_and(|found| !found.superseded);
            *other != key
                && cli::is_key(other)
                && !is_found
                && content(of_other) == wanted
                && self.is_namespace_gone(other, of_other)
        });
        let gone: Vec<&String> = gone.map(|(other, _)| other).collect();
        let has_place = |place: &Place| {
            place.interface == spec.interface.ifname
                || place.addresses.iter().any(|it| spec.addresses.contains(it))
        };
        let in_place = |other: &&&String| self.place_left(other).is_some_and(has_place);
        let of_former_boot = |other: &&&String| self.place_left(other).is_none();
        let found = gone.iter().find(in_place);
        let found = found.or_else(|| gone.iter().find(of_former_boot));
        found.map(|other| (*other).clone())
    }
}

/// A text with the reason why an endpoint is gone, the interfaces that are closed or open meanwhile, and the remedy.
pub(super) fn with_remedy(
    reason: &str,
    key: &str,
    document: &EndpointDocument,
    closed: &[String],
) -> String {
    let (until, end) = match cli::is_key(key) {
        true => (
            format!("it is added again (`{}`)", command(document)),
            format!("; `holdfast-agent endpoint remove {key}` ends this"),
        ),
        false => {
            let field = if document.pid.is_some() {
                "pid"
            } else {
                "netns"
            };
            (format!("its document has the new {field}"), String::new())
        }
    };
    match closed {
        [] => format!(
            "{reason}; if its container runs again, in another network namespace, it is open until {until}\
             {end}"
        ),
        closed => format!(
            "{reason}; nothing passes {}, which took the place of its interface, until {until}; a container \
             behind any other interface is open{end}",
            closed.join(", ")
        ),
    }
}

/// The command that adds an endpoint again.
fn command(document: &EndpointDocument) -> String {
    let mut text = "holdfast-agent endpoint add ".to_owned();
    text.push_str(match document.namespace() {
        Ok(Netns::Pid(_)) => "--pid PID",
        _ => "--netns NETNS",
    });
    let _infallible = write!(text, " --ifname {}", document.ifname);
    match &document.pod {
        Some(pod) => text.push_str(&format!(" --pod {pod}")),
        None => text.push_str(&format!(" --labels '{}'", document.labels.join(","))),
    }
    if !document.named_ports.is_empty() {
        text.push_str(&format!(" --named-port {}", document.named_ports.join(",")));
    }
    for address in &document.addresses {
        text.push_str(&format!(" --address {address}"));
    }
    match document.enable_policy {
        Some(PolicyMode::Default) => text.push_str(" --enable-policy default"),
        Some(PolicyMode::Always) => text.push_str(" --enable-policy always"),
        Some(PolicyMode::Never) => text.push_str(" --enable-policy never"),
        None => {}
    }
    text
}
