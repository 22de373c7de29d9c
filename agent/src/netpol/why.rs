//! Whether a connection may be opened, and by which rules.

use std::{collections::BTreeSet, net::IpAddr};

use agent_core::{first_of::first_of, policy::trace::Port};
use netpol::{
    contiv::{Flow, PolicyId},
    explain::{OpenSide, Opening, Side},
    open_ports::OpenPorts,
    pod::{Pod, PodId},
    policy::Protocol,
};

use super::{
    model::{IpSide, NetpolWhy, SideView},
    state::State,
    view::name,
};

/// Maximum pods that a message lists.
const LISTED: usize = 10;

/// Why a question cannot be answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAnswer {
    /// The end is neither an address nor a pod.
    #[error("{0} is neither an address nor a pod; write for example 10.1.2.3, or shop/web-0")]
    Form(String),
    #[error("there is no pod {pod} among the documents; {pods}")]
    NoPod {
        pod: PodId,
        /// Existing pods, as text.
        pods: String,
    },
    #[error(
        "pod {0} has no address of its own, and no policy selects it: it uses the network of its node \
         (hostNetwork), it has ended, or status.podIPs is missing in its document"
    )]
    NoAddress(PodId),
    /// A younger pod has the address.
    #[error(
        "the address {address} of pod {pod} is that of the younger pod {holder} too, which counts; remove one of them"
    )]
    Taken {
        pod: PodId,
        address: IpAddr,
        holder: PodId,
    },
    /// The pod has no address of the other end's family.
    #[error("{from} and {to} have no addresses of one family")]
    Families {
        /// The sender, as it was asked for.
        from: String,
        /// The receiver, as it was asked for.
        to: String,
    },
}

impl State {
    /// Whether a connection may be opened, and by which rules; without a port: at which ports. `own`
    /// are the node's addresses.
    pub(super) fn why(
        &self,
        own: &BTreeSet<IpAddr>,
        from: &str,
        to: &str,
        port: Option<Port>,
    ) -> Result<NetpolWhy, NoAnswer> {
        let (senders, receivers) = (self.addresses_of(from)?, self.addresses_of(to)?);
        let pairs = senders
            .iter()
            .flat_map(|from| receivers.iter().map(move |to| (*from, *to)));
        let mut pairs = pairs.filter(|(from, to)| from.is_ipv4() == to.is_ipv4());
        let (sender, receiver) = pairs.next().ok_or_else(|| NoAnswer::Families {
            from: from.to_owned(),
            to: to.to_owned(),
        })?;
        let is_of_node = own.contains(&sender) || own.contains(&receiver);
        let judged = match (port, is_of_node) {
            (Some(_), true) => Judged::default(),
            (None, true) => Judged {
                open: Some(OpenPorts::All),
                ..Judged::default()
            },
            (Some(port), false) => self.at_port(sender, receiver, port),
            (None, false) => self.at_any(sender, receiver),
        };
        let not_in_force = self.not_in_force();
        Ok(NetpolWhy {
            from: self.end(sender),
            to: self.end(receiver),
            port: port.map(|port| port.to_string()),
            allowed: not_in_force.is_none() && !judged.is_denied,
            is_denied: judged.is_denied,
            open: judged.open.as_ref().map(OpenPorts::texts),
            is_of_node,
            sides: judged.sides,
            not_in_force,
        })
    }

    /// Why the kernel may judge otherwise.
    fn not_in_force(&self) -> Option<String> {
        let reason = || {
            let first = self.problems().into_iter().next();
            first.unwrap_or_else(|| "the table has not been made yet".to_owned())
        };
        (!self.is_ready()).then(reason)
    }

    fn at_port(&self, from: IpAddr, to: IpAddr, port: Port) -> Judged {
        let protocol = Protocol::from_number(port.protocol);
        let sides = self.pipeline.explain(&Opening {
            from,
            to,
            port: protocol.map(|protocol| (protocol, port.number)),
        });
        Judged {
            is_denied: sides.iter().any(|side| side.allowed_by.is_none()),
            open: None,
            sides: sides.iter().map(|side| self.of_port(side)).collect(),
        }
    }

