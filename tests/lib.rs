//! Nothing is here: the end-to-end tests are in `e2e/`, one program that drives the real binaries.
