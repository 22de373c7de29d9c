//! Interfaces and addresses of another network namespace, read from this one.
//!
//! rtnetlink answers about the namespace that has a number here (IFLA_TARGET_NETNSID,
//! IFA_TARGET_NETNSID). That needs CAP_NET_ADMIN; setns(2) needs CAP_SYS_ADMIN.

use std::{fs::File, io, net::IpAddr, pin::pin};

use daemon::{
    lookup::Lookup,
    regular_file::{self, FileError},
};
use nix::{
    errno::Errno,
    sys::statfs::{NSFS_MAGIC, fstatfs},
};
use rtnetlink::{
    Handle,
    packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
        link::{LinkAttribute, LinkMessage},
    },
};
use tokio_stream::StreamExt as _;

use super::{
    DiscoverError, Netns,
    attributes::{name_of, peer_of},
    behind, links,
};

/// A namespace that can be read.
pub(super) struct Inside {
    handle: Handle,
    number: i32,
    /// Index of the pod's interface, if the namespace is the one behind an interface of the host.
    end: Option<u32>,
    /// While the file is open, no other namespace gets the number.
    _file: Option<File>,
}

impl Inside {
    /// Opens a namespace. `handle` is of a socket with strict checks.
    pub(super) async fn open(handle: Handle, netns: &Netns) -> Result<Self, DiscoverError> {
        if let Netns::Behind(interface) = netns {
            return Self::behind(handle, netns, interface).await;
        }
        let file = open_netns(netns)?;
        let number = number(&handle, &file).await;
        let number = number.map_err(|source| DiscoverError::Open {
            netns: netns.clone(),
            source,
        })?;
        Ok(Self {
            handle,
            number,
            end: None,
            _file: Some(file),
        })
    }

    /// The namespace behind an interface. It keeps its number while the interface is there.
    async fn behind(handle: Handle, netns: &Netns, interface: &str) -> Result<Self, DiscoverError> {
        let link = match links::named(&handle, interface).await {
            Lookup::Found(link) => link,
            Lookup::Gone => return Err(DiscoverError::NoNetns(netns.clone())),
            Lookup::Unknown(error) => return Err(DiscoverError::netlink(netns, error)),
        };
        let number = behind::namespace_behind(&link).filter(|_| behind::leads_elsewhere(&link));
        let (Some(number), Some(end)) = (number, peer_of(&link)) else {
            return Err(DiscoverError::NoPair {
                interface: interface.to_owned(),
                kind: behind::kind(&link),
            });
        };
        Ok(Self {
            handle,
            number,
            end: Some(end),
            _file: None,
        })
    }

    /// Whether an interface in the namespace is the pod's.
    pub(super) fn is_end(&self, link: &LinkMessage, ifname: &str) -> bool {
        match self.end {
            Some(end) => link.header.index == end,
            None => name_of(link).as_deref() == Some(ifname),
        }
    }

    pub(super) async fn each_link(&self, mut found: impl FnMut(LinkMessage)) -> io::Result<()> {
        let mut query = LinkMessage::default();
        let of_target = LinkAttribute::IfNetnsId(self.number);
        query.attributes.push(of_target.clone());
        dump(
            &self.handle,
            RouteNetlinkMessage::GetLink(query),
            |answer| {
                if let RouteNetlinkMessage::NewLink(link) = answer
                    && link.attributes.contains(&of_target)
                {
                    found(link);
                }
            },
        )
        .await
    }

    /// Addresses of one interface.
    pub(super) async fn addresses(&self, index: u32) -> io::Result<Vec<IpAddr>> {
        addresses(&self.handle, self.number, |message| {
            message.header.index == index
        })
        .await
    }
}

/// Addresses in the namespace that has this number here. `handle` is of a socket with strict checks: without them the
/// kernel ignores the number in a query.
pub(super) async fn addresses(
    handle: &Handle,
    number: i32,
    wanted: impl Fn(&AddressMessage) -> bool,
) -> io::Result<Vec<IpAddr>> {
    let mut query = AddressMessage::default();
    let of_target = AddressAttribute::TargetNetNsId(number);
    query.attributes.push(of_target.clone());
    let mut found = Vec::new();
    dump(handle, RouteNetlinkMessage::GetAddress(query), |answer| {
        if let RouteNetlinkMessage::NewAddress(address) = answer
            && address.attributes.contains(&of_target)
            && wanted(&address)
        {
            found.extend(links::address_of(&address));
        }
    })
    .await?;
    Ok(found)
}

async fn dump(
    handle: &Handle,
    query: RouteNetlinkMessage,
    mut each: impl FnMut(RouteNetlinkMessage),
) -> io::Result<()> {
    let mut message = NetlinkMessage::from(query);
    message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let answers = handle.clone().request(message);
    let mut answers = pin!(answers.map_err(|error| links::failed(&error))?);
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(answer) => each(answer),
            NetlinkPayload::Error(error) => {
                return Err(io::Error::from_raw_os_error(-error.raw_code()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The number that the namespace has here, or gets now.
async fn number(handle: &Handle, file: &File) -> io::Result<i32> {
    if let Some(number) = behind::number_of(handle, file).await? {
        return Ok(number);
    }
    match behind::give_number(handle, file).await {
        // The kernel gave the namespace a number meanwhile.
        Err(error) if error.raw_os_error() == Some(Errno::EEXIST as i32) => {}
        given => given?,
    }
    let number = behind::number_of(handle, file).await?;
    number.ok_or_else(|| io::Error::other("the kernel gives it no number"))
}

/// Opens the file of a namespace, and refuses any other file without waiting for it: a container runtime may name any
/// path.
pub(super) fn open_netns(netns: &Netns) -> Result<File, DiscoverError> {
    let failed = |source| DiscoverError::Open {
        netns: netns.clone(),
        source,
    };
    let not_netns = |found: String| DiscoverError::NotNetns {
        netns: netns.clone(),
        found,
    };
    let file = regular_file::open(&netns.path()).map_err(|error| match error {
        FileError::Io(source) if source.kind() == io::ErrorKind::NotFound => {
            DiscoverError::NoNetns(netns.clone())
        }
        FileError::Io(source) if source.kind() == io::ErrorKind::InvalidInput => {
            not_netns(source.to_string())
        }
        FileError::Io(source) => failed(source),
        other => not_netns(other.to_string()),
    })?;
    let system = fstatfs(&file).map_err(|errno| failed(errno.into()))?;
    match system.filesystem_type() {
        NSFS_MAGIC => Ok(file),
        _ => Err(not_netns("is an ordinary file".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn only_a_network_namespace_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| Netns::Path(dir.path().join(name));
        mkfifo(&dir.path().join("pipe"), Mode::S_IRWXU).unwrap();
        std::fs::write(dir.path().join("file"), "text").unwrap();
        for name in ["pipe", "file", ".", "no\0path"] {
            let error = open_netns(&at(name)).unwrap_err();
            assert!(matches!(error, DiscoverError::NotNetns { .. }), "{error}");
        }
        let absent = open_netns(&at("absent")).unwrap_err();
        assert!(matches!(absent, DiscoverError::NoNetns(_)), "{absent}");
        open_netns(&Netns::Path("/proc/self/ns/net".into())).unwrap();
    }
}
