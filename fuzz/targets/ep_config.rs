//! Fuzzes `holdfast_fuzz::ep_config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| holdfast_fuzz::ep_config(data));
