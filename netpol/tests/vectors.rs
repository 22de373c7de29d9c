//! Facts about each step from policies to rules, tables and exports, as data in `vectors/`.
//!
//! In the data, directions are seen from the vswitch: `egress` is traffic to the pod, and `ingress`
//! is traffic from it. An empty `src` or `dst` is any address, and port 0 is any port.

#[cfg(test)]
mod vectors {
    pub(crate) mod acls;
    pub(crate) mod configurator;
    pub(crate) mod order;
    pub(crate) mod read;
    pub(crate) mod sessions;
    pub(crate) mod tables;
}
