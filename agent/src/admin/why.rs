//! `why`: the model's half from the core, the kernel's half from the pinned maps, and the walk
//! along both.

mod backends;
pub mod text;
mod walk;

use std::{collections::HashMap, net::IpAddr};

use agent_core::{
    core::why::{
        AddressFound, Findings, Target,
        peer_found::{NodePortFound, PeerFound, ServiceFound},
    },
    labels::LabelError,
    policy::{
        ask::{self, Peer, To, Trace},
        compute::{decide, everyone_at},
        trace::{FlowDirection, Port, RuleView},
    },
};
use agent_datapath::program::Programs;
use dns_policy::{boot_time::BootTime, endpoint_name::NoEndpoint, name::Fqdn};
use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey, PolicyValue},
    sources::{self, SourceKey, SourceValue},
    user::{Access, Globals, Map, MapError, MapKind, ipcache_key, lxc_key, monotonic_ns},
};

use self::{backends::opposite, walk::Walk};
use super::model::Why;
use crate::runner::{CoreAway, CoreHandle};

/// A question to `why`: whether the endpoint and the target can exchange packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    /// Number, key, part of the key, or address of the endpoint.
    pub endpoint: String,
    /// The other side: the receiver for egress, the sender for ingress.
    pub target: Target,
    /// Destination port; `None` = which ports are open?
    pub port: Option<Port>,
    /// Egress if the endpoint sends the packet, ingress if it receives it.
    pub direction: FlowDirection,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WhyError {
    /// The core does not answer.
    #[error(transparent)]
    Away(#[from] CoreAway),
    /// The text names no endpoint, or several.
    #[error(transparent)]
    NoEndpoint(#[from] NoEndpoint),
    /// The pod is in the cluster, and is no endpoint of this node.
    #[error(
        "pod {0} is no endpoint of this node: ask the agent of the pod's node (`kubectl get pod -o \
         wide` shows it). A pod with hostNetwork is no endpoint of any node"
    )]
    ElsewherePod(String),
    /// Policy is not about the address of a Service.
    #[error(
        "{address} is the address of Service {name}, and policy is about the pods behind it: ask \
         about one of them, or use `holdfast-agent why`, which judges each"
    )]
    Service {
        address: IpAddr,
        /// `namespace/name`.
        name: String,
    },
    /// No pod has this name.
    #[error(
        "there is no endpoint and no document Pod/{0}: `endpoint list` shows the endpoints, and \
         `kubectl get pods -o yaml` prints pods for --policy-dir"
    )]
    NoPod(String),
    /// No pod or Service with an address has this name.
    #[error(
        "there is no pod and no Service {0} with an address: give namespace/name, an address or a \
         DNS name"
    )]
    NoTarget(String),
    /// DNS names cannot be judged for ingress.
    #[error("ingress policy has no names: give the sender's address")]
    IngressName,
    /// Labels that cannot be read.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// The task that reads a map failed.
    #[error("the maps could not be read completely: {0}")]
    Cut(#[from] tokio::task::JoinError),
}

/// Data from the kernel, or the reason why it cannot be read.
pub(crate) type Read<T> = Result<T, String>;

/// An address, with endpoint and identity that `cilium_lxc` has for it.
type LxcRead = (IpAddr, Option<(u16, u32)>);

/// Data of the kernel about one address of the target.
#[derive(Clone, Debug)]
struct AddressRead {
    /// Identity of the ipcache's entry with the longest prefix; `None` = no entry.
    ipcache: Read<Option<u32>>,
    /// For a sender: the identity that came with its last packet. It counts instead of the ipcache's identity.
    carried: Option<Carried>,
    /// What a packet's own look-up of the identity gives.
    identity: IdentityId,
    peer: PeerFound,
    entries: Read<Entries>,
    /// The endpoint that has the address, as receiver or sender, and how it judges.
    receiver: Option<Receiver>,
    /// The Service that a port of a node leads to.
    node_port: Option<NodePortFound>,
    /// Ingress of each backend that is an endpoint of this node, in the order of the backends.
    ingress: Vec<Option<Receiver>>,
    /// Rules with a block that covers the address of a pod or a node. Such rules are not
    /// about the address. Empty if another rule is.
    blocks: Vec<RuleView>,
}

