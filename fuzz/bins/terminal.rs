//! Fuzzes `cobox_fuzz::terminal`.
#![no_main]
#![allow(unsafe_code, reason = "the fuzzer's entry point is a C symbol")]

use std::sync::Once;

static QUIET: Once = Once::new();

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // The fuzzer's panic hook ends the process at any panic, but the screen catches those of its emulator. Uncaught
    // panics still end the process.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    cobox_fuzz::terminal::run(data);
});
