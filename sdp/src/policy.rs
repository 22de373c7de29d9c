//! Which names an endpoint may resolve, and where.

pub mod rule;
pub mod table;
pub mod verdict;
