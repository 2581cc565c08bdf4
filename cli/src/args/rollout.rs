//! The arguments of `kpctl rollout`.

use std::time::Duration;

use kplane_proto::v1 as pb;

use super::parse_timeout;

/// What to do about rollouts.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum RolloutCommand {
    /// Give settings to a few nodes, then to more, and take them back if one of these is not healthy
    #[command(after_help = "\
Agents take settings by starting anew in their process; the kernel's rules serve all the while. Settings
that are not named become the agents' own again. A step is good when all of its nodes have had the
settings, were healthy, and had their kernel read back for the time of --healthy-for. If that takes
longer than --step-timeout, or a node cannot take the settings, all nodes get those from before. Nodes
without an agent, and frozen ones, get the settings when they are back.

Examples:
  kpctl rollout start --backend nftables --steps 1,10,50 --reason 'change #812'
  kpctl rollout start --masquerade-bit 15 --wait && echo all nodes have it
  kpctl rollout start --own                     back to the agents' own settings")]
    Start(Box<StartArgs>),
    /// Show the settings of the fleet, and how far the last rollout is
    #[command(after_help = "\
Examples:
  kpctl rollout status
  kpctl rollout status --wait && echo all nodes have the settings

Exit codes with --wait: 0 all nodes have the settings, 1 they have those from before again")]
    Status {
        /// Wait until no rollout is under way
        #[arg(long)]
        wait: bool,
    },
    /// End the rollout that is under way: all nodes get the settings from before
    #[command(after_help = "\
Examples:
  kpctl rollout stop --reason 'one node is slow'")]
    Stop {
        /// Reason, for others and for the audit log
        #[arg(
            long,
            value_name = "TEXT",
            default_value = "",
            hide_default_value = true
        )]
        reason: String,
    },
}

/// A new rollout.
#[derive(Clone, Debug, clap::Args)]
#[command(group(
    clap::ArgGroup::new("settings")
        .required(true)
        .multiple(true)
        .args(["backend", "iptables_layout", "masquerade_bit", "own"])
))]
pub(crate) struct StartArgs {
    /// The backend that programs the kernel
    #[arg(long, value_name = "BACKEND", value_parser = ["nftables", "iptables", "ipvs"])]
    backend: Option<String>,
    /// How a rule of mode iptables finds the Service of an address
    #[arg(long, value_name = "LAYOUT", value_parser = ["tree", "compat"])]
    iptables_layout: Option<String>,
    /// Bit of the packet mark that asks for masquerading
    #[arg(long, value_name = "BIT", value_parser = clap::value_parser!(u32).range(..32))]
    masquerade_bit: Option<u32>,
    /// All settings that the agents have themselves
    #[arg(long, conflicts_with_all = ["backend", "iptables_layout", "masquerade_bit"])]
    own: bool,
    /// Percentages of the nodes, one for each step; 100 comes last
    #[arg(
        long,
        value_name = "PERCENT,..",
        value_delimiter = ',',
        default_value = "5,25,100"
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100))]
    steps: Vec<u32>,
    /// Time for which all nodes of a step must be healthy
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_timeout)]
    healthy_for: Duration,
    /// Time after which a step that is not good ends the rollout
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_timeout)]
    step_timeout: Duration,
    /// Reason, for others and for the audit log
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    reason: String,
    /// Wait for the end; exit code 1 if all nodes get the settings from before
    #[arg(long)]
    pub(crate) wait: bool,
}

impl StartArgs {
    /// Returns the request.
    pub(crate) fn request(&self) -> pb::ChangeRolloutRequest {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let plan = pb::RolloutPlan {
            settings: Some(pb::Settings {
                backend: self.backend.clone().unwrap_or_default(),
                iptables_layout: self.iptables_layout.clone().unwrap_or_default(),
                masquerade_bit: self.masquerade_bit,
            }),
            percentages: self.steps.clone(),
            healthy_ms: ms(self.healthy_for),
            timeout_ms: ms(self.step_timeout),
        };
        pb::ChangeRolloutRequest {
            change: Some(pb::change_rollout_request::Change::Begin(plan)),
            reason: self.reason.clone(),
        }
    }
}
