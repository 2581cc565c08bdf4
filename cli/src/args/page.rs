//! The arguments of `page`.

use clap::Args;

/// The options of `page`.
#[derive(Args, Debug)]
pub(crate) struct PageArgs {
    /// Port on 127.0.0.1; 0 = a free one
    #[arg(
        long,
        value_name = "PORT",
        default_value = "0",
        hide_default_value = true
    )]
    pub(crate) port: u16,
}
