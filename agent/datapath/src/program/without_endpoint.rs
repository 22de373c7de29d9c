//! Programs that belong to no endpoint: `to_proxy` and `closed`.

use std::{os::fd::AsFd as _, path::Path};

use aya::{Ebpf, EbpfLoader, TestRun as _, TestRunOptions, programs::SchedClassifier};
use shared_maps::{
    endpoint::{
        CONFIGS, DENY_CLOCKS, HIGH_INTERFACES, INTERFACES, NO_LINK_HEADER, NODE_FLAGS, POLICIES,
        PROXY_CLOCKS, QUEUES, Queue, QueueItem,
    },
    fragment,
    user::{MapOfMaps, create_queue},
};

use super::{
    super::{
        filter::Order,
        hook::{Attach, TO_PROXY, put},
        interfaces::Begin,
    },
    OBJECT, ProgramError, Programs, descriptor, load, program, settings,
};

/// Maps, with the number of entries that a program without an endpoint needs at most.
const WITHOUT_ENDPOINT: [(&str, u32); 8] = [
    (INTERFACES, 1),
    (HIGH_INTERFACES, 1),
    (CONFIGS, 1),
    (POLICIES, 1),
    (QUEUES, 4),
    (PROXY_CLOCKS, 1),
    (DENY_CLOCKS, 1),
    ("RECENT", 1),
];

impl Programs {
    /// Loads `to_proxy` for interfaces whose packets begin like this.
    pub(in super::super) fn load_to_proxy(&self, begin: Begin) -> Result<Ebpf, ProgramError> {
        let flags = match begin {
            Begin::Ethernet => 0,
            Begin::Ip => NO_LINK_HEADER,
        };
        self.load_without_endpoint(TO_PROXY.program, flags)
    }

    /// Loads a program that belongs to no endpoint.
    pub(in super::super) fn load_without_endpoint(
        &self,
        name: &'static str,
        flags: u8,
    ) -> Result<Ebpf, ProgramError> {
        let mut ebpf = self.object_without_endpoint(name, flags)?;
        let loaded: &mut SchedClassifier = program(&mut ebpf, name)?;
        loaded.load().map_err(|error| load(name, &error))?;
        Ok(ebpf)
    }

    /// Makes the maps of programs that belong to no endpoint. The programs are loaded when they are
    /// attached; `name` is for errors.
    pub(in super::super) fn object_without_endpoint(
        &self,
        name: &'static str,
        flags: u8,
    ) -> Result<Ebpf, ProgramError> {
        let flags = (self.node | u32::from(flags)).to_ne_bytes();
        let mut loader = EbpfLoader::new();
        loader
            .default_map_pin_directory(self.globals.dir())
            .override_global(NODE_FLAGS, &flags[..], true);
        for (name, entries) in WITHOUT_ENDPOINT {
            loader.map_max_entries(name, entries);
        }
        self.place_tunnel_maps(&mut loader);
        let ebpf = loader.load(OBJECT).map_err(|error| load(name, &error))?;
        // Fragments of packets of no endpoint.
        let (items, size) = (fragment::MAX_ENTRIES / 32, size_of::<QueueItem>());
        let queue = create_queue("hf_queue", size, items).map_err(settings)?;
        MapOfMaps::new(descriptor(&ebpf, QUEUES)?, QUEUES)
            .set(&[(Queue::Fragments.index(0), queue.as_fd())])
            .map_err(settings)?;
        Ok(ebpf)
    }

    /// Whether a program can set the source address of the tunnel's outer header.
    pub(in super::super) fn takes_outer_source(ebpf: &mut Ebpf) -> Result<bool, ProgramError> {
        let name = "tunnel_probe";
        let probe: &mut SchedClassifier = program(ebpf, name)?;
        probe.load().map_err(|error| load(name, &error))?;
        let options = TestRunOptions {
            data_in: Some(&[0; 64]),
            ..TestRunOptions::default()
        };
        let result = probe
            .test_run(options)
            .map_err(|error| load(name, &error))?;
        probe.unload().map_err(|error| load(name, &error))?;
        Ok(result.return_value == 1)
    }

    /// Attaches what [`Self::load_to_proxy`] has loaded, by the link pinned at `path`.
    pub(in super::super) fn attach_to_proxy(
        ebpf: &mut Ebpf,
        attach: Attach,
        ifindex: u32,
        path: &Path,
    ) -> Result<(), ProgramError> {
        let program = program(ebpf, TO_PROXY.program)?;
        put(program, (TO_PROXY, attach), ifindex, path, Order::First)
    }
}
