//! Which names an endpoint may resolve, and where.

mod compile;
pub mod kept;
mod matcher;
mod names;
pub mod rule;
pub mod table;
#[cfg(test)]
mod tests;
pub mod verdict;
