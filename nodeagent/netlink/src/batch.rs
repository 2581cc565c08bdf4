//! nfnetlink batches: operations of which the kernel applies all or none.

use std::fmt;

use super::attribute::{AttributeWriter, Attributes};
use super::message::{self, HEADER_BYTES, NFGENMSG_BYTES};

/// `NFNL_MSG_BATCH_BEGIN` (linux/netfilter/nfnetlink.h).
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
/// `NFNL_MSG_BATCH_END`.
const NFNL_MSG_BATCH_END: u16 = 0x11;
/// `NFNL_BATCH_GENID`: the generation that the batch is based on.
const NFNL_BATCH_GENID: u16 = 1;
/// `NFNL_SUBSYS_NFTABLES`: the only subsystem that takes batches.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
/// `NFPROTO_UNSPEC` (linux/netfilter.h).
const NFPROTO_UNSPEC: u8 = 0;

/// Bytes kept in front of the operations for `NFNL_MSG_BATCH_BEGIN` with its 8-byte attribute.
const BEGIN_BYTES: usize = HEADER_BYTES + NFGENMSG_BYTES + 8;
/// Length of `NFNL_MSG_BATCH_END`.
const END_BYTES: usize = HEADER_BYTES + NFGENMSG_BYTES;

/// The name of an operation in error messages: `add rule service-classes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The action: `add rule`.
    pub action: &'static str,
    /// The object of the action: `service-classes`.
    pub object: &'static str,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.action, self.object)
    }
}

/// The header of an operation's message.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// The name of the operation in error messages.
    pub label: Label,
    /// Subsystem << 8 | message.
    pub kind: u16,
    /// The `NLM_F_*` flags of the operation; `NLM_F_REQUEST` is added.
    pub flags: u16,
    /// `NFPROTO_*`.
    pub family: u8,
}

/// A batch under construction.
#[derive(Clone, Debug)]
pub struct Batch {
    /// [`BEGIN_BYTES`] of zeros, then the operations.
    bytes: Vec<u8>,
    /// The start of each operation, and its name.
    operations: Vec<(usize, Label)>,
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Batch {
    /// Creates an empty batch.
    pub fn new() -> Self {
        let mut bytes = Vec::with_capacity(4096);
        bytes.resize(BEGIN_BYTES, 0);
        Self {
            bytes,
            operations: Vec::new(),
        }
    }

    /// Appends an operation; `fill` writes its attributes.
    pub fn push(&mut self, operation: Operation, fill: impl FnOnce(&mut AttributeWriter<'_>)) {
        let Operation {
            label,
            kind,
            flags,
            family,
        } = operation;
        self.operations.push((self.bytes.len(), label));
        message::append(&mut self.bytes, kind, flags, (family, 0), fill);
    }

    /// Returns the number of operations.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Returns whether there is no operation.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Returns the length when sent, a few bytes more at most.
    pub fn byte_len(&self) -> usize {
        self.bytes.len().saturating_add(END_BYTES)
    }

    /// Returns the operations' messages as they will be sent, except that their sequence numbers
    /// are still 0.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(BEGIN_BYTES..).unwrap_or_default()
    }

    /// Completes the batch. With a `generation`, the kernel refuses the batch if its rules are no
    /// longer of that generation.
    pub fn seal(mut self, generation: Option<u32>) -> SealedBatch {
        let mut begin = Vec::with_capacity(BEGIN_BYTES);
        let resource = (NFPROTO_UNSPEC, NFNL_SUBSYS_NFTABLES);
        message::append(&mut begin, NFNL_MSG_BATCH_BEGIN, 0, resource, |w| {
            if let Some(generation) = generation {
                w.u32(NFNL_BATCH_GENID, generation);
            }
        });
        let start = BEGIN_BYTES.saturating_sub(begin.len());
        let place = self.bytes.iter_mut().skip(start);
        place.zip(begin).for_each(|(place, byte)| *place = byte);
        // Only the last operation asks for an acknowledgement: kernel.md 1.4.
        if let Some((last, _)) = self.operations.last() {
            message::add_flags(&mut self.bytes, *last, message::NLM_F_ACK);
        }
        let end = self.bytes.len();
        message::append(&mut self.bytes, NFNL_MSG_BATCH_END, 0, resource, |_| {});
        SealedBatch {
            bytes: self.bytes,
            start,
            end,
            operations: self.operations,
        }
    }
}

/// A complete batch, ready for [`super::NfSocket::commit`].
#[derive(Clone, Debug)]
pub struct SealedBatch {
    bytes: Vec<u8>,
    /// The start of `NFNL_MSG_BATCH_BEGIN`.
    start: usize,
    /// The start of `NFNL_MSG_BATCH_END`.
    end: usize,
    operations: Vec<(usize, Label)>,
}

impl SealedBatch {
    /// Returns the bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    /// Returns the number of operations.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Returns whether there is no operation.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Numbers the messages one by one, from `first` for the begin message. Returns the number of
    /// the last operation.
    pub(super) fn number(&mut self, first: u32) -> u32 {
        let mut sequence = first;
        message::set_sequence(&mut self.bytes, self.start, sequence);
        for (start, _) in &self.operations {
            sequence = sequence.wrapping_add(1);
            message::set_sequence(&mut self.bytes, *start, sequence);
        }
        message::set_sequence(&mut self.bytes, self.end, sequence.wrapping_add(1));
        sequence
    }

    /// Returns the name of an operation.
    pub(super) fn label(&self, index: usize) -> Option<Label> {
        self.operations.get(index).map(|(_, label)| *label)
    }

    /// Returns the attribute, with its header, at `offset` into an operation's message.
    pub(super) fn attribute_at(&self, index: usize, offset: usize) -> Option<&[u8]> {
        let (start, _) = self.operations.get(index)?;
        let bytes = self.bytes.get(start.checked_add(offset)?..self.end)?;
        let attribute = Attributes(bytes).next()?;
        bytes.get(..attribute.len())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Messages;
    use super::*;

    fn operation(action: &'static str) -> Operation {
        Operation {
            label: Label {
                action,
                object: "it",
            },
            kind: 0x0a00,
            flags: 0x400,
            family: 2,
        }
    }

    #[test]
    fn numbers_are_contiguous_and_wrap() {
        let mut batch = Batch::new();
        for action in ["make", "break"] {
            batch.push(operation(action), |w| w.str(1, action));
        }
        let mut sealed = batch.seal(None);
        assert_eq!(sealed.number(u32::MAX), 1);
        let numbers: Vec<u32> = Messages(sealed.as_bytes()).map(|m| m.sequence).collect();
        assert_eq!(numbers, [u32::MAX, 0, 1, 2]);
    }

    #[test]
    fn an_error_finds_its_operation_and_attribute() {
        let mut batch = Batch::new();
        batch.push(operation("make"), |w| w.u8(1, 1));
        batch.push(operation("break"), |w| {
            w.u8(1, 2);
            w.str(2, "x");
        });
        let sealed = batch.seal(Some(3));
        assert_eq!(
            sealed.label(1).map(|l| l.to_string()).as_deref(),
            Some("break it")
        );
        assert_eq!(sealed.label(2), None);
        let second = HEADER_BYTES + NFGENMSG_BYTES + 8;
        assert_eq!(
            sealed.attribute_at(1, second),
            Some(&[6, 0, 2, 0, b'x', 0][..])
        );
        for offset in [second + 8, 10_000, usize::MAX] {
            let attribute = sealed.attribute_at(1, offset);
            assert_eq!(attribute, None, "offset {offset}");
        }
    }
}
