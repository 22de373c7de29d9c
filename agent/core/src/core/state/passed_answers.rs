//! Answers of servers that are not trusted, which passed without opening anything.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
};

use dns_policy::name::Fqdn;
use shared_maps::EndpointId;

/// Maximum number of answers that are remembered; the oldest are forgotten.
const REMEMBERED: usize = 256;

/// Maximum number of remembered answers of one server, so that a server that answers many names
/// hides no other server.
const OF_ONE_SERVER: usize = 16;

/// Maximum number of addresses of one answer that are remembered.
pub(crate) const ADDRESSES: usize = 16;

/// Maximum number of servers that a warning names.
pub(crate) const NAMED: usize = 10;

/// An answer for a name that `toFQDNs` selects, of a server that does not count.
#[derive(Clone, Debug)]
pub(crate) struct PassedAnswer {
    pub(crate) server: SocketAddr,
    pub(crate) name: Fqdn,
    pub(crate) endpoint: EndpointId,
    pub(crate) addresses: Vec<IpAddr>,
}

/// The latest passed answers, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct PassedAnswers(pub(crate) VecDeque<PassedAnswer>);

impl PassedAnswers {
    pub(crate) fn note(&mut self, answer: PassedAnswer) {
        let is_same = |known: &PassedAnswer| {
            (known.server, known.endpoint) == (answer.server, answer.endpoint)
                && known.name == answer.name
        };
        self.0.retain(|known| !is_same(known));
        let of_server = self.0.iter().filter(|known| known.server == answer.server);
        let is_full = of_server.count() >= OF_ONE_SERVER;
        let oldest = match is_full {
            true => self
                .0
                .iter()
                .position(|known| known.server == answer.server),
            false if self.0.len() >= REMEMBERED => Some(0),
            false => None,
        };
        if let Some(oldest) = oldest {
            self.0.remove(oldest);
        }
        self.0.push_back(answer);
    }
}
