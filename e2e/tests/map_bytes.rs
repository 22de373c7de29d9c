//! `bpftool map dump pinned …` of each map shows the documented bytes
//! (docs/src/maps.md; layouts of Cilium's `pkg/maps` and `bpf/lib/eps.h`).

#[path = "map_bytes/dump.rs"]
mod dump;
#[path = "map_bytes/flows.rs"]
mod flows;
#[path = "map_bytes/steering.rs"]
mod steering;
#[path = "map_bytes/tables.rs"]
mod tables;