/// What the tunnel between nodes brought from a sender.
#[derive(Clone, Copy, Debug)]
struct Carried {
    identity: u32,
    age_ms: u64,
}

/// Identities of addresses outside the cluster about which nothing else is known.
const WORLDS: [IdentityId; 3] = [
    IdentityId::WORLD,
    IdentityId::WORLD_IPV4,
    IdentityId::WORLD_IPV6,
];

impl AddressRead {
    /// The Service whose backends packets go to.
    fn service(&self) -> Option<&ServiceFound> {
        let node_port = self.node_port.iter().map(|found| &found.service);
        self.peer.service.iter().chain(node_port).next()
    }

    /// Whether another node passes the packets on to a Service.
    fn is_port_of_another_node(&self) -> bool {
        let found = self.node_port.as_ref();
        found.is_some_and(|found| found.elsewhere.is_some())
    }
}

#[derive(Clone, Debug)]
struct Receiver {
    endpoint: EndpointId,
    peer: PeerFound,
    entries: Read<Entries>,
}

/// What an endpoint's policy map says about an identity.
#[derive(Clone, Debug, Default)]
struct Entries {
    /// The entry that decides for the port asked for.
    decides: Option<(PolicyKey, PolicyValue)>,
    /// For a question without a port: the entries that let packets pass, each with its port.
    open: Vec<(PolicyKey, PolicyValue)>,
}

/// Answers a question. `learning`: a DNS proxy tells the agent what it learns.
pub(crate) async fn answer(
    core: &CoreHandle,
    maps: &Globals,
    learning: bool,
    question: Question,
) -> Result<Why, WhyError> {
    if question.direction == FlowDirection::Ingress && matches!(question.target, Target::Name(_)) {
        return Err(WhyError::IngressName);
    }
    let endpoint = called(core, &question.endpoint).await?;
    let Some(endpoint) = endpoint else {
        return Err(no_endpoint(core, question.endpoint).await);
    };
    let target = question.target.clone();
    let found = core
        .inspect(move |core| core.findings(endpoint, &target))
        .await?;
    let Some(found) = found else {
        return Err(NoEndpoint::Unknown(question.endpoint).into());
    };
    let mut reader = Reader {
        core,
        maps,
        question: &question,
        found: &found,
        sides: HashMap::new(),
    };
    let read = reader.addresses().await?;
    let outside = reader.outside().await?;
    let own = found.endpoint.ipv4.iter().chain(&found.endpoint.ipv6);
    let own: Vec<IpAddr> = own.filter_map(|ip| ip.parse().ok()).collect();
    let maps = maps.clone();
    let (id, ifindex) = (EndpointId(found.endpoint.id), found.endpoint.ifindex);
    let looked = tokio::task::spawn_blocking(move || {
        let programs = Programs::faults(&maps, id, ifindex, None);
        (lxc_of(&maps, &own), programs)
    });
    let (lxc, programs) = looked.await?;
    Ok(Walk {
        question: &question,
        found: &found,
        lxc: &lxc,
        programs: &programs,
        read: &read,
        outside: &outside,
        learning,
        now: BootTime::now(),
    }
    .why())
}

/// The endpoint with this name, if there is one.
pub(super) async fn called(core: &CoreHandle, text: &str) -> Result<Option<EndpointId>, WhyError> {
    let wanted = text.to_owned();
    let called = core.inspect(move |core| core.endpoints_called(&wanted));
    match called.await?.as_slice() {
        [] => Ok(None),
        [(id, _)] => Ok(Some(*id)),
        several => {
            let found = several.iter().map(|(id, key)| format!("{id} ({key})"));
            let (text, found) = (text.to_owned(), found.collect());
            Err(NoEndpoint::Ambiguous { text, found }.into())
        }
    }
}

