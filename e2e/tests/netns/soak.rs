//! R7: memory is bounded for any number of names, and no step delays answers for long.

use holdfast_e2e::soak::{Reading, Size, play};

/// A quantity that must not grow.
type Count = (&'static str, fn(&Reading) -> usize);

/// Checks that counts and memory of the second half are at most slightly larger than in the first
/// half.
fn is_bounded(readings: &[Reading], memory: bool) {
    for reading in readings {
        let summary = &reading.summary;
        println!(
            "minute {:>4}: {:>7} pairs, {:>7} live, {:>6} zombies, {:>7} prefixes, {} identities, {:>4} MiB, longest event {:?}",
            reading.minute,
            summary.pairs,
            summary.names_live,
            summary.names_zombies,
            summary.ipcache_entries,
            summary.local_identities,
            reading.memory >> 20,
            reading.longest,
        );
    }
    let (first, second) = readings.split_at(readings.len() / 2);
    let most = |half: &[Reading], of: fn(&Reading) -> usize| half.iter().map(of).max().unwrap_or(0);
    let mut counts: Vec<Count> = vec![
        ("pairs", |r| r.summary.pairs),
        ("zombies", |r| r.summary.names_zombies),
        ("prefixes", |r| r.summary.ipcache_entries),
        ("identities", |r| r.summary.local_identities),
    ];
    if memory {
        counts.push(("memory", |r| {
            usize::try_from(r.memory).unwrap_or(usize::MAX)
        }));
    }
    for (what, of) in counts {
        let (before, after) = (most(first, of), most(second, of));
        assert!(
            after <= before + before / 10,
            "{what}: {before} in the first half, {after} in the second"
        );
    }
}

#[test]
fn an_hour_of_names() {
    let readings = play(Size {
        names: 300,
        hours: 1,
    })
    .unwrap();
    assert!(readings.iter().all(|r| r.summary.pairs > 300 * 16));
    is_bounded(&readings, false);
}

#[test]
#[ignore = "nightly: takes minutes"]
fn a_day_of_many_names() {
    let readings = play(Size {
        names: 10_000,
        hours: 24,
    })
    .unwrap();
    assert!(readings.iter().all(|r| r.summary.names_live > 160_000));
    is_bounded(&readings, true);
}
