//! The arguments of `kpctl get graph`.

use std::time::Duration;

use clap::Args;
use kplane_proto::v1 as pb;

use super::names::service_name;
use super::parse_timeout;

/// Longest time that agents remember.
const LONGEST: Duration = Duration::from_secs(3_600);

/// The end of the help text.
pub(super) const HELP: &str = "\
Agents with the option --flows (in the chart agent.flows) remember for an hour which connections their
nodes' rules led from clients through Services to endpoints. Each line is one client, port and endpoint, on
all nodes. Clients are named as in `kpctl get flows`; a Pod is named if nodes enforce NetworkPolicies. Not
counted: connections to a Pod's own address, those that rules refuse for lack of an endpoint, and mode
ipvs. Needs the right to get /kplane/clients.

CONN/S: connections that began, by the second. FAILED: connections that ended without being established:
refused, or without an answer, which takes the kernel 2 to 3 minutes to say. BYTES: of connections that
ended, where net.netfilter.nf_conntrack_acct is 1. RESET (-o wide): established, and ended by RST.

Times are rounded up to minutes, and to tens of minutes beyond ten.

Examples:
  kpctl get graph                                   all Services, in the last hour
  kpctl get graph -n shop --since 10m
  kpctl get graph shop/web service/shop/api -o wide
  kpctl get graph -o dot | dot -Tsvg > graph.svg    needs Graphviz
  kpctl get graph -o json | jq '.edges[] | select(.failed > 0) | .clientName'

Exit codes: 0 all nodes answered, 6 a node did not, or does not count";

/// The question: who talked to whom.
#[derive(Args, Debug)]
pub(crate) struct GraphArgs {
    /// Only these, as NAMESPACE/NAME, or NAME in the namespace of -n, else in `default`; 32 at most
    #[arg(value_name = "SERVICE")]
    services: Vec<String>,
    /// The namespace; without SERVICE, only its Services
    #[arg(short, long)]
    namespace: Option<String>,
    /// Time to look back, 1h at most
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = since)]
    since: Duration,
}

fn since(text: &str) -> Result<Duration, String> {
    let since = parse_timeout(text)?;
    if (Duration::from_secs(1)..=LONGEST).contains(&since) {
        Ok(since)
    } else {
        Err("agents remember an hour: expected 1s to 1h".to_owned())
    }
}

impl GraphArgs {
    /// Returns the question, or the error in a Service's name.
    pub(crate) fn request(&self) -> Result<pb::GraphRequest, clap::Error> {
        let namespace = self.namespace.as_deref();
        let services = self.services.iter().map(|name| {
            let name = service_name(name, namespace)?;
            Ok(name.to_string())
        });
        Ok(pb::GraphRequest {
            services: services.collect::<Result<_, clap::Error>>()?,
            namespace: namespace.unwrap_or_default().to_owned(),
            since_s: u32::try_from(self.since.as_secs()).unwrap_or(u32::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_remembered() {
        assert_eq!(since("1h"), Ok(LONGEST));
        assert_eq!(since("90s"), Ok(Duration::from_secs(90)));
        for wrong in ["0", "500ms", "2h", "soon"] {
            assert!(since(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn services_are_named_with_or_without_a_namespace() {
        let request = |services: &[&str], namespace: Option<&str>| {
            let args = GraphArgs {
                services: services.iter().map(ToString::to_string).collect(),
                namespace: namespace.map(str::to_owned),
                since: LONGEST,
            };
            args.request().map(|request| request.services)
        };
        let names = request(&["service/shop/web", "api"], None).unwrap();
        assert_eq!(names, ["shop/web", "default/api"]);
        assert_eq!(request(&["web"], Some("shop")).unwrap(), ["shop/web"]);
        assert!(request(&["other/web"], Some("shop")).is_err());
    }
}
