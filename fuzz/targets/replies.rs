//! Answers of the kernel: whatever the bytes are, elements or an error.

#![no_main]

use kp_nodeagent::backend::nftables::{Set, decode_elements};
use kplane_model::Family;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, dump)) = bytes.split_first() else {
        return;
    };
    let sets: Vec<Set> = Set::all().collect();
    let set = sets[usize::from(*choice >> 1) % sets.len()];
    let _ = decode_elements(dump, Family::ALL[usize::from(*choice & 1)], set);
});