/// Why there is no endpoint of this name.
pub(super) async fn no_endpoint(core: &CoreHandle, name: String) -> WhyError {
    let pod = name.clone();
    let known = core.inspect(move |core| core.labels_of_pod(&pod).is_some());
    match known.await {
        Ok(true) => WhyError::ElsewherePod(name),
        Ok(false) => NoEndpoint::Unknown(name).into(),
        Err(away) => away.into(),
    }
}

/// What the documents in force say about a packet. The sender is given by labels or as an endpoint,
/// the receiver also by an address or a DNS name.
pub(crate) async fn trace(
    core: &CoreHandle,
    from: &str,
    to: &str,
    port: Port,
) -> Result<Trace, WhyError> {
    let endpoint = async |text: &str| match called(core, text).await? {
        Some(id) => Ok::<_, WhyError>(core.inspect(move |core| core.labels_of(id)).await?),
        None => Ok(None),
    };
    let sender = match Peer::parse(from)? {
        Peer::Labels(labels) => labels,
        Peer::Address(_) | Peer::Name(_) => endpoint(from)
            .await?
            .ok_or_else(|| NoEndpoint::Unknown(from.to_owned()))?,
    };
    let (receiver, known) = match Peer::parse(to)? {
        Peer::Labels(labels) => (To::Labels(labels), None),
        Peer::Address(address) => {
            let known = core.inspect(move |core| core.subject_at(address)).await?;
            if let Some(service) = known.as_ref().filter(|known| known.id.is_service()) {
                let mut labels = service.labels.iter();
                let name = labels.next().map(|label| label.key().to_owned());
                let name = name.unwrap_or_default();
                return Err(WhyError::Service { address, name });
            }
            (To::Address(address), known)
        }
        Peer::Name(name) => match endpoint(to).await? {
            Some(labels) => (To::Labels(labels), None),
            // No DNS name has a slash.
            None if name.contains('/') => {
                let pod = name.clone();
                let labels = core.inspect(move |core| core.labels_of_pod(&pod)).await?;
                (To::Labels(labels.ok_or(WhyError::NoPod(name))?), None)
            }
            None => (To::Name(Fqdn::normalise(&name)), None),
        },
    };
    let repository = core.inspect(|core| core.repository()).await?;
    Ok(ask::trace(&repository, &sender, &receiver, port, known))
}

/// What the model and the policy map say about one side.
type SideRead = (PeerFound, Read<Entries>);
/// The endpoint on this side, its direction, its peer and the port.
type SideKey = (EndpointId, FlowDirection, IdentityId, Option<Port>);

/// Reads from the core and the maps once for each identity: a name may have a thousand
/// addresses with one identity.
struct Reader<'a> {
    core: &'a CoreHandle,
    maps: &'a Globals,
    question: &'a Question,
    found: &'a Findings,
    sides: HashMap<SideKey, SideRead>,
}

