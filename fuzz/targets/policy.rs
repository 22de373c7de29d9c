//! Fuzzes `holdfast_fuzz::policy`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| holdfast_fuzz::policy(data));
