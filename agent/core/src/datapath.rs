//! What the datapath is to do: operations in order, and questions about its maps.

pub mod attachment;
pub mod late_text;
pub mod link;
pub mod map_query;
pub mod memory;
pub mod plan;
