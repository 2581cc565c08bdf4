//! The meaning of kube-proxy's configuration for an agent: its flags, the settings that follow from its
//! fields, and the notes to log about them.
//!
//! ```text
//! file  -> KubeProxyConfiguration -> resolve -> Settings
//! flags ----------^       '-> notes
//! ```

mod checker;
mod detect;
mod flags;
mod notes;
mod settings;
mod table;

pub(crate) use self::table::truth;
pub use flags::{KubeProxyFlags, with_dashes};
pub use notes::{Host, Level, Note, start_up};
pub use settings::{LogSettings, Settings, resolve};
