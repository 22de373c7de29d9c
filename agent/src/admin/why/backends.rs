//! What the agent and the kernel know about the other end of a packet.

use std::net::IpAddr;

use agent_core::{
    core::why::peer_found::{NodePortFound, ServiceFound},
    policy::trace::{FlowDirection, Port},
};
use shared_maps::{EndpointId, IdentityId};

use super::{Reader, Receiver, WhyError};

pub(super) const fn opposite(direction: FlowDirection) -> FlowDirection {
    match direction {
        FlowDirection::Egress => FlowDirection::Ingress,
        FlowDirection::Ingress => FlowDirection::Egress,
    }
}

impl Reader<'_> {
    /// How another endpoint of this node judges packets from or to the endpoint in question.
    pub(super) async fn receiver(
        &mut self,
        other: EndpointId,
        direction: FlowDirection,
        port: Option<Port>,
    ) -> Result<Receiver, WhyError> {
        let own = IdentityId(self.found.endpoint.identity);
        let (peer, entries) = self.side(other, direction, own, port).await?;
        Ok(Receiver {
            endpoint: other,
            peer,
            entries,
        })
    }

    /// Ingress of each backend that is another endpoint of this node. A pod that reaches itself needs
    /// no rule.
    pub(super) async fn backends(
        &mut self,
        service: &ServiceFound,
    ) -> Result<Vec<Option<Receiver>>, WhyError> {
        let own = EndpointId(self.found.endpoint.id);
        let mut read = Vec::new();
        for backend in &service.backends {
            let other = backend.endpoint.filter(|other| *other != own);
            read.push(match other {
                Some(other) => {
                    let port = Some(backend.port);
                    Some(self.receiver(other, FlowDirection::Ingress, port).await?)
                }
                None => None,
            });
        }
        Ok(read)
    }

    /// The Service that the port in question leads to at an address of a node.
    pub(super) async fn node_port(
        &self,
        address: IpAddr,
    ) -> Result<Option<NodePortFound>, WhyError> {
        match (self.question.direction, self.question.port) {
            (FlowDirection::Egress, Some(port)) => {
                let look = self.core.inspect(move |core| core.node_port(address, port));
                Ok(look.await?)
            }
            _ => Ok(None),
        }
    }
}
