//! The log of the process, on standard error.

use std::io::IsTerminal;

use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

use crate::config::kube_proxy::LogSettings;

/// A handle that changes the log level while the program runs.
#[derive(Clone, Debug)]
pub struct LogControl(Option<reload::Handle<EnvFilter, Registry>>);

/// Starts the log of this process. `RUST_LOG` overrides the settings' verbosity.
pub fn start(settings: LogSettings) -> LogControl {
    let given = EnvFilter::try_from_default_env().ok();
    let is_given = given.is_some();
    let filter = given.unwrap_or_else(|| EnvFilter::new(directives(settings.verbosity)));
    let (filter, handle) = reload::Layer::new(filter);
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let lines = if settings.json { lines.json().boxed() } else { lines.boxed() };
    tracing_subscriber::registry().with(filter).with(lines).init();
    LogControl((!is_given).then_some(handle))
}

impl LogControl {
    /// Sets the verbosity; has no effect if `RUST_LOG` is set.
    pub fn set_verbosity(&self, verbosity: u32) {
        let Some(handle) = &self.0 else {
            return;
        };
        // This fails only if the log has ended.
        let _ = handle.reload(EnvFilter::new(directives(verbosity)));
    }
}

/// Returns the filter for one of kube-proxy's levels: its manifests use 2, and 4 helps to find
/// causes.
fn directives(verbosity: u32) -> &'static str {
    match verbosity {
        0..=3 => "info",
        4..=5 => {
            "info,kp_nodeagent=debug,kplane_dataplane=debug,kplane_userproxy=debug,kplane_http=debug,kp_controlplane=debug,\
             kplane_status_api=debug,kplane_agents=debug,kplane_desired_state=debug"
        }
        _ => "debug,kp_nodeagent=trace",
    }
}
