//! The arguments of `kpctl whatif`.

use std::path::PathBuf;

use clap::Args;

/// The end of the help text.
pub(super) const HELP: &str = "\
Shows which ServicePorts would change on nodes, what that costs in the kernel of each class of nodes, and
which conflicts would come or go. The control plane works it out by the code that applies real changes, on
a copy of what it has. Nothing is applied. Objects of other kinds than Service, EndpointSlice, Node and
ServiceCIDR do not count. What a manifest leaves out is as in the object that exists.

Examples:
  kpctl whatif -f shop.yaml
  kpctl whatif -f services/ -f slices/
  kustomize build . | kpctl whatif -f -
  kpctl whatif -f shop.yaml -o json | jq '.classes[] | {zone, operations, bytes}'

Exit codes: 0 no new error, 1 a manifest is refused, or there would be new errors such as conflicts";

/// The objects.
#[derive(Args, Debug)]
pub(crate) struct WhatIfArgs {
    /// File with manifests in YAML or JSON, folder with such files, or - for standard input; 1 MiB at most in all
    #[arg(short = 'f', long = "filename", value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
}
