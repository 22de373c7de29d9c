//! Selectors: what policy says about identities.

pub mod cache;
mod index;
#[expect(
    clippy::module_inception,
    reason = "the module is about many, the file about one"
)]
pub mod selector;
