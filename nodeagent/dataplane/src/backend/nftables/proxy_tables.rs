//! Tables of the userspace proxy: one leads clients to it, and one leads answers back.

mod capture;
mod divert;
mod expressions;

pub(in crate::backend) use capture::{CaptureSettings, CaptureTable, Place};
pub(in crate::backend) use divert::{DivertMarks, DivertTable};
