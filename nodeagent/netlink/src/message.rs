//! Netlink messages (`struct nlmsghdr`, linux/netlink.h) and the nfnetlink header behind it.

use nix::errno::Errno;

use super::attribute::{Attribute, AttributeWriter, Attributes, aligned, field, set_field};

/// `sizeof(struct nlmsghdr)`.
pub(super) const HEADER_BYTES: usize = 16;
/// Offsets in `struct nlmsghdr`.
const LENGTH_OFFSET: usize = 0;
const TYPE_OFFSET: usize = 4;
const FLAGS_OFFSET: usize = 6;
const SEQUENCE_OFFSET: usize = 8;
/// `sizeof(struct nfgenmsg)` (linux/netfilter/nfnetlink.h): family, version, resource id.
pub(super) const NFGENMSG_BYTES: usize = 4;
/// `NFNETLINK_V0`.
const NFNETLINK_V0: u8 = 0;

/// `NLMSG_ERROR`: an acknowledgement, with error 0 for success.
pub(super) const NLMSG_ERROR: u16 = 2;
/// `NLMSG_DONE`: the end of a dump.
pub(super) const NLMSG_DONE: u16 = 3;

/// `NLM_F_REQUEST`.
pub(super) const NLM_F_REQUEST: u16 = 0x01;
/// `NLM_F_ACK`.
pub(super) const NLM_F_ACK: u16 = 0x04;
/// `NLM_F_EXCL`: the request is refused if the object exists.
pub(super) const NLM_F_EXCL: u16 = 0x200;
/// `NLM_F_CREATE`.
pub(super) const NLM_F_CREATE: u16 = 0x400;
/// `NLM_F_DUMP_INTR`: the dumped objects changed meanwhile.
pub(super) const NLM_F_DUMP_INTR: u16 = 0x10;
/// `NLM_F_DUMP`.
pub(super) const NLM_F_DUMP: u16 = 0x300;
/// `NLM_F_CAPPED`: an error message repeats only the header of the request.
const NLM_F_CAPPED: u16 = 0x100;
/// `NLM_F_ACK_TLVS`: an error message ends with attributes.
const NLM_F_ACK_TLVS: u16 = 0x200;

/// `NLMSGERR_ATTR_MSG`: the kernel's message.
const NLMSGERR_ATTR_MSG: u16 = 1;
/// `NLMSGERR_ATTR_OFFS`: the offset of the refused attribute in the request (host byte order).
const NLMSGERR_ATTR_OFFS: u16 = 2;

/// A message that no subsystem of netfilter has: the lower byte of a type is the message (linux/netfilter/
/// nfnetlink.h).
const NO_MESSAGE: u16 = 0xff;

