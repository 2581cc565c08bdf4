//! Helpers of several tests.

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
    let checked = Flags::try_parse_from(line).unwrap().check().unwrap();
    let Task::Run(config) = checked.task else {
        panic!("not an agent");
    };
    let config = Config {
        backend: Kind::Noop,
        healthz: None,
        metrics: None,
        cache_dir: cache.map(Path::to_owned),
        ..*config
    };
    app::build(config).await.unwrap()
}
