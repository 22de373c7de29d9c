//! Devices, as the kernel lists them, and the one that wraps.

use std::{fs, io};

use rtnetlink::{
    Handle, LinkMessageBuilder, LinkUnspec, LinkVxlan,
    packet_route::link::{
        InfoData, InfoVxlan, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage,
    },
};
use tokio_stream::StreamExt as _;

use super::TunnelError;

/// Name of the device that wraps.
pub(super) const NAME: &str = "hf_vxlan";

/// A device of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) mtu: u32,
    pub(super) is_ethernet: bool,
    /// UDP port of a VXLAN device.
    pub(super) tunnel_port: Option<u16>,
    /// Whether programs give the addresses of what it wraps.
    pub(super) is_external: bool,
}

impl Link {
    fn of(message: &LinkMessage) -> Self {
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            mtu: 0,
            is_ethernet: message.header.link_layer_type == LinkLayerType::Ether,
            tunnel_port: None,
            is_external: false,
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::LinkInfo(infos) => infos.iter().for_each(|info| link.add(info)),
                _ => {}
            }
        }
        link
    }

    fn add(&mut self, info: &LinkInfo) {
        let LinkInfo::Data(InfoData::Vxlan(parts)) = info else {
            return;
        };
        for part in parts {
            match part {
                InfoVxlan::Port(port) => self.tunnel_port = Some(*port),
                InfoVxlan::CollectMetadata(is) => self.is_external = *is,
                _ => {}
            }
        }
    }
}

fn failed(what: &'static str) -> impl FnOnce(rtnetlink::Error) -> TunnelError {
    move |source| TunnelError::Netlink { what, source }
}

/// All devices of this network namespace.
pub(super) async fn list(handle: &Handle) -> Result<Vec<Link>, TunnelError> {
    let mut found = Vec::new();
    let mut links = std::pin::pin!(handle.link().get().execute());
    while let Some(message) = links.next().await {
        found.push(Link::of(&message.map_err(failed("listing devices"))?));
    }
    Ok(found)
}

/// Makes the device that wraps, down, and gives its number.
pub(super) async fn create(handle: &Handle, port: u16) -> Result<u32, TunnelError> {
    let device = LinkMessageBuilder::<LinkVxlan>::new(NAME)
        .port(port)
        .learning(false)
        .collect_metadata(true)
        .build();
    let made = handle.link().add(device).execute().await;
    made.map_err(failed("making device hf_vxlan"))?;
    let links = list(handle).await?;
    let device = links.into_iter().find(|link| link.name == NAME);
    let device = device.ok_or_else(|| TunnelError::NoDevice(NAME.to_owned()))?;
    Ok(device.index)
}

/// Turns a device on.
pub(super) async fn set_up(handle: &Handle, index: u32) -> Result<(), TunnelError> {
    let device = LinkUnspec::new_with_index(index).up().build();
    let set = handle.link().set(device).execute().await;
    set.map_err(failed("turning device hf_vxlan on"))
}

pub(super) async fn delete(handle: &Handle, index: u32) -> Result<(), TunnelError> {
    let deleted = handle.link().del(index).execute().await;
    deleted.map_err(failed("removing device hf_vxlan"))
}

/// The device of the default route of IPv4; none if there is no such route.
pub fn default_device() -> io::Result<Option<String>> {
    Ok(of_default_route(&fs::read_to_string(
        "/proc/thread-self/net/route",
    )?))
}

/// Columns: interface, destination, gateway, flags, references, use, metric, mask.
fn of_default_route(table: &str) -> Option<String> {
    let routes = table.lines().skip(1).filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let is_default = columns.get(1) == Some(&"00000000") && columns.get(7) == Some(&"00000000");
        let metric: u32 = columns.get(6)?.parse().ok()?;
        is_default.then(|| columns.first().map(|name| (metric, (*name).to_owned())))?
    });
    routes.min().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_scale_device_is_that_of_the_best_default_route() {
        let head =
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT";
        let table = format!(
            "{head}\neth1\t00000000\t010200C0\t0003\t0\t0\t200\t00000000\t0\t0\t0\n\
             eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
             eth2\t00000000\t010200C0\t0003\t0\t0\t0\t00000080\t0\t0\t0\n\
             eth3\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
        );
        assert_eq!(of_default_route(&table).as_deref(), Some("eth0"));
        assert_eq!(of_default_route(head), None);
    }
}