/// Appends a message: header, nfnetlink header and the attributes that `fill` writes. The sequence
/// number stays 0 for the socket to fill in.
pub(super) fn append(
    bytes: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    (family, resource): (u8, u16),
    fill: impl FnOnce(&mut AttributeWriter<'_>),
) {
    let [resource_0, resource_1] = resource.to_be_bytes();
    let header = [family, NFNETLINK_V0, resource_0, resource_1];
    append_with(bytes, kind, flags, &header, fill);
}

/// Appends a message of any subsystem. `header` comes before the attributes, and is a multiple of
/// four bytes long.
fn append_with(
    bytes: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    header: &[u8],
    fill: impl FnOnce(&mut AttributeWriter<'_>),
) {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(header);
    let behind_header = bytes.len();
    let mut attributes = AttributeWriter::new(bytes);
    fill(&mut attributes);
    if attributes.is_oversized() {
        // No attribute of it: the kernel refuses the message by its type, and with it a whole batch.
        bytes.truncate(behind_header);
        set_field(bytes, start, TYPE_OFFSET, (kind | NO_MESSAGE).to_ne_bytes());
    }
    // A batch is refused long before 4 GiB: NfSocket::max_batch_bytes.
    let len = bytes.len().saturating_sub(start);
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    set_field(bytes, start, LENGTH_OFFSET, len.to_ne_bytes());
}

/// Adds flags to the message that starts at `start`.
pub(super) fn add_flags(bytes: &mut [u8], start: usize, flags: u16) {
    if let Some(field) = field(bytes, start, FLAGS_OFFSET) {
        *field = (u16::from_ne_bytes(*field) | flags).to_ne_bytes();
    }
}

/// Sets the sequence number of the message that starts at `start`.
pub(super) fn set_sequence(bytes: &mut [u8], start: usize, sequence: u32) {
    set_field(bytes, start, SEQUENCE_OFFSET, sequence.to_ne_bytes());
}

/// A request to the kernel outside a batch.
#[derive(Clone, Debug)]
pub struct Request {
    /// The name of the request, for error messages.
    pub(super) what: &'static str,
    pub(super) bytes: Vec<u8>,
}

impl Request {
    /// Creates a request of type `kind` (subsystem << 8 | message) for an address family.
    pub fn new(
        what: &'static str,
        kind: u16,
        family: u8,
        fill: impl FnOnce(&mut AttributeWriter<'_>),
    ) -> Self {
        let mut bytes = Vec::with_capacity(128);
        append(&mut bytes, kind, 0, (family, 0), fill);
        Self { what, bytes }
    }

    /// Creates a request about a numbered resource of a subsystem.
    pub(super) fn for_resource(
        what: &'static str,
        kind: u16,
        of: (u8, u16),
        fill: impl FnOnce(&mut AttributeWriter<'_>),
    ) -> Self {
        let mut bytes = Vec::with_capacity(32);
        append(&mut bytes, kind, 0, of, fill);
        Self { what, bytes }
    }

    /// Creates a request outside of netfilter; `header` is the header of its subsystem.
    pub(super) fn with_header(
        what: &'static str,
        kind: u16,
        header: &[u8],
        fill: impl FnOnce(&mut AttributeWriter<'_>),
    ) -> Self {
        let mut bytes = Vec::with_capacity(64);
        append_with(&mut bytes, kind, 0, header, fill);
        Self { what, bytes }
    }

    /// Adds flags (`NLM_F_*`) to those that the socket sets.
    #[must_use]
    pub(super) fn flagged(mut self, flags: u16) -> Self {
        add_flags(&mut self.bytes, 0, flags);
        self
    }

    /// Returns the bytes to send, except for the sequence number.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// One received message.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The type: `NLMSG_*`, or subsystem << 8 | message.
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    /// The sequence number of the request that this message answers.
    pub sequence: u32,
    /// The port of the socket whose request or transaction the message is about; 0 = none.
    pub port: u32,
    /// The bytes after the netlink header.
    pub body: &'a [u8],
}

impl<'a> Message<'a> {
    /// Returns the address family in the nfnetlink header, 0 when there is none.
    pub fn family(self) -> u8 {
        self.body.first().copied().unwrap_or_default()
    }

    /// Returns the attributes behind the nfnetlink header.
    pub fn attributes(self) -> Attributes<'a> {
        Attributes(self.body.get(NFGENMSG_BYTES..).unwrap_or_default())
    }

    /// Returns the number of bytes from the start of this message to the start of the next one.
    pub(super) fn aligned_len(self) -> usize {
        aligned(HEADER_BYTES.saturating_add(self.body.len()))
    }

    /// Returns the content of an `NLMSG_ERROR`; `None` for other messages and cut ones.
    pub(super) fn acknowledgement(self) -> Option<Acknowledgement> {
        if self.kind != NLMSG_ERROR {
            return None;
        }
        let error = i32::from_ne_bytes(*self.body.first_chunk()?);
        let request = self.body.get(4..)?;
        let request_len = u32::from_ne_bytes(*request.first_chunk()?) as usize;
        let repeated = match self.flags & NLM_F_CAPPED {
            0 => aligned(request_len.max(HEADER_BYTES)),
            _ => HEADER_BYTES,
        };
        let extended = match self.flags & NLM_F_ACK_TLVS {
            0 => &[],
            _ => request.get(repeated..).unwrap_or_default(),
        };
        let reason = Attributes(extended).get(NLMSGERR_ATTR_MSG);
        let offset = Attributes(extended).get(NLMSGERR_ATTR_OFFS);
        Some(Acknowledgement {
            errno: (error != 0).then(|| Errno::from_raw(error.wrapping_neg())),
            code: error.wrapping_neg(),
            reason: reason.and_then(Attribute::as_str).map(str::to_owned),
            offset: offset
                .and_then(|a| a.payload.try_into().ok())
                .map(|bytes| u32::from_ne_bytes(bytes) as usize),
        })
    }
}

/// The content of an `NLMSG_ERROR` (`struct nlmsgerr`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Acknowledgement {
    /// The error; `None` for success.
    pub(super) errno: Option<Errno>,
    /// The error's number, 0 for success: some subsystems have numbers that `Errno` does not know.
    pub(super) code: i32,
    /// The kernel's message, if any.
    pub(super) reason: Option<String>,
    /// The offset of the refused attribute in the request.
    pub(super) offset: Option<usize>,
}

/// The messages of one or more datagrams. Iteration stops at the end, or where the bytes are not a
/// message.
#[derive(Clone, Copy, Debug)]
pub struct Messages<'a>(pub &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let header: [u8; HEADER_BYTES] = *self.0.first_chunk()?;
        let [
            l0,
            l1,
            l2,
            l3,
            k0,
            k1,
            f0,
            f1,
            s0,
            s1,
            s2,
            s3,
            p0,
            p1,
            p2,
            p3,
        ] = header;
        let len = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let Some(body) = self.0.get(HEADER_BYTES..len) else {
            self.0 = &[];
            return None;
        };
        self.0 = self.0.get(aligned(len)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([k0, k1]),
            flags: u16::from_ne_bytes([f0, f1]),
            sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
            port: u32::from_ne_bytes([p0, p1, p2, p3]),
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns an error as the kernel sends it with `NETLINK_EXT_ACK` and `NETLINK_CAP_ACK`.
    fn error_message() -> Vec<u8> {
        let mut bytes = Vec::new();
        append(
            &mut bytes,
            NLMSG_ERROR,
            NLM_F_CAPPED | NLM_F_ACK_TLVS,
            (0, 0),
            |_| {},
        );
        bytes.truncate(HEADER_BYTES);
        bytes.extend_from_slice(&(-2_i32).to_ne_bytes());
        bytes.extend_from_slice(&[0; HEADER_BYTES]);
        let mut attributes = AttributeWriter::new(&mut bytes);
        attributes.str(NLMSGERR_ATTR_MSG, "no such thing");
        attributes.bytes(NLMSGERR_ATTR_OFFS, &44_u32.to_ne_bytes());
        let len = u32::try_from(bytes.len()).unwrap();
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        bytes
    }

    #[test]
    fn errors_carry_the_kernels_words() {
        let bytes = error_message();
        let answer = Messages(&bytes).next().unwrap().acknowledgement();
        let expected = Acknowledgement {
            errno: Some(Errno::ENOENT),
            code: 2,
            reason: Some("no such thing".to_owned()),
            offset: Some(44),
        };
        assert_eq!(answer, Some(expected));
    }

    #[test]
    fn messages_are_told_apart() {
        let mut bytes = Vec::new();
        append(&mut bytes, 7, 0, (2, 10), |w| w.u8(1, 9));
        append(&mut bytes, 8, NLM_F_ACK, (10, 0), |_| {});
        add_flags(&mut bytes, 0, NLM_F_DUMP);
        set_sequence(&mut bytes, 0, 77);
        let found: Vec<_> = Messages(&bytes).collect();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].kind, found[0].sequence), (7, 77));
        assert_eq!(found[0].flags, NLM_F_REQUEST | NLM_F_DUMP);
        assert_eq!(found[0].family(), 2);
        assert_eq!(found[0].attributes().get(1).unwrap().payload, [9]);
        assert_eq!(found[1].flags, NLM_F_REQUEST | NLM_F_ACK);
        assert_eq!(found[1].acknowledgement(), None);
    }

    /// The kernel refuses such a message; the ones around it stay as they are.
    #[test]
    fn a_message_with_an_oversized_attribute_has_no_attributes_and_an_unknown_type() {
        let mut bytes = Vec::new();
        append(&mut bytes, 7, 0, (2, 0), |w| w.u8(1, 9));
        append(&mut bytes, 0x0a03, 0, (2, 0), |w| {
            w.u8(1, 9);
            w.bytes(2, &[0; 1 << 16]);
        });
        append(&mut bytes, 8, 0, (2, 0), |w| w.u8(1, 9));
        let found: Vec<_> = Messages(&bytes)
            .map(|message| (message.kind, message.attributes().count()))
            .collect();
        assert_eq!(found, [(7, 1), (0x0aff, 0), (8, 1)]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            for message in Messages(&bytes) {
                let _ = message.acknowledgement();
                prop_assert!(message.attributes().count() < 100);
            }
        }

        #[test]
        fn damaged_errors_are_read(position in 0_usize..80, byte in any::<u8>(), cut in 0_usize..80) {
            let mut bytes = error_message();
            let position = position % bytes.len();
            bytes[position] = byte;
            bytes.truncate(bytes.len() - cut % bytes.len());
            for message in Messages(&bytes) {
                let _ = message.acknowledgement();
            }
        }
    }
}