    fn at_any(&self, from: IpAddr, to: IpAddr) -> Judged {
        let sides = self.pipeline.open_between(from, to);
        let open = sides.iter().map(|side| side.open.clone());
        let open = open.fold(OpenPorts::All, OpenPorts::and);
        Judged {
            is_denied: open.is_empty(),
            open: Some(open),
            sides: sides.iter().map(|side| self.of_all_ports(side)).collect(),
        }
    }

    fn addresses_of(&self, text: &str) -> Result<Vec<IpAddr>, NoAnswer> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(vec![address]);
        }
        let id = PodId::parse(text).ok_or_else(|| NoAnswer::Form(text.to_owned()))?;
        let cache = self.pipeline.cache();
        let Some(pod) = cache.pod(&id) else {
            return Err(self.no_pod(id));
        };
        let addresses: Vec<IpAddr> = match cache.is_local(&id) {
            true => pod.addresses.clone(),
            false => cache.addresses(pod).collect(),
        };
        match addresses.is_empty() {
            true => Err(self.no_address(pod)),
            false => Ok(addresses),
        }
    }

    /// The error for a pod that does not exist. Names pods of its namespace, or of all namespaces if it has no pods.
    fn no_pod(&self, pod: PodId) -> NoAnswer {
        let all = || self.pipeline.cache().pods().map(|pod| &pod.id);
        let near: Vec<&PodId> = all().filter(|one| one.namespace == pod.namespace).collect();
        let known: Vec<&PodId> = match near.is_empty() {
            true => all().collect(),
            false => near,
        };
        let pods = match known.is_empty() {
            true => "there are no Pod documents".to_owned(),
            false => format!("pods: {}", first_of(known, LISTED)),
        };
        NoAnswer::NoPod { pod, pods }
    }

    fn no_address(&self, pod: &Pod) -> NoAnswer {
        let holder = pod.addresses.iter().find_map(|address| {
            let holder = self.pipeline.cache().pod_at(*address)?;
            Some((*address, holder.id.clone()))
        });
        match holder {
            Some((address, holder)) => NoAnswer::Taken {
                pod: pod.id.clone(),
                address,
                holder,
            },
            None => NoAnswer::NoAddress(pod.id.clone()),
        }
    }

    fn end(&self, address: IpAddr) -> IpSide {
        let cache = self.pipeline.cache();
        let pod = cache.pod_at(address);
        let node = pod.and_then(|pod| pod.node.as_deref());
        IpSide {
            address: address.to_string(),
            pod: pod.map(|pod| pod.id.to_string()),
            node: node.map(str::to_owned),
            is_here: pod.is_some_and(|pod| cache.is_local(&pod.id)),
        }
    }

    fn of_port(&self, side: &Side) -> SideView {
        let allowed_by = side.allowed_by.as_ref();
        SideView {
            allowed_by: allowed_by.map(|(policy, field)| format!("{} {field}", name(policy))),
            ..self.side(&side.pod, side.flow, &side.policies)
        }
    }

    fn of_all_ports(&self, side: &OpenSide) -> SideView {
        let rules = side.rules.iter();
        let rules: Vec<String> = rules
            .map(|(policy, field)| format!("{} {field}", name(policy)))
            .collect();
        SideView {
            allowed_by: (!rules.is_empty()).then(|| rules.join(", ")),
            open: Some(side.open.texts()),
            ..self.side(&side.pod, side.flow, &side.policies)
        }
    }

    /// A side with its policies, and no rule that allows the connection.
    fn side(&self, pod: &PodId, flow: Flow, policies: &[PolicyId]) -> SideView {
        let aside = self.pipeline.set_aside();
        let aside = policies.iter().filter(|id| aside.contains_key(id));
        SideView {
            pod: pod.to_string(),
            direction: direction(flow).to_owned(),
            policies: policies.iter().map(name).collect(),
            set_aside: aside.map(name).collect(),
            allowed_by: None,
            open: None,
        }
    }
}

/// What the policies say.
#[derive(Default)]
struct Judged {
    is_denied: bool,
    /// The open ports, if no port was asked for.
    open: Option<OpenPorts>,
    sides: Vec<SideView>,
}