impl Reader<'_> {
    async fn addresses(&mut self) -> Result<Vec<AddressRead>, WhyError> {
        let wanted: Vec<IpAddr> = self.found.addresses.iter().map(|a| a.address).collect();
        let maps = self.maps.clone();
        let direction = self.question.direction;
        let look = move || {
            let carried: Vec<_> = match direction {
                FlowDirection::Ingress => wanted.iter().map(|at| carried_by(&maps, *at)).collect(),
                FlowDirection::Egress => vec![None; wanted.len()],
            };
            (ipcache_of(&maps, &wanted), carried)
        };
        let (entries, carried) = tokio::task::spawn_blocking(look).await?;
        let mut read = Vec::new();
        let found = self.found.addresses.iter();
        for ((address, ipcache), carried) in found.zip(entries).zip(carried) {
            read.push(self.address(address, ipcache, carried).await?);
        }
        Ok(read)
    }

    /// Addresses outside the cluster about which nothing is known.
    async fn outside(&mut self) -> Result<Vec<SideRead>, WhyError> {
        let endpoint = EndpointId(self.found.endpoint.id);
        let mut outside = Vec::new();
        for world in &self.found.worlds {
            let side = self.side(
                endpoint,
                self.question.direction,
                *world,
                self.question.port,
            );
            outside.push(side.await?);
        }
        Ok(outside)
    }

    async fn address(
        &mut self,
        address: &AddressFound,
        ipcache: Read<Option<u32>>,
        carried: Option<Carried>,
    ) -> Result<AddressRead, WhyError> {
        let endpoint = EndpointId(self.found.endpoint.id);
        let direction = self.question.direction;
        let world = IdentityId(address.world);
        let identity = match (carried, &ipcache) {
            (Some(carried), _) => IdentityId(carried.identity),
            (None, Ok(found)) => found.map_or(world, IdentityId),
            // Otherwise the identity that the agent gave the kernel counts.
            (None, Err(_)) => address.given.map_or(world, IdentityId),
        };
        let port = self.question.port;
        let (peer, entries) = self.side(endpoint, direction, identity, port).await?;
        let receiver = match address.endpoint {
            Some(other) if other != endpoint => Some(
                self.receiver(other, opposite(direction), self.question.port)
                    .await?,
            ),
            _ => None,
        };
        let node_port = self.node_port(address.address).await?;
        let service = peer.service.as_ref();
        let service = service.or(node_port.as_ref().map(|found| &found.service));
        let ingress = match service {
            Some(service) => self.backends(service).await?,
            None => Vec::new(),
        };
        let at = address.address;
        let is_outside = identity.is_local_scope() || WORLDS.contains(&identity);
        let blocks = if is_outside || !peer.about.is_empty() {
            Vec::new()
        } else {
            let rules = self
                .core
                .inspect(move |c| c.rules_with_block_of(endpoint, direction, at));
            rules.await?
        };
        Ok(AddressRead {
            ipcache,
            carried,
            identity,
            peer,
            entries,
            receiver,
            node_port,
            ingress,
            blocks,
        })
    }

    async fn side(
        &mut self,
        endpoint: EndpointId,
        direction: FlowDirection,
        identity: IdentityId,
        port: Option<Port>,
    ) -> Result<SideRead, WhyError> {
        let key = (endpoint, direction, identity, port);
        if let Some(known) = self.sides.get(&key) {
            return Ok(known.clone());
        }
        let look = self
            .core
            .inspect(move |c| c.peer(endpoint, direction, identity, port));
        let peer = look.await?;
        let maps = self.maps.clone();
        let read = move || entries_of(&maps, endpoint, direction, identity, port);
        let entries = tokio::task::spawn_blocking(read).await?;
        let side = (peer, entries);
        self.sides.insert(key, side.clone());
        Ok(side)
    }
}

/// Endpoint and identity of each address in `cilium_lxc`.
fn lxc_of(maps: &Globals, addresses: &[IpAddr]) -> Read<Vec<LxcRead>> {
    let map = maps.lxc(Access::ReadOnly).map_err(|e| text(&e))?;
    let read = |address: &IpAddr| {
        let value = map.get(&lxc_key(*address)).map_err(|e| text(&e))?;
        Ok((*address, value.map(|value| (value.lxc_id, value.sec_id))))
    };
    addresses.iter().map(read).collect()
}

/// The identity that the tunnel between nodes brought from a sender, while it counts.
fn carried_by(maps: &Globals, sender: IpAddr) -> Option<Carried> {
    let IpAddr::V4(sender) = sender else {
        return None;
    };
    // Without the tunnel there is no such map.
    let path = maps.path(sources::NAME);
    let map =
        Map::<SourceKey, SourceValue>::open(&path, MapKind::LruHash, Access::ReadOnly).ok()?;
    let key = SourceKey {
        ip: sender.octets(),
    };
    let now = sources::tick(monotonic_ns());
    let value = map.get(&key).ok().flatten()?;
    value.is_fresh(now).then(|| Carried {
        identity: value.identity,
        age_ms: value.age_ms(now),
    })
}

