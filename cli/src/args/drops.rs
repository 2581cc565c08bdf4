//! The arguments of `kpctl get drops`.

use std::time::Duration;

use clap::Args;
use clap::error::ErrorKind;
use kplane_proto::v1 as pb;

use super::names::{node_name, pod_name};
use super::{error, parse_timeout};

/// The end of the help text.
pub(super) const HELP: &str = "\
Counts of packets that NetworkPolicies denied, by Pod and direction, from the kernels of all nodes.
Only the first packets of connections are judged; a client that tries again counts again. A count
begins when a policy isolates the Pod. Packets of connections that a change has cut do not count.

--follow has nodes log denied packets, and shows each with the policies that isolate the Pod. A node
logs up to 50 packets a second for each family and direction. It ends that 10 seconds after the last
question. Needs the right to create /kplane/samples.

Examples:
  kpctl get drops                          which Pods have denied connections?
  kpctl get drops -n shop
  kpctl get drops --follow --pod shop/db-0
  kpctl get drops --follow --for 1h -o json

Exit codes: 0 all nodes answered, 6 some did not";

/// Pods whose denied packets to show.
#[derive(Args, Debug)]
pub(crate) struct DropsArgs {
    /// Show packets as they are denied
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only Pods of this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only this Pod: NAMESPACE/NAME, or NAME with -n
    #[arg(long)]
    pod: Option<String>,
    /// Only this node
    #[arg(long, value_parser = node_name)]
    node: Option<String>,
    /// Time after which --follow ends, an hour at most
    #[arg(long = "for", value_name = "DURATION", default_value = "10m", value_parser = parse_timeout)]
    pub(crate) within: Duration,
}

/// The longest time to follow, after which agents end it.
const LONGEST: Duration = Duration::from_secs(3_600);

impl DropsArgs {
    /// Returns the question, or the error in it.
    pub(crate) fn request(&self) -> Result<pb::DropsRequest, clap::Error> {
        if self.within > LONGEST {
            let text = "--for: nodes log packets for an hour at most";
            return Err(error(ErrorKind::ValueValidation, text));
        }
        let namespace = self.namespace.as_deref();
        let pod = self.pod.as_deref();
        let pod = pod.map(|pod| pod_name(pod, namespace)).transpose()?;
        let (namespace, pod) = match &pod {
            Some(pod) => (&*pod.namespace, &*pod.name),
            None => (namespace.unwrap_or_default(), ""),
        };
        Ok(pb::DropsRequest {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            node: self.node.clone().unwrap_or_default(),
            follower: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_named_in_two_ways_and_the_time_is_bounded() {
        let args = |namespace: Option<&str>, pod: Option<&str>, minutes: u64| {
            let args = DropsArgs {
                follow: true,
                namespace: namespace.map(str::to_owned),
                pod: pod.map(str::to_owned),
                node: None,
                within: Duration::from_secs(60 * minutes),
            };
            args.request().ok().map(|of| (of.namespace, of.pod))
        };
        let named = |namespace: &str, pod: &str| Some((namespace.to_owned(), pod.to_owned()));
        assert_eq!(args(None, None, 10), named("", ""));
        assert_eq!(args(Some("shop"), None, 60), named("shop", ""));
        for pod in ["shop/db-0", "pod/shop/db-0"] {
            assert_eq!(args(None, Some(pod), 10), named("shop", "db-0"));
        }
        assert_eq!(args(Some("shop"), Some("db-0"), 10), named("shop", "db-0"));
        assert_eq!(args(Some("other"), Some("shop/db-0"), 10), None);
        assert_eq!(args(None, None, 61), None);
    }
}