/// The name of a direction in answers.
pub(super) fn direction(flow: Flow) -> &'static str {
    match flow {
        Flow::Ingress => "ingress",
        Flow::Egress => "egress",
    }
}

#[cfg(test)]
mod tests {
    use agent_core::policy::parse::parse_documents;

    use super::*;

    const DOCUMENTS: &str = "
{apiVersion: v1, kind: Pod, metadata: {name: web-0, namespace: shop, labels: {app: web}},
 spec: {nodeName: one, containers: [{name: c}]}, status: {podIP: 10.1.0.1}}
---
{apiVersion: v1, kind: Pod, metadata: {name: db-0, namespace: shop, labels: {app: db}},
 spec: {nodeName: two, containers: [{name: c, ports: [{name: sql, containerPort: 5432}]}]}, status: {podIP: 10.1.0.2}}
---
{apiVersion: v1, kind: Pod, metadata: {name: host, namespace: shop},
 spec: {nodeName: one, hostNetwork: true, containers: [{name: c}]}, status: {podIP: 192.0.2.1}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: web, namespace: shop},
 spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Egress],
        egress: [{to: [{podSelector: {matchLabels: {app: db}}}], ports: [{port: sql}]}]}}
";

    fn state(is_ready: bool) -> State {
        let mut state = State::new("one");
        for document in parse_documents(DOCUMENTS, "test") {
            state.put(document.unwrap());
        }
        state.set_listed();
        state.commit().unwrap();
        state.force.is_begun = is_ready;
        state
    }

    fn why(state: &State, from: &str, to: &str, port: Option<&str>) -> Result<NetpolWhy, String> {
        let port = port.map(|port| port.parse().unwrap());
        let own = BTreeSet::from([IpAddr::from([192, 0, 2, 1])]);
        let why = state.why(&own, from, to, port);
        why.map_err(|error| error.to_string())
    }

    #[test]
    fn without_a_port_the_open_ports_are_listed() {
        let state = state(true);
        let open = why(&state, "shop/web-0", "10.1.0.2", None).unwrap();
        assert!(open.allowed);
        assert_eq!(open.open.unwrap(), ["5432/TCP"]);
        assert_eq!(open.to.node.as_deref(), Some("two"));
        let none = why(&state, "shop/web-0", "203.0.113.7", None).unwrap();
        assert!(!none.allowed && none.open.unwrap().is_empty());
        assert_eq!(none.sides[0].allowed_by, None);
        let all = why(&state, "shop/db-0", "shop/web-0", None).unwrap();
        assert_eq!(
            (all.allowed, all.open.unwrap()),
            (true, vec!["any".to_owned()])
        );
        let node = why(&state, "shop/web-0", "192.0.2.1", None).unwrap();
        assert_eq!(
            (node.is_of_node, node.open.unwrap()),
            (true, vec!["any".to_owned()])
        );
    }

    #[test]
    fn a_port_may_be_a_type_of_icmp() {
        let state = state(true);
        let ping = why(&state, "shop/web-0", "shop/db-0", Some("8/ICMP")).unwrap();
        assert_eq!(
            (ping.allowed, ping.port.as_deref()),
            (false, Some("8/ICMP"))
        );
        assert!(
            why(&state, "shop/web-0", "shop/db-0", Some("5432"))
                .unwrap()
                .allowed
        );
    }

    #[test]
    fn nothing_is_allowed_before_the_policies_are_in_force() {
        let why = why(&state(false), "shop/db-0", "shop/web-0", None).unwrap();
        assert!(!why.allowed && !why.is_denied);
        assert!(why.not_in_force.is_some());
    }

    #[test]
    fn an_unknown_end_is_refused_with_the_pods_or_the_reason() {
        let state = state(true);
        let of = |pod: &str| why(&state, pod, "10.1.0.2", None).unwrap_err();
        for (pod, parts) in [
            (
                "shop/nix",
                ["no pod shop/nix", "pods: shop/db-0, shop/host, shop/web-0"],
            ),
            ("bank/nix", ["no pod bank/nix", "shop/web-0"]),
            ("shop/host", ["no address of its own", "hostNetwork"]),
            ("web", ["neither an address nor a pod", "shop/web-0"]),
        ] {
            let error = of(pod);
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
