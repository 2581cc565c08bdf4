//! Helpers of several tests.

use std::ffi::OsString;
use std::path::Path;

use clap::Parser as _;
use kp_nodeagent::app;
use kp_nodeagent::config::{Config, Flags, Task};
use kplane_dataplane::backend::Kind;

/// Starts an agent that programs nothing, with these words on its command line.
pub(crate) async fn agent_of(line: Vec<String>) -> app::Bound {
    agent_with_cache(line, None).await
}

/// The same with a cache file in a folder.
pub(crate) async fn agent_with_cache(line: Vec<String>, cache: Option<&Path>) -> app::Bound {
    let config = Config {
        cache_dir: cache.map(Path::to_owned),
        ..config_of(line)
    };
    app::build(config).await.unwrap()
}

/// An agent that programs nothing, without a cache and without ports of its own.
pub(crate) fn config_of(line: impl IntoIterator<Item: Into<OsString> + Clone>) -> Config {
    let checked = Flags::try_parse_from(line).unwrap().check().unwrap();
    let Task::Run(config) = checked.task else {
        panic!("not an agent");
    };
    Config {
        backend: Kind::Noop,
        healthz: None,
        metrics: None,
        cache_dir: None,
        ..*config
    }
}
