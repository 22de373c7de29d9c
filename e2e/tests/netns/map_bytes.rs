//! `bpftool map dump pinned …` of each map shows the documented bytes
//! (docs/src/maps.md; layouts of Cilium's `pkg/maps` and `bpf/lib/eps.h`).

mod dump;
mod flows;
mod steering;
mod tables;
