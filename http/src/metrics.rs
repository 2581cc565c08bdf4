//! Code that both programs need to serve metrics: names, text formats, and metrics of the process
//! itself.

mod names;
mod process;
mod text;

pub use names::{Distribution, Label, Metric, alone};
pub use process::Process;
pub use text::Format;
