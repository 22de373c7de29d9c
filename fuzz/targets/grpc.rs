//! Fuzzes `holdfast_fuzz::grpc`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| holdfast_fuzz::grpc(data));
