//! The tier `kernel`: packets through the loaded eBPF programs, and the agent's own work with the
//! kernel: maps, links, filters, rules. Needs root.

mod attach;
mod conntrack;
mod deny_response;
mod ended;
mod events;
mod from_pod;
mod lifecycle;
mod link;
mod neighbour;
mod nf_tables;
mod nftables;
mod others;
mod plan;
mod quota;
mod redirected;
mod replies;
mod sandbox;
mod sdp_maps;
mod sender;
mod slots;
mod steer;
mod to_pod;
mod tunnel;
mod tunnel_icmp;
mod tunnel_vectors;
mod tunnel_wire;
