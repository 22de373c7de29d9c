//! The programs of native devices, and packets of the tunnel byte by byte.

use std::net::Ipv4Addr;

use agent_core::datapath::plan::{Datapath as _, Step};
use agent_datapath::tunnel::{self, Tunnel, TunnelMode, TunnelSettings};
use anyhow::{Context as _, Result, ensure};
use aya::{TestRun, TestRunOptions, programs::SchedClassifier};
use shared_maps::event::Reason;
use shared_maps::lxc::{LxcKey, LxcValue};
use shared_maps::sources::{self, SourceKey, SourceValue};
use shared_maps::tunnel::DEFAULT_PORT;
use shared_maps::user::MapKind;
use shared_maps::world::{self, WorldKey};

use super::{
    CONTEXT_LEN, ENDPOINT, IFINDEX, INGRESS_IFINDEX_AT, Kernel, TCX_DROP, TCX_NEXT, TCX_REDIRECT,
    config, with_config,
};
use crate::packet::Packet;

/// The number that the programs have for the device that wraps.
pub const DEVICE: u32 = 4400;
/// Longest IP packet of the native devices.
pub const MTU: u32 = 1500;
/// Longest frame that a program may leave.
const LONGEST: usize = 4096;

/// What became of a packet at a native device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Passed on.
    Passed,
    /// Given to the device that wraps.
    Wrapped,
    Dropped,
}

/// A packet at a native device, after its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub fate: Fate,
    /// The counter that moved, if one did.
    pub reason: Option<Reason>,
    /// The frame as the program left it.
    pub frame: Vec<u8>,
}

/// Like [`super::with_kernel`], on a node of IPv4 with a part in the tunnel.
pub fn with_tunnel(mode: TunnelMode, test: impl FnOnce(&mut Kernel) -> Result<()> + Send) {
    with_mode(mode, false, test);
}

/// Like [`with_tunnel`]. `transparent`: whether proxies send queries under pods' addresses.
pub fn with_mode(
    mode: TunnelMode,
    transparent: bool,
    test: impl FnOnce(&mut Kernel) -> Result<()> + Send,
) {
    let settings = TunnelSettings {
        mode,
        devices: Vec::new(),
        port: DEFAULT_PORT,
        knows_pod_blocks: false,
    };
    let config = |root: &std::path::Path| super::KernelConfig {
        tunnel: Some(settings),
        transparent,
        ..config(root, false)
    };
    with_config(config, test);
}

impl Kernel {
    /// The tunnel below this root, whose programs have [`DEVICE`] and [`MTU`].
    pub(super) fn prepare_tunnel(&mut self, settings: TunnelSettings) -> Result<()> {
        let programs = self.datapath.programs().clone();
        let mut tunnel = Tunnel::new(programs, self.globals(), settings)?;
        tunnel.tell(DEVICE, MTU)?;
        self.tunnel = Some(tunnel);
        Ok(())
    }

    /// A packet comes from the network.
    pub fn from_net(&mut self, frame: &[u8]) -> Result<Outcome> {
        self.at_device("from_net", frame, 1)
    }

    /// A packet of a pod, or one that this node made (`arrival` 0), goes to the network.
    pub fn to_net(&mut self, frame: &[u8], arrival: u32) -> Result<Outcome> {
        self.at_device("to_net", frame, arrival)
    }

    /// What the kernel itself unwraps.
    pub fn from_tunnel(&mut self, frame: &[u8]) -> Result<Outcome> {
        self.at_device("from_tunnel", frame, 1)
    }

