//! What kube-proxy's configuration means to an agent: its flags, what follows from its fields, and what to
//! say about them.
//!
//! ```text
//! file  -> KubeProxyConfiguration -> resolve -> Settings
//! flags ----------^       '-> notes
//! ```

mod detect;
mod flags;
mod notes;
mod settings;
mod table;

pub(crate) use self::table::truth;
pub use flags::{KubeProxyFlags, with_dashes};
pub use notes::{Host, Level, Note, start_up};
pub use settings::{LogSettings, Settings, resolve};
