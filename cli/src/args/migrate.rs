//! The arguments of `kpctl migrate`.

use std::time::Duration;

use super::parse_timeout;

/// A step on the way from kube-proxy to kplane.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum MigrateCommand {
    /// Show which nodes would move, and what stands in the way
    #[command(after_help = "\
Changes nothing.

Examples:
  kpctl migrate plan
  kpctl migrate plan -o json | jq '.nodes[] | select(.stage == \"KubeProxy\") | .name'

Exit codes: 0 a migration can begin or go on, 1 something stands in the way")]
    Plan(TargetArgs),
    /// Move nodes from kube-proxy to kplane, one after the other
    #[command(after_help = "\
The label kplane.io/proxy=kplane moves a node: kube-proxy's pod ends there, and its rules serve until
kplane's agent has taken over. The next node follows when the agent is connected, and has read the
kernel back and found it as it should be. That takes about a minute for a node.

The command stops at the first node that is not verified within --node-timeout, and says why. The
nodes before stay as they are. Run it again to go on: it continues where it or another kpctl stopped.

Examples:
  kpctl migrate start --node node-1
  kpctl migrate start --selector pool=canary
  kpctl migrate start --all --at-a-time 5

Exit codes: 0 all chosen nodes are verified, 1 stopped or paused")]
    Start(WalkArgs),
    /// Let no further node move
    #[command(after_help = "\
A kpctl that is moving nodes stops after its present step, wherever it runs. Nodes on their way
finish by themselves, but no program verifies them until `kpctl migrate start`.

Examples:
  kpctl migrate pause")]
    Pause(TargetArgs),
    /// Move nodes from kplane back to kube-proxy, one after the other
    #[command(after_help = "\
The agent's pod ends, and its rules serve until kube-proxy has written its own. Then a pod on the node
removes kplane's rules. When no node is left with kplane, kube-proxy's DaemonSet is as it was before.

Examples:
  kpctl migrate back --node node-1
  kpctl migrate back --all --at-a-time 5
  kpctl migrate back --node node-1 --image kp-nodeagent:0.1.0   the agents' own image cannot be pulled there

Exit codes: 0 all chosen nodes are back, 1 stopped or paused")]
    Back {
        #[command(flatten)]
        walk: WalkArgs,
        /// Image whose kp-nodeagent removes the rules [default: that of the agents]
        #[arg(long, value_name = "IMAGE")]
        image: Option<String>,
    },
    /// Delete kube-proxy's DaemonSet, when kplane serves all nodes
    #[command(after_help = "\
The DaemonSet is saved in ConfigMap kplane-kube-proxy of kplane's namespace, so that `kpctl migrate
back` can bring it back. Its ConfigMap and ServiceAccount stay.

Examples:
  kpctl migrate finish
  kpctl migrate finish --yes         for scripts: does not ask")]
    Finish {
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
        #[command(flatten)]
        target: TargetArgs,
    },
    /// Show how far all nodes are
    #[command(after_help = "\
Examples:
  kpctl migrate status
  kpctl migrate status -o json | jq .stage")]
    Status(TargetArgs),
}

/// kube-proxy's place in the cluster.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TargetArgs {
    /// kube-proxy's DaemonSet
    #[arg(
        long,
        value_name = "NAMESPACE/NAME",
        default_value = "kube-system/kube-proxy"
    )]
    #[arg(value_parser = parse_target)]
    pub(crate) kube_proxy: Target,
}

/// The name of a DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Parses a name whose parts fit into a URL as they are.
fn parse_target(text: &str) -> Result<Target, String> {
    let fits = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-' | '.');
    let is_name = |name: &str| !name.is_empty() && !name.starts_with('.') && name.chars().all(fits);
    let parts = text
        .split_once('/')
        .filter(|(namespace, name)| is_name(namespace) && is_name(name));
    let (namespace, name) =
        parts.ok_or("expected NAMESPACE/NAME, such as kube-system/kube-proxy")?;
    Ok(Target {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    })
}

/// Nodes to move, and how.
#[derive(Clone, Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("chosen").required(true).args(["node", "selector", "all"])))]
pub(crate) struct WalkArgs {
    /// The node; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Vec<String>,
    /// The nodes with these labels now, such as pool=canary
    #[arg(long, short = 'l', value_name = "LABELS")]
    pub(crate) selector: Option<String>,
    /// All nodes
    #[arg(long)]
    pub(crate) all: bool,
    /// Most nodes that are on their way at the same time
    #[arg(long, value_name = "N", default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) at_a_time: u16,
    /// Longest time for a node to be verified
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_timeout)]
    pub(crate) node_timeout: Duration,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_set_has_a_namespace() {
        let target = Target {
            namespace: "kube-system".to_owned(),
            name: "kube-proxy".to_owned(),
        };
        assert_eq!(parse_target("kube-system/kube-proxy").unwrap(), target);
        for wrong in ["kube-proxy", "a/", "/b", "a/b/c", "a/../b", "A/b"] {
            assert!(parse_target(wrong).is_err(), "{wrong}");
        }
    }
}