    fn at_device(&mut self, name: &'static str, frame: &[u8], arrival: u32) -> Result<Outcome> {
        let before = self.counts()?;
        let mut context = [0; CONTEXT_LEN];
        context[INGRESS_IFINDEX_AT..].copy_from_slice(&arrival.to_ne_bytes());
        let mut left = vec![0; LONGEST];
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(&context),
            data_out: Some(&mut left),
            ..TestRunOptions::default()
        };
        let result = self.program_of_tunnel(name)?.test_run(options)?;
        left.truncate(usize::try_from(result.data_size_out)?);
        let after = self.counts()?;
        let moved: Vec<Reason> = Reason::ALL
            .into_iter()
            .zip(before.iter().zip(&after))
            .filter(|(_, (before, after))| before != after)
            .map(|(reason, _)| reason)
            .collect();
        ensure!(moved.len() < 2, "counters that moved: {moved:?}");
        let reason = moved.first().copied();
        let fate = match result.return_value.cast_signed() {
            TCX_NEXT => Fate::Passed,
            TCX_REDIRECT => Fate::Wrapped,
            TCX_DROP => Fate::Dropped,
            other => anyhow::bail!("{reason:?} gave verdict {other}"),
        };
        let is_dropped = reason.is_some_and(Reason::is_drop);
        ensure!(
            is_dropped == (fate == Fate::Dropped),
            "{reason:?}: {fate:?}"
        );
        Ok(Outcome {
            fate,
            reason,
            frame: left,
        })
    }

    /// Mean nanoseconds of a program at a native device, over `repeat` runs in the kernel. Only for
    /// packets that it leaves as they are.
    pub fn cost_at_device(
        &mut self,
        name: &'static str,
        frame: &[u8],
        repeat: u32,
    ) -> Result<u128> {
        let options = TestRunOptions {
            data_in: Some(frame),
            repeat,
            ..TestRunOptions::default()
        };
        let result = self.program_of_tunnel(name)?.test_run(options)?;
        Ok(result.duration.as_nanos())
    }

    fn program_of_tunnel(&mut self, name: &'static str) -> Result<&mut SchedClassifier> {
        let tunnel = self.tunnel.as_mut().context("no tunnel")?;
        let program = tunnel.loaded().program_mut(name).context(name)?;
        let program: &mut SchedClassifier = program.try_into()?;
        if program.fd().is_err() {
            program.load()?;
        }
        Ok(program)
    }

    /// A pod of this node has `address`.
    pub fn local_pod(&mut self, address: Ipv4Addr, identity: u32) -> Result<()> {
        let value = LxcValue {
            ifindex: IFINDEX,
            lxc_id: ENDPOINT.0,
            sec_id: identity,
            ..LxcValue::default()
        };
        self.set_lxc(address, value)
    }

    /// `address` is the node's own.
    pub fn host_address(&mut self, address: Ipv4Addr) -> Result<()> {
        let value = LxcValue {
            flags: shared_maps::lxc::FLAG_HOST,
            ..LxcValue::default()
        };
        self.set_lxc(address, value)
    }

    fn set_lxc(&mut self, address: Ipv4Addr, value: LxcValue) -> Result<()> {
        let step = Step::SetLxc(LxcKey::v4(address.octets()), value);
        Ok(self.datapath.apply(&step)?)
    }

    /// The addresses of a block are outside of the cluster.
    pub fn outside_block(&mut self, ip: Ipv4Addr, len: u8) -> Result<()> {
        let key = WorldKey::new(ip.octets(), len).context("a block of IPv4")?;
        Ok(tunnel::blocks_map(&self.globals())?.set(&key, &world::PRESENT)?)
    }

    /// What is noted of a source.
    pub fn source(&self, address: Ipv4Addr) -> Result<Option<SourceValue>> {
        let map = self.open::<SourceKey, SourceValue>(sources::NAME, MapKind::LruHash)?;
        Ok(map.get(&SourceKey {
            ip: address.octets(),
        })?)
    }
}

/// A packet of the tunnel.
#[derive(Clone, Debug)]
pub struct Wrapped {
    pub source: Ipv4Addr,
    pub destination: Ipv4Addr,
    pub port: u16,
    pub protocol: u8,
    /// Options of the outer header; a multiple of four bytes.
    pub options: Vec<u8>,
    /// Flags and offset of a fragment.
    pub fragment: u16,
    pub header: [u8; 8],
    pub ether_type: u16,
    /// The inner packet, from its IP header on.
    pub inner: Vec<u8>,
}

impl Wrapped {
    /// Between the addresses of `inner`, with this VNI.
    pub fn new(source: Ipv4Addr, destination: Ipv4Addr, vni: u32, inner: &Packet) -> Self {
        Self {
            source,
            destination,
            port: DEFAULT_PORT,
            protocol: 17,
            options: Vec::new(),
            fragment: 0x4000,
            header: shared_maps::tunnel::header(vni),
            ether_type: 0x0800,
            inner: inner.ip(),
        }
    }

    /// The outer packet from its IP header on.
    pub fn ip(&self) -> Vec<u8> {
        let mut udp = Vec::new();
        let length = u16::try_from(30 + self.inner.len()).expect("short");
        for word in [40_000, self.port, length, 0] {
            udp.extend(word.to_be_bytes());
        }
        udp.extend(self.header);
        udp.extend([2; 12]);
        udp.extend(self.ether_type.to_be_bytes());
        udp.extend(&self.inner);
        let header = 20 + self.options.len();
        let total = u16::try_from(header + udp.len()).expect("short");
        let mut ip = vec![0x40 | u8::try_from(header / 4).expect("short"), 0];
        ip.extend(total.to_be_bytes());
        ip.extend([0, 7]);
        ip.extend(self.fragment.to_be_bytes());
        ip.extend([64, self.protocol, 0, 0]);
        ip.extend(self.source.octets());
        ip.extend(self.destination.octets());
        ip.extend(&self.options);
        ip.extend(udp);
        ip
    }

    /// The outer packet in a frame.
    pub fn frame(&self) -> Vec<u8> {
        crate::packet::ethernet(0x0800, &self.ip())
    }
}

/// The Internet checksum of `bytes`, with the field for it as it is: 0 if it is right.
pub fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| {
            u32::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]))
        })
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}
