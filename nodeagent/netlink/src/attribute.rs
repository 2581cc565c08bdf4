//! Netlink attributes (`struct nlattr`, linux/netlink.h): writing and reading.

/// `sizeof(struct nlattr)`: length and type, two bytes each.
const HEADER_BYTES: usize = 4;
/// `NLA_ALIGNTO`: every attribute starts at a multiple of four bytes.
const ALIGN_BYTES: usize = 4;
/// `NLA_F_NESTED`: the payload is a list of attributes.
pub(super) const NLA_F_NESTED: u16 = 1 << 15;
/// `NLA_TYPE_MASK`: the type without `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Longest payload of one attribute: the 16-bit length counts the header too.
pub const MAX_ATTRIBUTE_PAYLOAD_BYTES: usize = u16::MAX as usize - HEADER_BYTES;

/// Rounds up to the next multiple of four. A length that has none is longer than any bytes, and so is
/// the result.
pub(super) fn aligned(len: usize) -> usize {
    len.checked_next_multiple_of(ALIGN_BYTES).unwrap_or(usize::MAX)
}

/// Sets the field at `offset` into the header that starts at `start`. Changes nothing where the bytes
/// end before the end of the field.
#[inline]
pub(super) fn set_field<const N: usize>(
    bytes: &mut [u8],
    start: usize,
    offset: usize,
    value: [u8; N],
) {
    if let Some(field) = field(bytes, start, offset) {
        *field = value;
    }
}

/// Returns the field at `offset` into the header that starts at `start`.
#[inline]
pub(super) fn field<const N: usize>(
    bytes: &mut [u8],
    start: usize,
    offset: usize,
) -> Option<&mut [u8; N]> {
    bytes.get_mut(start..)?.get_mut(offset..)?.first_chunk_mut()
}

/// Appends attributes to a message. Integers are written in network byte order, as nf_tables
/// requires.
///
/// An attribute longer than [`MAX_ATTRIBUTE_PAYLOAD_BYTES`] cannot be written: a wrong length would make the
/// kernel read data as attributes. The writer leaves it out and remembers that; the message is then made one
/// that the kernel refuses. So the object that caused it fails, and no other.
#[derive(Debug)]
pub struct AttributeWriter<'a> {
    bytes: &'a mut Vec<u8>,
    oversized: bool,
}

impl<'a> AttributeWriter<'a> {
    /// Creates a writer that appends to `bytes`, whose length is a multiple of four.
    pub fn new(bytes: &'a mut Vec<u8>) -> Self {
        debug_assert_eq!(bytes.len() % ALIGN_BYTES, 0, "attributes are aligned");
        let oversized = false;
        Self { bytes, oversized }
    }

    /// Writes an `NLA_U8`.
    pub fn u8(&mut self, kind: u16, value: u8) {
        self.bytes(kind, &[value]);
    }

    /// Writes an `NLA_U32`, big endian.
    pub fn u32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Writes an `NLA_STRING` with its terminating NUL.
    pub fn str(&mut self, kind: u16, text: &str) {
        self.with(kind, |bytes| {
            bytes.extend_from_slice(text.as_bytes());
            bytes.push(0);
        });
    }

    /// Writes an `NLA_BINARY`.
    pub fn bytes(&mut self, kind: u16, payload: &[u8]) {
        self.with(kind, |bytes| bytes.extend_from_slice(payload));
    }

    /// Writes an `NLA_NESTED`.
    pub fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut AttributeWriter<'_>)) {
        let mut oversized = false;
        self.with(kind | NLA_F_NESTED, |bytes| {
            let mut inside = AttributeWriter::new(bytes);
            fill(&mut inside);
            oversized = inside.oversized;
        });
        self.oversized |= oversized;
    }

    /// Returns the length of the message so far.
    pub fn position(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether an attribute was too long and is missing.
    pub fn is_oversized(&self) -> bool {
        self.oversized
    }

    /// Writes a header, everything that `fill` appends, the length and the padding.
    #[inline]
    pub fn with(&mut self, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        fill(self.bytes);
        match u16::try_from(self.bytes.len().saturating_sub(start)) {
            Ok(len) => {
                set_field(self.bytes, start, 0, len.to_ne_bytes());
                self.bytes.resize(aligned(self.bytes.len()), 0);
            }
            Err(_) => {
                self.bytes.truncate(start);
                self.oversized = true;
            }
        }
    }
}

/// One attribute of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// The type, without flags.
    pub kind: u16,
    /// Whether `NLA_F_NESTED` is set. The kernel's nf_tables does not set it on its own lists.
    pub nested: bool,
    /// The bytes after the header, without padding.
    pub payload: &'a [u8],
}

