//! CiliumIdentity objects: this agent makes the missing objects of its pods' label sets, and one agent of the
//! cluster looks after all of them.
//!
//! ```text
//!  core ── WantedIdentities ─► feed ─► task ── create, get ──► API server
//!   ▲ ▲                                │ ▲                        │
//!   │ └──────── NumbersGiven ──────────┘ └── leader ── delete ────┤  (holds the Lease)
//!   └── watch, relay or stored list ◄─────────────────────────────┘
//! ```

#[cfg(feature = "kubernetes")]
mod leader;
#[cfg(feature = "kubernetes")]
mod objects;
#[cfg(feature = "kubernetes")]
mod obstacles;
#[cfg(feature = "kubernetes")]
mod operator;
#[cfg(feature = "kubernetes")]
mod queue;
#[cfg(feature = "kubernetes")]
mod resting;
#[cfg(feature = "kubernetes")]
pub(crate) mod task;
#[cfg(feature = "kubernetes")]
mod unused;
pub mod view;
