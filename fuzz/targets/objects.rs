//! Objects from the wire: whatever the bytes are, an object or a named field that is wrong; and
//! an object that was understood encodes to something that is understood the same.

#![no_main]

use kplane_proto::convert::{decode_object, encode_object};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Some(object)) = decode_object(bytes.to_vec().into()) {
        let again = decode_object(encode_object(&object));
        assert_eq!(again.ok().flatten(), Some(object));
    }
});
