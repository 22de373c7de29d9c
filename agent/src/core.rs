//! The one writer: events in, plans and effects out.
//!
//! ```text
//!   event ─► Core::plan ─► Plan (ordered steps) ─► Datapath ─► Core::commit ─► effects
//! ```
//! `Core` is synchronous and does no I/O: time and the outcome of each step are
//! passed in.

pub mod event;
