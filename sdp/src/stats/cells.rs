//! Numbers to which many threads add. Each thread has its own row, so that no two threads write to
//! one cache line.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// Number of rows. If there are more threads, they share rows.
const ROWS: usize = 8;
/// How many numbers a cache line holds.
const LINE: usize = 8;

#[repr(align(64))]
#[derive(Debug, Default)]
struct Line([AtomicU64; LINE]);

/// A fixed number of sums. All clones share one state.
#[derive(Clone, Debug)]
pub(super) struct Cells {
    lines: Arc<[Line]>,
    lines_per_row: usize,
}

static NEXT_ROW: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static ROW: Cell<Option<usize>> = const { Cell::new(None) };
}

fn row() -> usize {
    ROW.with(|row| {
        row.get().unwrap_or_else(|| {
            let new = NEXT_ROW.fetch_add(1, Ordering::Relaxed) % ROWS;
            row.set(Some(new));
            new
        })
    })
}

impl Cells {
    /// A set of `len` sums, all zero.
    pub(super) fn new(len: usize) -> Self {
        let lines_per_row = len.div_ceil(LINE);
        Self {
            lines: (0..ROWS * lines_per_row).map(|_| Line::default()).collect(),
            lines_per_row,
        }
    }

    /// Adds to sum number `at`, modulo 2^64.
    pub(super) fn add(&self, at: usize, n: u64) {
        if let Some(cell) = self.cell(row(), at) {
            cell.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Sum number `at` over all rows, modulo 2^64.
    pub(super) fn get(&self, at: usize) -> u64 {
        let cells = (0..ROWS).filter_map(|row| self.cell(row, at));
        cells.fold(0, |sum, cell| {
            sum.wrapping_add(cell.load(Ordering::Relaxed))
        })
    }

    fn cell(&self, row: usize, at: usize) -> Option<&AtomicU64> {
        let line = self.lines.get(row * self.lines_per_row + at / LINE)?;
        line.0.get(at % LINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_add_up() {
        let cells = Cells::new(LINE + 1);
        let threads = 3 * ROWS;
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let cells = &cells;
                scope.spawn(move || {
                    for _ in 0..1000 {
                        cells.add(LINE, 1);
                        // What goes up in one thread goes down in another.
                        let step = if thread % 2 == 0 { 1 } else { u64::MAX };
                        cells.add(0, step);
                    }
                });
            }
        });
        assert_eq!(cells.get(LINE), u64::try_from(threads).expect("few") * 1000);
        assert_eq!(cells.get(0), 0);
        assert_eq!(cells.get(1), 0);
    }
}
