//! Objects in, packets judged by the table out.

mod gaps;
mod judge;
mod lab;
mod limits;
mod minimal;
mod order;
