//! Name, peer and MAC address in rtnetlink's message about a link.

use rtnetlink::packet_route::link::{LinkAttribute, LinkMessage};

pub(super) fn name_of(link: &LinkMessage) -> Option<String> {
    link.attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name.clone()),
            _ => None,
        })
}

pub(super) fn peer_of(link: &LinkMessage) -> Option<u32> {
    link.attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::Link(index) => Some(*index),
            _ => None,
        })
}

pub(super) fn mac_of(link: &LinkMessage) -> Option<[u8; 6]> {
    link.attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::Address(bytes) => bytes.as_slice().try_into().ok(),
            _ => None,
        })
}
