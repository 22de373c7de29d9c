//! Programs that an agent loads while another one owns the node, so that its takeover does not wait for the verifier.
//!
//! Loading makes maps that are missing, and a standby must not write: it loads only while every map has its pin. The
//! programs use the maps that were pinned then. If the owner replaced a map later, the programs are
//! loaded again.

use std::io;

use aya::Ebpf;
use shared_maps::user::{Globals, HeldPin};

use super::{
    closed,
    kernel::{KernelConfig, SHARED_PINS, SetUpError},
    program::{ProgramError, Programs},
    tunnel,
};

/// Loaded programs that are attached nowhere.
pub struct Warm {
    globals: Globals,
    /// The maps of the programs, held open.
    pins: Vec<HeldPin>,
    programs: Programs,
    /// The program of closed interfaces.
    closed: Ebpf,
}

/// Why programs are not loaded ahead.
#[derive(Debug, thiserror::Error)]
pub enum NotWarm {
    /// The owner has not made this pin, or it was removed.
    #[error("{0} is not pinned")]
    NoPin(&'static str),
    /// A pin was replaced while programs were loaded.
    #[error("the pin of a map changed meanwhile")]
    Changed,
    #[error("opening the pin of {0}: {1}")]
    Pin(&'static str, io::Error),
    #[error(transparent)]
    SetUp(#[from] SetUpError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl Warm {
    /// Loads the programs, if their maps are there. Attaches, pins and changes nothing.
    ///
    /// # Errors
    /// The programs cannot be loaded now; [`super::kernel::KernelDatapath::prepare`] loads them later.
    pub fn load(config: &KernelConfig) -> Result<Self, NotWarm> {
        let globals = Globals::new(&config.bpf_root);
        let mut pins = Vec::new();
        let of_tunnel = config.tunnel.iter().flat_map(|_| tunnel::PINS);
        for name in SHARED_PINS.into_iter().chain(of_tunnel) {
            let opened = HeldPin::open(&globals.path(name));
            let pin = opened.map_err(|error| NotWarm::Pin(name, error))?;
            pins.push(pin.ok_or(NotWarm::NoPin(name))?);
        }
        let programs = config.programs()?;
        programs.preload()?;
        let closed = closed::load(&programs)?;
        let warm = Self {
            globals,
            pins,
            programs,
            closed,
        };
        match warm.is_current() {
            true => Ok(warm),
            false => Err(NotWarm::Changed),
        }
    }

    /// Whether the programs use the maps that are pinned now.
    fn is_current(&self) -> bool {
        self.pins.iter().all(HeldPin::is_pinned)
    }

    /// The programs of endpoints and of closed interfaces, if they are what an agent on this BPF root would
    /// load now.
    pub fn current(self, globals: &Globals) -> Option<(Programs, Ebpf)> {
        let is_same = self.globals.root() == globals.root() && self.is_current();
        // Without connection tracking's types, the programs were loaded with fewer functions.
        (is_same && self.programs.reads_conntrack()).then_some((self.programs, self.closed))
    }
}