/// Identity of each address in the ipcache.
fn ipcache_of(maps: &Globals, addresses: &[IpAddr]) -> Vec<Read<Option<u32>>> {
    let map = match maps.ipcache(Access::ReadOnly) {
        Ok(map) => map,
        Err(e) => return vec![Err(text(&e)); addresses.len()],
    };
    let read = |address: &IpAddr| {
        let len = if address.is_ipv4() { 32 } else { 128 };
        let value = map.get(&ipcache_key(*address, len)).map_err(|e| text(&e))?;
        Ok(value.map(|value| value.sec_identity))
    };
    addresses.iter().map(read).collect()
}

fn entries_of(
    maps: &Globals,
    endpoint: EndpointId,
    direction: FlowDirection,
    identity: IdentityId,
    port: Option<Port>,
) -> Read<Entries> {
    let map = maps
        .policy(endpoint, Access::ReadOnly)
        .map_err(|e| text(&e))?;
    let direction = match direction {
        FlowDirection::Egress => EGRESS,
        FlowDirection::Ingress => INGRESS,
    };
    let verdict = |port: Port| -> Read<Option<(PolicyKey, PolicyValue)>> {
        let look = |identity: u32, (protocol, port): (u8, u16)| {
            let asked = PolicyKey::new(identity, direction, protocol, port, 16);
            let value = map.get(&asked).map_err(|e| text(&e))?;
            Ok::<_, String>(value.map(|value| (matched(asked, value), value)))
        };
        let everyone = everyone_at(identity, port.protocol, port.number);
        let own = look(identity.0, (port.protocol, port.number))?;
        let any = look(0, everyone)?;
        let pick = |id: u32| if id == identity.0 { &own } else { &any };
        let winner = decide(|id| pick(id).as_ref().map(|(k, v)| (k, v)), identity);
        Ok(winner.map(|(key, value)| (*key, *value)))
    };
    if let Some(port) = port {
        let decides = verdict(port)?;
        return Ok(Entries {
            decides,
            open: Vec::new(),
        });
    }
    let mut all = map.entries().map_err(|e| text(&e))?.found;
    all.retain(|(key, value)| {
        key.egress == direction
            && (key.sec_label == identity.0 || key.sec_label == 0)
            && !value.is_deny()
    });
    all.sort_unstable_by_key(|(key, _)| (key.protocol, key.dport.get(), key.sec_label));
    let mut open = Vec::new();
    for (key, value) in all {
        let port = Port {
            protocol: key.protocol,
            number: key.dport.get(),
        };
        if verdict(port)?.is_some_and(|(_, winner)| !winner.is_deny()) {
            open.push((key, value));
        }
    }
    open.dedup_by_key(|(key, _)| (key.protocol, key.dport.get(), key.lpm_len()));
    Ok(Entries {
        decides: None,
        open,
    })
}

/// The key that a look-up found: its length is in the value.
fn matched(asked: PolicyKey, value: PolicyValue) -> PolicyKey {
    let len = value.flags >> shared_maps::policy::FLAG_LPM_SHIFT;
    let bits = len.saturating_sub(8).min(16);
    let protocol = if len < 8 { 0 } else { asked.protocol };
    let mask = u16::MAX.checked_shl(u32::from(16 - bits)).unwrap_or(0);
    let port = asked.dport.get() & mask;
    PolicyKey::new(asked.sec_label, asked.egress, protocol, port, bits)
}

fn text(error: &MapError) -> String {
    error.to_string()
}

/// Reads the target: an address, the `namespace/name` of a pod or Service, else a DNS name.
pub(crate) async fn target(core: &CoreHandle, text: &str) -> Result<Target, WhyError> {
    if let Ok(address) = text.parse() {
        return Ok(Target::Address(address));
    }
    // No DNS name has a slash.
    if !text.contains('/') {
        return Ok(Target::Name(Fqdn::normalise(text)));
    }
    let name = text.to_owned();
    let found = core.inspect(move |core| core.addresses_called(&name));
    let address = found.await?.into_iter().next();
    address
        .map(Target::Address)
        .ok_or_else(|| WhyError::NoTarget(text.to_owned()))
}

#[cfg(test)]
mod tests;
