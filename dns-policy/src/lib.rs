//! The vocabulary that the agent and the DNS proxy share: names, patterns, DNS rules, and the
//! values they exchange. No input or output, no threads; only clocks are read.
#![warn(missing_docs)]
#![forbid(unsafe_code)]

pub mod boot_time;
pub mod duration;
pub mod endpoint_name;
pub mod epoch;
pub mod mapping;
pub mod name;
pub mod pattern;
pub mod reject_code;
pub mod rule;
pub mod stored_rules;
pub mod table;
pub mod verdict;
pub mod wall_time;
