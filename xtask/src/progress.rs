//! Progress of the set-up.

/// Says in one line what a step does and why.
pub(crate) fn step(what: &str, why: &str) {
    println!("setup: {what} ({why})");
}
