//! Fuzzes `holdfast_fuzz::pattern`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| holdfast_fuzz::pattern(data));
