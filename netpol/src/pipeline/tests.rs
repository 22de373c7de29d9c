//! Objects go in, and the table that comes out judges packets.

mod gaps;
mod judge;
mod lab;
mod limits;
mod minimal;
mod order;
