//! Which namespace is behind a host-side interface.
//!
//! A pod with NET_ADMIN chooses the numbers of its interfaces, and of their peers in a further
//! namespace. So two interfaces that name each other's number need not be a pair. The number that
//! the kernel gives to the namespace of an interface's peer (IFLA_LINK_NETNSID) is not the pod's
//! choice: the peer is the pod's if that number is the one of the pod's namespace (RTM_GETNSID).

use std::{io, os::fd::AsRawFd as _, pin::pin};

use daemon::lookup::Lookup;
use rtnetlink::{
    Handle,
    packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
        nsid::{NsidAttribute, NsidMessage},
    },
};
use tokio_stream::StreamExt as _;

use super::{DiscoverError, Netns, attributes::peer_of, enter::open_netns, links};

/// The interface with the number `ifindex` of this namespace, if it is one end of a pair whose
/// other end is the interface with the number `inside` of `netns`.
pub(super) async fn pair_to(
    handle: &Handle,
    ifindex: u32,
    netns: &Netns,
    inside: u32,
) -> io::Result<Option<LinkMessage>> {
    // This look-up makes the kernel number the namespace behind the interface.
    let link = match links::link(handle, ifindex).await {
        Lookup::Found(link) => link,
        Lookup::Gone => return Ok(None),
        Lookup::Unknown(error) => return Err(error),
    };
    let leads = is_pair(&link) && peer_of(&link) == Some(inside);
    let Some(behind) = namespace_behind(&link).filter(|_| leads) else {
        return Ok(None);
    };
    let number = number_of(handle, netns).await?;
    Ok((number == Some(behind)).then_some(link))
}

/// Whether the interface `first` leads to another namespace than `second`. One that is gone
/// leads nowhere.
pub(super) async fn lead_apart(handle: &Handle, first: u32, second: u32) -> io::Result<bool> {
    match (
        links::link(handle, first).await,
        links::link(handle, second).await,
    ) {
        (Lookup::Found(first), Lookup::Found(second)) => {
            let behind = namespace_behind(&first);
            Ok(behind.is_none() || behind != namespace_behind(&second))
        }
        (Lookup::Unknown(error), _) | (_, Lookup::Unknown(error)) => Err(error),
        (Lookup::Gone, _) | (_, Lookup::Gone) => Ok(false),
    }
}

fn infos(link: &LinkMessage) -> impl Iterator<Item = &LinkInfo> {
    let attributes = link.attributes.iter();
    let infos = attributes.filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    infos.flatten()
}

/// Whether an interface is one end of a pair: others, of VLANs for example, name the interface
/// that they use.
fn is_pair(link: &LinkMessage) -> bool {
    let pair = |info: &LinkInfo| matches!(info, LinkInfo::Kind(InfoKind::Veth | InfoKind::Netkit));
    infos(link).any(pair)
}

/// Whether an interface is one end of a pair whose other end is in another namespace.
pub(super) fn leads_elsewhere(link: &LinkMessage) -> bool {
    is_pair(link) && namespace_behind(link).is_some()
}

/// Kind of an interface, as the kernel calls it.
pub(super) fn kind(link: &LinkMessage) -> String {
    let mut kinds = infos(link).filter_map(|info| match info {
        LinkInfo::Kind(kind) => Some(kind.to_string()),
        _ => None,
    });
    kinds.next().unwrap_or_else(|| "a device".to_owned())
}

/// Number of the namespace of an interface's peer; none if that is this namespace.
pub(super) fn namespace_behind(link: &LinkMessage) -> Option<i32> {
    let mut attributes = link.attributes.iter();
    attributes.find_map(|attribute| match attribute {
        LinkAttribute::LinkNetNsId(namespace) => Some(*namespace),
        _ => None,
    })
}

/// Number that the kernel gives to `netns` in this namespace; none if it has none, or if the
/// namespace is gone.
async fn number_of(handle: &Handle, netns: &Netns) -> io::Result<Option<i32>> {
    let file = match open_netns(netns) {
        Ok(file) => file,
        Err(DiscoverError::NoNetns(_)) => return Ok(None),
        Err(error) => return Err(io::Error::other(error.to_string())),
    };
    let mut query = NsidMessage::default();
    let fd = u32::try_from(file.as_raw_fd()).map_err(io::Error::other)?;
    query.attributes.push(NsidAttribute::Fd(fd));
    let mut message = NetlinkMessage::from(RouteNetlinkMessage::GetNsId(query));
    message.header.flags = NLM_F_REQUEST;
    let answers = handle.clone().request(message);
    let mut answers = pin!(answers.map_err(|error| links::failed(&error))?);
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewNsId(found)) => {
                let mut attributes = found.attributes.iter();
                return Ok(attributes.find_map(|attribute| match attribute {
                    NsidAttribute::Id(number) if *number >= 0 => Some(*number),
                    _ => None,
                }));
            }
            NetlinkPayload::Error(error) => {
                return Err(io::Error::from_raw_os_error(-error.raw_code()));
            }
            _ => {}
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}
