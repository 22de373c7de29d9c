//! Interfaces of this network namespace: the node's addresses, and interfaces of Services.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, SocketAddrV4, SocketAddrV6},
};

use agent_core::kubernetes::node_interfaces::NodeInterfaces;
use daemon::lookup::Lookup;
use nix::ifaddrs::InterfaceAddress;
use shared_maps::user::InterfaceNames;

/// Name of the interface on which NodeLocal DNSCache has its addresses.
const LOCAL_DNS: &str = "nodelocaldns";

/// Interface on which kube-proxy puts the addresses of Services in IPVS mode.
const IPVS: &str = "kube-ipvs0";

/// The node's interfaces at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnInterfaces {
    /// Addresses of all interfaces, loopback included.
    pub addresses: BTreeSet<IpAddr>,
    /// The node's own addresses, without addresses of Services that kube-proxy or NodeLocal
    /// DNSCache puts on their own interfaces.
    pub own: BTreeSet<IpAddr>,
    /// What the interfaces say about Services.
    pub of_services: NodeInterfaces,
}

/// Whether an interface has addresses of Services.
pub fn is_of_services(name: &str) -> bool {
    [LOCAL_DNS, IPVS].contains(&name)
}

/// Name of the interface with this number.
pub fn name(ifindex: u32) -> Lookup<String> {
    Lookup::of_interface(InterfaceNames::open().and_then(|names| names.name(ifindex)))
}

/// The interfaces of this network namespace.
pub fn list() -> io::Result<OwnInterfaces> {
    Ok(collect(nix::ifaddrs::getifaddrs()?))
}

fn collect(found: impl Iterator<Item = InterfaceAddress>) -> OwnInterfaces {
    let mut all = OwnInterfaces::default();
    for interface in found {
        all.of_services.has_ipvs |= interface.interface_name == IPVS;
        let Some(address) = address_of(&interface) else {
            continue;
        };
        all.addresses.insert(address);
        if !is_of_services(&interface.interface_name) {
            all.own.insert(address);
        }
        let is_link_local = match address {
            IpAddr::V4(_) => false,
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        if interface.interface_name == LOCAL_DNS && !is_link_local {
            all.of_services.local_dns.insert(address);
        }
    }
    all
}

fn address_of(interface: &InterfaceAddress) -> Option<IpAddr> {
    let address = interface.address.as_ref()?;
    let v4 = address
        .as_sockaddr_in()
        .map(|a| IpAddr::V4(*SocketAddrV4::from(*a).ip()));
    v4.or_else(|| {
        address
            .as_sockaddr_in6()
            .map(|a| IpAddr::V6(*SocketAddrV6::from(*a).ip()))
    })
}

#[cfg(test)]
mod tests {
    use nix::{net::if_::InterfaceFlags, sys::socket::SockaddrStorage};

    use super::*;

    fn interface(name: &str, address: Option<&str>) -> InterfaceAddress {
        let address = address.map(|text| {
            let address: std::net::SocketAddr = text.parse().unwrap();
            SockaddrStorage::from(address)
        });
        InterfaceAddress {
            interface_name: name.to_owned(),
            flags: InterfaceFlags::empty(),
            address,
            netmask: None,
            broadcast: None,
            destination: None,
        }
    }

    #[test]
    fn interfaces_of_nodelocal_dns_and_of_ipvs_are_found_by_name() {
        let found = collect(
            [
                interface("eth0", Some("192.0.2.1:0")),
                interface("nodelocaldns", None),
                interface("nodelocaldns", Some("169.254.20.10:0")),
                interface("nodelocaldns", Some("[fe80::1]:0")),
                interface("kube-ipvs0", None),
                interface("kube-ipvs0", Some("10.96.0.10:0")),
            ]
            .into_iter(),
        );
        assert_eq!(found.addresses.len(), 4);
        assert_eq!(found.own, ["192.0.2.1".parse().unwrap()].into());
        let local: IpAddr = "169.254.20.10".parse().unwrap();
        assert_eq!(found.of_services.local_dns, [local].into());
        assert!(found.of_services.has_ipvs);
    }
}
