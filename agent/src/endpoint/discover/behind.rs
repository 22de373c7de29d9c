//! Which namespace is behind a host-side interface.
//!
//! A pod with NET_ADMIN chooses the numbers of its interfaces, and of their peers in a further
//! namespace. So two interfaces that name each other's number need not be a pair. The number that
//! the kernel gives to the namespace of an interface's peer (IFLA_LINK_NETNSID) is not the pod's
//! choice: the peer is the pod's if that number is the one of the pod's namespace (RTM_GETNSID).

use std::{fs::File, io, os::fd::AsRawFd as _, pin::pin};

use daemon::lookup::Lookup;
use rtnetlink::{
    Handle,
    packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
        nsid::{NsidAttribute, NsidMessage},
    },
};
use tokio_stream::StreamExt as _;

use super::{
    DiscoverError, Netns,
    attributes::{name_of, peer_of},
    inside::open_netns,
    links,
};

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
    if let Netns::Behind(interface) = netns {
        return Ok((name_of(&link).as_ref() == Some(interface)).then_some(link));
    }
    let file = match open_netns(netns) {
        Ok(file) => file,
        Err(DiscoverError::NoNetns(_)) => return Ok(None),
        Err(error) => return Err(io::Error::other(error.to_string())),
    };
    let number = number_of(handle, &file).await?;
    Ok((number == Some(behind)).then_some(link))
}

/// Whether the interface `first` leads to another namespace than `second`. An interface that is gone leads nowhere.
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

pub(super) fn infos(link: &LinkMessage) -> impl Iterator<Item = &LinkInfo> {
    let attributes = link.attributes.iter();
    let infos = attributes.filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    infos.flatten()
}

/// Whether an interface is one end of a pair. Other kinds, such as VLANs, name the interface that they use in the
/// same attribute.
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

/// Number of the namespace of an interface's peer; `None` if that is this namespace.
pub(super) fn namespace_behind(link: &LinkMessage) -> Option<i32> {
    let mut attributes = link.attributes.iter();
    attributes.find_map(|attribute| match attribute {
        LinkAttribute::LinkNetNsId(namespace) => Some(*namespace),
        _ => None,
    })
}

/// Number that the kernel gives to a namespace in this one; `None` if it has none.
pub(super) async fn number_of(handle: &Handle, netns: &File) -> io::Result<Option<i32>> {
    let query = RouteNetlinkMessage::GetNsId(named(netns)?);
    let answer = answer(handle, query, NLM_F_REQUEST).await?;
    let Some(RouteNetlinkMessage::NewNsId(found)) = answer else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    let mut attributes = found.attributes.iter();
    Ok(attributes.find_map(|attribute| match attribute {
        NsidAttribute::Id(number) if *number >= 0 => Some(*number),
        _ => None,
    }))
}

/// Makes the kernel give a namespace a free number in this one. `EEXIST`: the namespace has a number.
pub(super) async fn give_number(handle: &Handle, netns: &File) -> io::Result<()> {
    let mut query = named(netns)?;
    query.attributes.push(NsidAttribute::Id(-1));
    let query = RouteNetlinkMessage::NewNsId(query);
    answer(handle, query, NLM_F_REQUEST | NLM_F_ACK)
        .await
        .map(drop)
}

fn named(netns: &File) -> io::Result<NsidMessage> {
    let mut message = NsidMessage::default();
    let fd = u32::try_from(netns.as_raw_fd()).map_err(io::Error::other)?;
    message.attributes.push(NsidAttribute::Fd(fd));
    Ok(message)
}

/// The message that answers a query; `None` if the kernel only confirms the query.
async fn answer(
    handle: &Handle,
    query: RouteNetlinkMessage,
    flags: u16,
) -> io::Result<Option<RouteNetlinkMessage>> {
    let mut message = NetlinkMessage::from(query);
    message.header.flags = flags;
    let answers = handle.clone().request(message);
    let mut answers = pin!(answers.map_err(|error| links::failed(&error))?);
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(answer) => return Ok(Some(answer)),
            // Code 0 confirms.
            NetlinkPayload::Error(error) if error.raw_code() != 0 => {
                return Err(io::Error::from_raw_os_error(-error.raw_code()));
            }
            _ => {}
        }
    }
    Ok(None)
}
