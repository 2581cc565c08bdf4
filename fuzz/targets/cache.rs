//! The agent's cache file: whatever its content is, a picture or a reason; and a state that was restored from
//! it resumes or not, serves and is saved again.

#![no_main]

use kp_nodeagent::cache::Cache;
use kp_nodeagent::desired::{CliffGuard, Desired};
use libfuzzer_sys::fuzz_target;

/// The node that files are for: that of the golden files, which are good seeds.
const NODE: &str = "n1";

fuzz_target!(|bytes: &[u8]| {
    let _ = Cache::parse(bytes.to_vec(), NODE);
    // The checksum would keep everything else from being reached.
    let mut content = bytes.to_vec();
    Cache::seal(&mut content);
    if let Ok(held_state) = Cache::parse(content, NODE) {
        let mut desired = Desired::new(CliffGuard::default());
        desired.restore(held_state);
        desired.serve_restored();
        assert!(desired.saved_state(1).is_some());
    }
});
