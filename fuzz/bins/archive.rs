//! Fuzzes `cobox_fuzz::archive`.
#![no_main]
#![allow(unsafe_code, reason = "the fuzzer's entry point is a C symbol")]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cobox_fuzz::archive::run(data));
