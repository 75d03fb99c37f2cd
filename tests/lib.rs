//! Empty: the tests are in `e2e/`, one program that drives the real binaries.
