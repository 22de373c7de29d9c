//! Fuzzes `holdfast_fuzz::answer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| holdfast_fuzz::answer(data));
