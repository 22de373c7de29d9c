//! Paths of the pins below the BPF root.

/// Default root of the BPF file system.
pub const BPF_ROOT: &str = "/sys/fs/bpf";
/// Directory of the maps, below the root.
pub const GLOBALS: &str = "tc/globals";
/// Directory of our program links, below the root: one sub-directory per endpoint id, the two
/// directories below, and the link of the steering program.
pub const LINKS: &str = "holdfast/links";
/// Directory of the links of `to_proxy`, below the root.
pub const TO_PROXY_LINKS: &str = "holdfast/links/to_proxy";
/// Directory of the links of `from_net`, below the root.
pub const FROM_NET_LINKS: &str = "holdfast/links/from_net";
/// Directory of the links of `to_net`, below the root.
pub const TO_NET_LINKS: &str = "holdfast/links/to_net";
/// Directory of the link that closes the tunnel's device towards the node, below the root.
pub const TUNNEL_LINKS: &str = "holdfast/links/tunnel";
/// Directory of the links of `closed`, below the root: one sub-directory per endpoint document.
pub const CLOSED_LINKS: &str = "holdfast/links/closed";
/// Directory below the root. It exists, empty, while transparent mode is on: the datapath then
/// delivers answers that are addressed to pods to the proxies that wait for them.
pub const TRANSPARENT: &str = "holdfast/transparent";
/// Lock of the agent that owns all pins below the root: a directory, because a BPF file system has
/// no regular files. Only root may open it.
pub const AGENT_LOCK: &str = "holdfast/locks/agent";
/// Lock of the agent that waits for [`AGENT_LOCK`]: of several, one waits for it. Only root may open it.
pub const STANDBY_LOCK: &str = "holdfast/locks/standby";
/// Lock for loading the steering program. Only root may open it.
pub const PROGRAMS_LOCK: &str = "holdfast/locks/programs";
/// Lock for taking a steering slot. Only root and the proxies' group may open it.
pub const SLOTS_LOCK: &str = "holdfast/locks/slots";