impl<'a> Attribute<'a> {
    /// Returns the length with the header, without padding.
    pub(super) fn len(self) -> usize {
        self.payload.len().saturating_add(HEADER_BYTES)
    }

    /// Returns the payload as attributes.
    pub fn children(self) -> Attributes<'a> {
        Attributes(self.payload)
    }

    /// Returns the payload as big-endian `NLA_U32`.
    pub fn as_u32(self) -> Option<u32> {
        self.payload.try_into().ok().map(u32::from_be_bytes)
    }

    /// Returns the payload as text, up to the first NUL.
    pub fn as_str(self) -> Option<&'a str> {
        let text = self.payload.split(|byte| *byte == 0).next()?;
        std::str::from_utf8(text).ok()
    }
}

/// A list of attributes. Iteration stops at the end, or where the bytes are not an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes<'a>(pub &'a [u8]);

impl<'a> Attributes<'a> {
    /// Returns the first attribute of this type.
    pub fn get(mut self, kind: u16) -> Option<Attribute<'a>> {
        self.find(|attribute| attribute.kind == kind)
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Attribute<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let [len_0, len_1, kind_0, kind_1] = *self.0.first_chunk()?;
        let len = usize::from(u16::from_ne_bytes([len_0, len_1]));
        let kind = u16::from_ne_bytes([kind_0, kind_1]);
        let Some(payload) = self.0.get(HEADER_BYTES..len) else {
            self.0 = &[];
            return None;
        };
        self.0 = self.0.get(aligned(len)..).unwrap_or_default();
        Some(Attribute {
            kind: kind & NLA_TYPE_MASK,
            nested: kind & NLA_F_NESTED != 0,
            payload,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_exclude_padding_and_nests_include_it() {
        let mut bytes = Vec::new();
        let mut writer = AttributeWriter::new(&mut bytes);
        writer.str(1, "ab");
        writer.nest(2, |w| {
            w.u8(3, 9);
            w.u32(4, 0x0102_0304);
        });
        assert_eq!(
            bytes,
            [
                7, 0, 1, 0, b'a', b'b', 0, 0, // "ab", NUL, one byte of padding
                20, 0, 2, 0x80, // nested, 16 bytes inside
                5, 0, 3, 0, 9, 0, 0, 0, // one byte, three of padding
                8, 0, 4, 0, 1, 2, 3, 4,
            ]
        );
        let found: Vec<_> = Attributes(&bytes).collect();
        assert_eq!(found[0].as_str(), Some("ab"));
        assert!(found[1].nested);
        assert_eq!(
            found[1].children().get(4).unwrap().as_u32(),
            Some(0x0102_0304)
        );
    }

    #[test]
    fn an_attribute_that_is_too_long_is_left_out_and_remembered() {
        let mut bytes = Vec::new();
        let mut writer = AttributeWriter::new(&mut bytes);
        writer.nest(1, |w| {
            w.bytes(2, &vec![0; MAX_ATTRIBUTE_PAYLOAD_BYTES + 1]);
            w.u8(3, 1);
        });
        assert!(writer.is_oversized());
        let kinds: Vec<u16> = Attributes(&bytes[HEADER_BYTES..]).map(|a| a.kind).collect();
        assert_eq!(kinds, [3]);
        let mut bytes = Vec::new();
        let mut writer = AttributeWriter::new(&mut bytes);
        writer.bytes(2, &vec![0; MAX_ATTRIBUTE_PAYLOAD_BYTES]);
        assert!(!writer.is_oversized());
    }

    #[test]
    fn fields_beyond_the_end_are_left_out() {
        for (start, offset) in [(0, 3), (3, 0), (4, 4), (usize::MAX, usize::MAX)] {
            let mut bytes = [7; 4];
            set_field(&mut bytes, start, offset, [1, 2]);
            assert_eq!(bytes, [7; 4], "{start} {offset}");
        }
        let mut bytes = [7; 4];
        set_field(&mut bytes, 1, 1, [1, 2]);
        assert_eq!(bytes, [7, 7, 1, 2]);
        assert_eq!([5, usize::MAX].map(aligned), [8, usize::MAX]);
    }

    #[test]
    fn broken_lengths_end_the_list() {
        for bytes in [
            &[3, 0, 1, 0][..],
            &[8, 0, 1, 0, 1, 2, 3],
            &[0, 0, 0, 0],
            &[4, 0, 1],
        ] {
            assert_eq!(Attributes(bytes).next(), None, "{bytes:?}");
        }
        // The last attribute needs no padding.
        assert_eq!(Attributes(&[5, 0, 1, 0, 7]).next().unwrap().payload, [7]);
    }
}
