//! The proxy under a stand-in Cilium agent with its rules, maps and redirect. It has a lab of its
//! own, which is idle while the other lab is measured.

use anyhow::Result;
use holdfast_e2e::cilium::world::{Rule, World};
use holdfast_e2e::cilium::{CiliumAgent, Manner, place};
use holdfast_e2e::{Lab, Program, SdpOptions};

use super::paths::{PATTERNS, SERVER, SERVER6};
use super::servers::{start_nsd, widen_ports};

/// Identity of the client pod.
const POD: u32 = 41_001;
/// Security identity of the DNS server.
const DNS: u32 = 41_053;

/// The programs and namespaces. Programs are dropped before the namespaces.
pub(crate) struct UnderCilium {
    pub(crate) sdp: Program,
    _agent: CiliumAgent,
    _nsd: Program,
    pub(crate) lab: Lab,
}

impl UnderCilium {
    pub(crate) fn start(names: impl Iterator<Item = String>, workers: Option<u16>) -> Result<Self> {
        let lab = Lab::new()?;
        widen_ports(&lab)?;
        let nsd = start_nsd(&lab, names)?;
        let patterns: Vec<String> = (0..PATTERNS)
            .map(|p| format!("*.p{p}.bench.test"))
            .collect();
        let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
        let world = World {
            endpoints: vec![place::endpoint(&lab.a, POD)],
            rules: [(POD, vec![Rule::new(DNS, &patterns)])].into(),
            prefixes: [SERVER, SERVER6].map(|ip| (ip.into(), DNS)).to_vec(),
        };
        let _lxc = place::pin_lxc(&lab, &world, &[&lab.a])?;
        let _ipcache = place::pin_ipcache(&lab, &world)?;
        let manner = Manner {
            kept: 0,
            ..Manner::default()
        };
        let agent = CiliumAgent::start(&lab.node, world, manner)?;
        place::redirect(&lab)?;
        let options = SdpOptions {
            native: false,
            ..SdpOptions::default()
        };
        let mut options = options.flag("--agent-address=tcp://127.0.0.1:10095");
        if let Some(workers) = workers {
            options = options.flag(&format!("--workers={workers}"));
        }
        let sdp = lab.start_sdp(&options)?;
        Ok(Self {
            sdp,
            _agent: agent,
            _nsd: nsd,
            lab,
        })
    }
}
