//! Runs the kept inputs, and each of them cut short and with single bytes changed.

use std::{fs, path::Path};

use holdfast_fuzz::TARGETS;

/// Values that a byte is changed to.
const BYTES: [u8; 4] = [0x00, 0x3f, 0xc0, 0xff];
/// Number of places that are changed in each input.
const PLACES: usize = 64;

#[test]
fn kept_inputs_and_their_neighbours_do_no_harm() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, target) in TARGETS {
        let dir = corpus.join(name);
        let mut inputs = 0;
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.expect("a directory entry").path();
            let input = fs::read(&path).expect("a kept input can be read");
            println!("{}", path.display());
            target(&input);
            neighbours(&input, target);
            inputs += 1;
        }
        assert!(inputs > 0, "{} holds no input", dir.display());
    }
}

fn neighbours(input: &[u8], target: fn(&[u8])) {
    let step = input.len().div_ceil(PLACES).max(1);
    for at in (0..input.len()).step_by(step) {
        target(&input[..at]);
        let mut changed = input.to_vec();
        for byte in BYTES {
            changed[at] = byte;
            target(&changed);
        }
    }
}
