//! Tests that give objects to the pipeline and judge packets by the resulting table.

mod gaps;
mod judge;
mod lab;
mod limits;
mod minimal;
mod order;
