//! Words of classic BPF programs (linux/filter.h, linux/bpf_common.h), which sockets run on what they receive.

/// `BPF_LD | BPF_IMM`.
pub(crate) const LOAD_NUMBER: u16 = 0x00;
/// `BPF_LDX | BPF_IMM`.
pub(crate) const INDEX_NUMBER: u16 = 0x01;
/// `BPF_LD | BPF_W | BPF_ABS`.
pub(crate) const LOAD_WORD: u16 = 0x20;
/// `BPF_LD | BPF_H | BPF_ABS`.
pub(crate) const LOAD_HALF: u16 = 0x28;
/// `BPF_LD | BPF_W | BPF_IND`.
pub(crate) const LOAD_AT_INDEX: u16 = 0x40;
/// `BPF_MISC | BPF_TAX`.
pub(crate) const TO_INDEX: u16 = 0x07;
/// `BPF_JMP | BPF_JEQ | BPF_K`.
pub(crate) const JUMP_EQUAL: u16 = 0x15;
/// `BPF_JMP | BPF_JSET | BPF_K`.
pub(crate) const JUMP_SET: u16 = 0x45;
/// `BPF_RET | BPF_K`.
pub(crate) const RETURN: u16 = 0x06;
/// The returned number of bytes that passes a whole message.
pub(crate) const ALL: u32 = u32::MAX;
