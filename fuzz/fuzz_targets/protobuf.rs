#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| oncegate::fuzzing::run("protobuf", bytes));
