//! How people name an endpoint: the same words mean the same endpoint in each command.

use std::net::IpAddr;

/// Endings of the files that documents of endpoints are in.
const DOCUMENTS: [&str; 3] = [".yaml", ".yml", ".json"];

/// What an endpoint may be called by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointNames<'a> {
    /// Its number.
    pub id: u16,
    /// Its key at its source, for example `cli/pod1/eth0` or `dir/c1.yaml`.
    pub key: &'a str,
    /// Its pod, `namespace/name`.
    pub pod: Option<&'a str>,
    /// Where it is: a container, such as `podman/web`, or the name or path of a network namespace.
    pub place: &'a str,
    /// Its host-side interface.
    pub interface: &'a str,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// How well a text names an endpoint. A better match orders first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Match {
    /// Number, key, pod, place or address.
    Whole,
    /// Name of the pod, a part of the key or place (a container, a network namespace, a document), or the interface.
    Part,
}

impl EndpointNames<'_> {
    fn called(&self, text: &str) -> Option<Match> {
        let address = text.parse::<IpAddr>().ok();
        let is_whole = self.id.to_string() == text
            || self.key == text
            || stem(self.key) == text
            || self.pod == Some(text)
            || self.place == text
            || address.is_some_and(|address| self.addresses.contains(&address));
        let of_pod = self.pod.and_then(|pod| pod.rsplit('/').next());
        let of_place = self.place.rsplit('/').next();
        let parts = self.key.split('/').chain(of_pod).chain(of_place);
        let mut parts = parts.chain([self.interface]);
        match is_whole && !text.is_empty() {
            true => Some(Match::Whole),
            false => parts
                .any(|part| !text.is_empty() && (part == text || stem(part) == text))
                .then_some(Match::Part),
        }
    }
}

/// The name of a document without its ending.
fn stem(name: &str) -> &str {
    let stem = DOCUMENTS.iter().find_map(|end| name.strip_suffix(end));
    stem.unwrap_or(name)
}

/// The endpoints of `all` that a person may mean. Endpoints that the text names as a whole count
/// before endpoints that it names by a part.
pub fn called<'a, T>(text: &str, all: impl Iterator<Item = (T, EndpointNames<'a>)>) -> Vec<T> {
    let matches = all.filter_map(|(endpoint, names)| Some((names.called(text)?, endpoint)));
    let matches: Vec<(Match, T)> = matches.collect();
    let best = matches.iter().map(|(how, _)| *how).min();
    let found = matches.into_iter().filter(|(how, _)| Some(*how) == best);
    found.map(|(_, endpoint)| endpoint).collect()
}

/// Why a text names no endpoint, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEndpoint {
    /// No endpoint has such a name.
    #[error(
        "there is no endpoint {0}: give its number, key, name, pod (namespace/name), container \
         (podman/NAME) or address; `holdfast-agent endpoint list` shows them"
    )]
    Unknown(String),
    /// Several endpoints match the text.
    #[error("{text} may mean endpoint {}: give the number", .found.join(" or "))]
    Ambiguous {
        /// The text as it was written.
        text: String,
        /// Each match as `number (key)`.
        found: Vec<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_called_by_whatever_a_list_shows_of_it() {
        let names = |id, key, place: &'static str, address: &str| EndpointNames {
            id,
            key,
            pod: place.strip_prefix("pod "),
            place: place
                .strip_prefix("pod ")
                .map_or(place, |_| "/run/netns/cni-1"),
            interface: if id == 2 { "vb-c1" } else { "lxc" },
            addresses: address.parse().into_iter().collect(),
        };
        let all = [
            names(1, "cli/pod1/eth0", "pod1", "10.0.0.1"),
            names(2, "dir/c1.yaml", "c-one", "10.0.0.2"),
            names(3, "cni/abc/eth0", "pod shop/web-1", "10.0.0.3"),
            names(4, "dir/shop.yaml#2", "podman/web", "2001:db8::4"),
            names(5, "cli/10.0.0.1/eth0", "", "10.0.0.5"),
        ];
        let called = |text: &str| {
            let all = all.iter().map(|names| (names.id, names.clone()));
            called(text, all)
        };
        for (text, found) in [
            ("1", &[1u16][..]),
            ("cli/pod1/eth0", &[1]),
            ("pod1", &[1]),
            ("c1", &[2]),
            ("c1.yaml", &[2]),
            ("dir/c1", &[2]),
            ("vb-c1", &[2]),
            ("shop/web-1", &[3]),
            ("web-1", &[3]),
            ("podman/web", &[4]),
            ("docker/web", &[]),
            ("cni-1", &[3]),
            ("web", &[4]),
            ("2001:db8:0::4", &[4]),
            // An address counts before a namespace of that name.
            ("10.0.0.1", &[1]),
            ("eth0", &[1, 3, 5]),
            ("", &[]),
            ("c", &[]),
            ("7", &[]),
        ] {
            assert_eq!(called(text), found, "{text}");
        }
    }
}
