//! kube-proxy's own configuration: its file (`kubeproxy.config.k8s.io/v1alpha1`) and its flags.
//!
//! ```text
//! text -> read -> KubeProxyConfiguration -> resolve -> Settings
//! flags ---------^   |         |
//!                  write     change: what of a new file takes effect at once (I3)
//! ```

mod address;
mod change;
mod detect;
mod duration;
mod flags;
mod notes;
mod quantity;
mod read;
mod settings;
mod table;
mod types;
mod write;

pub(crate) use self::table::truth;
pub use change::{Change, change};
pub use duration::{GoDuration, ParseDurationError};
pub use flags::{KubeProxyFlags, with_dashes};
pub use notes::{Host, Level, Note, start_up};
pub use quantity::Quantity;
pub use read::{Document, document, text_of};
pub use settings::{LogSettings, Settings, resolve};
pub use types::*;
pub use write::{to_file, to_yaml};
