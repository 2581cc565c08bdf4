//! Answers of the kernel: whatever the bytes are, elements, flows, virtual servers, IP sets or an error.

#![no_main]

use kplane_dataplane::backend::nftables::{Set, decode_elements};
use kplane_model::Family;
use kplane_netlink::Messages;
use kplane_netlink::conntrack::Flow;
use kplane_netlink::ipset::Found;
use kplane_netlink::ipvs::{Listing, Server};
use kplane_netlink::nflog::Logged;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, dump)) = bytes.split_first() else {
        return;
    };
    for message in Messages(dump) {
        let _ = (Flow::parse(message), Server::parse(message));
        let _ = Logged::parse(message);
    }
    let _ = Found::parse(Messages(dump));
    if let Ok(text) = std::str::from_utf8(dump) {
        let _ = Listing::parse(text, Family::ALL[usize::from(*choice & 1)]);
    }
    let sets: Vec<Set> = Set::all().collect();
    let set = sets[usize::from(*choice >> 1) % sets.len()];
    let _ = decode_elements(dump, Family::ALL[usize::from(*choice & 1)], set);
});
