//! Counts the table entries that this thread visits: the cost of an answer under the sink's lock.

use std::cell::Cell;

thread_local!(static STEPS: Cell<usize> = const { Cell::new(0) });

pub(crate) fn count() {
    STEPS.set(STEPS.get() + 1);
}

pub(crate) fn taken() -> usize {
    STEPS.get()
}
