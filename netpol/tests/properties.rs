//! Properties that random rules and random policies must have.

#[cfg(test)]
mod properties {
    pub(crate) mod order;
    pub(crate) mod parity;
    pub(crate) mod random;
    pub(crate) mod renderers;
    pub(crate) mod world;
}
