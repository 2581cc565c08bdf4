//! The command line: kplane's own flags, next to kube-proxy's.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use kplane_desired_state::admission::Proxying;
use kplane_model::{Family, NodeName, ServiceName};
use kplane_util::dial::parse_mark;

use super::absence::AbsenceFlags;
use super::kube_proxy::{KubeProxyFlags, Note};
use super::load::{Loaded, Loader, from_flags, read_differently};
use super::pre_stop::PreStopFlags;
use super::source::{ApiFlags, Source, SourceFlags};
use super::userspace::UserspaceFlags;
use super::value::interval;
use super::{Checked, Config, ConfigError, Problem, Task, unset_mode};
use crate::cleanup;
use kplane_dataplane::backend::{self, iptables::Layout};
use kplane_dataplane::leftovers::Ports;

/// Longest name of a node in bytes: a DNS subdomain.
const MAX_NODE_NAME: usize = 253;

/// The environment variable that names the node when neither flag nor file does.
const NODE_NAME: &str = "NODE_NAME";
/// The environment variable with the API server's address, for when `--master` is not given.
const API_SERVER: &str = "KPLANE_API_SERVER";

const EXAMPLES: &str = "\
Examples:
  Serve this node with a control plane:
    kp-nodeagent --control-plane https://kplane.example:7465 --certificate-authority ca.crt \\
      --client-certificate node-1.crt --client-key node-1.key
  Serve this node from a folder of YAML, without any cluster:
    kp-nodeagent --standalone --manifests deploy/demo
  Replace kube-proxy, without a control plane:
    kp-nodeagent --standalone --config /var/lib/kube-proxy/config.conf \\
      --hostname-override node-1
  Replace kube-proxy, with a control plane:
    kp-nodeagent --config /var/lib/kube-proxy/config.conf --hostname-override node-1, and the four flags above
  Check what kube-proxy's file means for kplane:
    kp-nodeagent --check-config --config /var/lib/kube-proxy/config.conf
  See what kplane has in the kernel, and remove it:
    kp-nodeagent --cleanup --dry-run
    kp-nodeagent --cleanup

The rules stay in the kernel when the agent stops; --cleanup removes them.

Environment:
  RUST_LOG              what is logged, such as debug or kp_nodeagent=debug; overrides -v
  NODE_NAME             name of the node, when neither flag nor file has one
  KPLANE_CONTROL_PLANE  as --control-plane; several are separated by commas
  KPLANE_API_SERVER     for --standalone, the API server's own address. Needed if the kubeconfig or the pod's
                        environment names the ClusterIP, which leads nowhere until the agent serves it";

/// kplane's node agent: programs desired state into the kernel and reports what the kernel holds. It accepts
/// kube-proxy's flags and configuration file.
#[derive(Debug, Parser)]
#[command(name = "kp-nodeagent", version, after_help = EXAMPLES, args_override_self = true)]
pub struct Flags {
    #[command(flatten)]
    source: SourceFlags,

    #[command(flatten)]
    data_path: DataPathFlags,

    #[command(flatten)]
    absence: AbsenceFlags,

    /// kube-proxy's configuration file (KubeProxyConfiguration v1alpha1, YAML or JSON). The agent applies changes
    /// at once where no restart is needed. With a file, the flags below are ignored, except for
    /// --hostname-override and logging.
    #[arg(long, value_name = "FILE", help_heading = "Configuration file")]
    config: Option<PathBuf>,

    /// Write the configuration with all defaults filled in, and exit.
    #[arg(long, value_name = "FILE", help_heading = "Configuration file")]
    write_config_to: Option<PathBuf>,

    /// Print how the configuration would work differently than with kube-proxy, change nothing, and exit: with 0 if
    /// there are no warnings, 2 if there are, 1 if the configuration would be refused.
    #[arg(long, help_heading = "Configuration file")]
    check_config: bool,

    /// Set up what needs root (connection tracking), and exit: the agent itself then needs CAP_NET_ADMIN only.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true)]
    #[arg(
        default_value = "false",
        default_missing_value = "true",
        hide_default_value = true
    )]
    #[arg(hide_possible_values = true, value_parser = truth, help_heading = "Instead of serving")]
    init_only: bool,

    /// Remove what kplane programmed into the kernel, restore kernel settings, and exit: in mode nftables its tables; in
    /// modes iptables and ipvs everything with kube-proxy's names, which kplane uses there too. Refused while an agent
    /// runs, and in these two modes while a kube-proxy runs. Safe to repeat.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true)]
    #[arg(
        default_value = "false",
        default_missing_value = "true",
        hide_default_value = true
    )]
    #[arg(hide_possible_values = true, value_parser = truth, help_heading = "Instead of serving")]
    cleanup: bool,

    /// Like --cleanup, and remove everything that kube-proxy left in any mode. Refused while a kube-proxy runs.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true)]
    #[arg(
        default_value = "false",
        default_missing_value = "true",
        hide_default_value = true
    )]
    #[arg(hide_possible_values = true, value_parser = truth, help_heading = "Instead of serving")]
    cleanup_kube_proxy: bool,

    /// With --cleanup or --cleanup-kube-proxy: print what would be removed, and remove nothing.
    #[arg(long, help_heading = "Instead of serving")]
    dry_run: bool,

    /// Check whether this machine can run the agent, and print what was found as JSON: kernel, backends (tried out in a
    /// network namespace that is thrown away, which needs root), connection tracking, who else owns rules, and what
    /// the configuration would do differently than with kube-proxy. Changes nothing. `kpctl check --pre --local` shows it.
    #[arg(long, help_heading = "Instead of serving")]
    preflight: bool,

    /// With --cleanup: wait until a kube-proxy runs on the node and its own rules are in the kernel, for a minute or
    /// the given time at most, so that the node is never without rules. In modes iptables and ipvs kube-proxy takes
    /// over kplane's rules, and nothing of them is removed.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "60s", value_parser = interval, requires = "cleanup")]
    #[arg(conflicts_with = "dry_run", help_heading = "Instead of serving")]
    after_kube_proxy: Option<Duration>,

    #[command(flatten)]
    kube_proxy: KubeProxyFlags,
}

/// Parses a backend's name.
fn backends() -> impl TypedValueParser<Value = backend::Kind> {
    let value = |kind: backend::Kind| {
        PossibleValue::new(kind.describe().name).help(kind.describe().summary)
    };
    let names = PossibleValuesParser::new(backend::Kind::ALL.map(value));
    names.try_map(|name| backend::Kind::named(&name).ok_or("no such backend"))
}

/// Parses a layout of mode iptables.
fn layouts() -> impl TypedValueParser<Value = Layout> {
    let value = |layout: Layout| {
        PossibleValue::new(layout.name()).help(match layout {
            Layout::Compat => "One list of all Services, as in kube-proxy",
            Layout::Tree => "A tree of short chains, by address prefix",
        })
    };
    let names = PossibleValuesParser::new(Layout::ALL.map(value));
    names.try_map(|name| Layout::named(&name).ok_or("no such layout"))
}

/// Flags of the backends that kube-proxy does not have.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "The data path")]
struct DataPathFlags {
    /// The backend that programs the kernel [default: as in --proxy-mode, or nftables]
    #[arg(long, value_name = "BACKEND", value_parser = backends())]
    backend: Option<backend::Kind>,

    /// Way in which mode iptables finds Services by their addresses: in one list, as kube-proxy does
    /// (compat), or in a tree of short chains, which is faster.
    #[arg(long, value_name = "LAYOUT", default_value = "tree", value_parser = layouts())]
    iptables_layout: Layout,

    /// Interval of checks for changes made by other programs, which are repaired (iptables, ipvs). Longer where a
    /// check takes long.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    iptables_probe_interval: Duration,

    /// Packet mark of the agent's own connections to the control plane or the API server. In modes nftables and
    /// iptables no rule for Services applies to this mark; 0 = none.
    #[arg(long, value_name = "MARK", default_value = "0x50", value_parser = parse_mark)]
    own_mark: u32,

    /// A Service that leads to this agent on each node: internalTrafficPolicy Local, with the port for health checks
    /// (10256) as its target port. The agent connects to it every 5 s, and reports whether the data path answers.
    /// `kp-controlplane --startup-taint` needs it.
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = service_name)]
    canary_service: Option<ServiceName>,

    #[command(flatten)]
    pre_stop: PreStopFlags,

    /// Count the connections that begin, by Service, port and family, in the metric
    /// kplane_agent_service_connections_total. The kernel reports each connection to the agent, which costs some
    /// microseconds of CPU time for each. Not in mode ipvs, whose connections the kernel reports too early.
    #[arg(long)]
    count_connections: bool,

    /// Remember for an hour who began connections through Services, to which endpoints, and how many failed, for `kpctl
    /// graph`. Costs some microseconds of CPU time for each connection, and 8 MB at most. Not in mode ipvs.
    #[arg(long)]
    flows: bool,

    /// What happens to connections that NetworkPolicies no longer allow: they are cut, or kept until they end.
    #[arg(long, value_name = "WHAT", default_value = "cut", value_parser = ["cut", "keep"])]
    network_policy_existing: String,

    /// In mode ipvs, refuse connections to a Service with traffic policy Local that has no endpoint on the node,
    /// as the other modes do. Without this flag mode ipvs uses endpoints of other nodes, as kube-proxy does.
    #[arg(long)]
    ipvs_strict_local: bool,

    /// In mode ipvs, drop forwarded packets that belong to no connection, as mode iptables does. kube-proxy's mode
    /// ipvs forwards such packets.
    #[arg(long)]
    ipvs_drop_invalid: bool,

    #[command(flatten)]
    userspace: UserspaceFlags,
}

impl DataPathFlags {
    /// Returns what Services may ask of the userspace proxy by default.
    fn proxying(&self, loaded: Option<&Loaded>) -> Proxying {
        let of_file = loaded.map(|loaded| loaded.settings.kind);
        self.userspace.proxying(self.backend.or(of_file))
    }

    /// Returns the settings, changed as these flags say.
    fn settings(
        &self,
        settings: backend::Settings,
        cache_dir: Option<PathBuf>,
    ) -> backend::Settings {
        backend::Settings {
            iptables_layout: self.iptables_layout,
            cut_denied: self.network_policy_existing == "cut",
            probe_interval: self.iptables_probe_interval,
            own_mark: self.own_mark,
            ipvs: backend::ipvs::IpvsSettings {
                strict_local: self.ipvs_strict_local,
                drop_invalid: self.ipvs_drop_invalid,
                ..settings.ipvs
            },
            userspace: self.userspace.settings(settings.userspace, cache_dir),
            ..settings
        }
    }
}

fn service_name(text: &str) -> Result<ServiceName, &'static str> {
    match text.split_once('/') {
        Some((namespace, name))
            if !namespace.is_empty() && !name.is_empty() && !name.contains('/') =>
        {
            Ok(ServiceName::new(namespace, name))
        }
        _ => Err("a Service is NAMESPACE/NAME"),
    }
}

fn truth(text: &str) -> Result<bool, &'static str> {
    super::kube_proxy::truth(text).ok_or("true or false")
}

impl Flags {
    /// Checks the flags, and the file that they may name.
    ///
    /// # Errors
    /// Every value that is invalid.
    pub fn check(self) -> Result<Checked, ConfigError> {
        let loader = self.config.clone().map(|path| Loader::new(path, self.kube_proxy.clone()));
        let loaded = match &loader {
            Some(loader) => loader.load(),
            None => from_flags(&self.kube_proxy),
        };
        let ignored = loader.as_ref().and_then(Loader::ignored_flags);
        let cleans = self.cleanup || self.cleanup_kube_proxy;
        if self.dry_run && !cleans {
            let reason = "--dry-run is for --cleanup and --cleanup-kube-proxy";
            return Err(Problem::general(reason).into());
        }
        let errand = self.write_config_to.is_some()
            || cleans
            || self.init_only
            || self.check_config
            || self.preflight;
        let mut checked = if errand {
            let loaded = loaded.map_err(|problems| ConfigError { problems })?;
            self.errand(loaded)
        } else {
            self.agent(loaded, loader)?
        };
        checked.notes.splice(0..0, ignored);
        Ok(checked)
    }

    /// Returns a task other than running an agent. Such tasks need no source.
    fn errand(self, loaded: Loaded) -> Checked {
        let log = loaded.settings.log;
        let unset_mode = self.unset_mode(&loaded);
        let mut notes = Vec::from_iter(loaded.lenient);
        let task = if self.preflight {
            notes.extend(loaded.notes);
            notes.extend(unset_mode);
            let settings = loaded.settings;
            Task::Preflight {
                backend: self.data_path.backend.unwrap_or(settings.kind),
                settings: settings.backend,
                conntrack: settings.conntrack,
                ports: Ports::new(settings.healthz, settings.metrics),
            }
        } else if self.check_config {
            notes.extend(loaded.notes);
            notes.extend(unset_mode);
            Task::CheckConfig
        } else if let Some(path) = self.write_config_to {
            let config = loaded.config;
            notes.extend(read_differently(&config));
            let config = Box::new(config);
            Task::WriteConfig { path, config }
        } else if self.cleanup || self.cleanup_kube_proxy {
            let settings = loaded.settings;
            let backend = self.data_path.backend.unwrap_or(settings.kind);
            Task::Cleanup(cleanup::Cleanup {
                backend,
                kube_proxy: self.cleanup_kube_proxy,
                dry_run: self.dry_run,
                ports: Ports::new(settings.healthz, settings.metrics),
                settings: settings.backend,
                cache_dir: self.absence.cache_dir(backend),
                after_kube_proxy: self.after_kube_proxy,
            })
        } else {
            let settings = loaded.settings;
            let kind = self.data_path.backend.unwrap_or(settings.kind);
            let served = settings.node.nodeport_ranges(Family::V4);
            let mut served = served.iter().flatten();
            Task::InitOnly {
                localhost: kind.describe().routes_loopback()
                    && settings.backend.localhost_nodeports
                    && served.any(|range| backend::iptables::meets_loopback(*range)),
                cache_dir: self.absence.cache_dir(kind),
                conntrack: settings.conntrack,
                ipvs: kind.describe().has_virtual_servers.then_some(settings.backend.ipvs),
            }
        };
        Checked { task, log, notes }
    }

    fn agent(
        self,
        loaded: Result<Loaded, Vec<Problem>>,
        loader: Option<Loader>,
    ) -> Result<Checked, ConfigError> {
        let mut problems = Vec::new();
        let loaded = loaded.map_err(|wrong| problems.extend(wrong)).ok();
        let node_name = loaded.as_ref().and_then(|loaded| {
            let name = self.own_name(loaded);
            name.map_err(|wrong| problems.push(wrong)).ok()
        });
        let explicit = |flag| self.kube_proxy.value(flag).unwrap_or_default();
        let kubeconfig = loaded.as_ref().map(|l| &*l.config.client_connection.kubeconfig);
        let server = std::env::var(API_SERVER).unwrap_or_default();
        let api = ApiFlags {
            kubeconfig: kubeconfig.unwrap_or_default(),
            explicit: !explicit("kubeconfig").is_empty(),
            master: explicit("master"),
            server: &server,
        };
        // An invalid source is reported together with an invalid node name.
        let source = self
            .source
            .check(
                api,
                self.data_path.own_mark,
                self.data_path.proxying(loaded.as_ref()),
            )
            .map_err(|wrong| problems.push(wrong))
            .ok();
        let (Some(loaded), Some(source), Some(node_name)) = (loaded, source, node_name) else {
            return Err(ConfigError { problems });
        };
        let unread = unread(&loaded, &source);
        let (unset_mode, mode_unset) = (self.unset_mode(&loaded), self.mode_unset(&loaded));
        let (log, settings) = (loaded.settings.log, loaded.settings);
        let backend = self.data_path.backend.unwrap_or(settings.kind);
        let prestop = self.data_path.pre_stop.settings(&settings.node);
        let config = Config {
            node_name,
            source,
            inside: None,
            backend,
            mode_unset,
            backend_settings: self
                .data_path
                .settings(settings.backend, self.absence.cache_dir(backend)),
            node_settings: settings.node,
            healthz: settings.healthz,
            metrics: settings.metrics,
            bind_address_hard_fail: settings.bind_address_hard_fail,
            canary: self.data_path.canary_service.clone(),
            prestop,
            count_connections: self.data_path.count_connections,
            flows: self.data_path.flows,
            cliff_guard: self.absence.cliff_guard(),
            cache_dir: self.absence.cache_dir(backend),
            oom_score_adj: settings.oom_score_adj,
            sync_period: settings.sync_period,
            conntrack: settings.conntrack,
            kube_proxy: Arc::new(loaded.config),
            file: loader,
        };
        Ok(Checked {
            task: Task::Run(Box::new(config)),
            log,
            notes: loaded
                .lenient
                .into_iter()
                .chain(loaded.notes)
                .chain(unread)
                .chain(unset_mode)
                .collect(),
        })
    }

    /// Returns the node's name, from the flag or else from the file.
    fn own_name(&self, loaded: &Loaded) -> Result<NodeName, Problem> {
        let name = &loaded.config.hostname_override;
        match (self.kube_proxy.value("hostname-override"), &self.config) {
            (None | Some(""), Some(file)) => {
                let name = node_name("hostnameOverride", name);
                name.map_err(|wrong| wrong.in_file(file))
            }
            _ => node_name("--hostname-override", name),
        }
    }

    /// Returns whether nobody chose the backend (K21).
    fn mode_unset(&self, loaded: &Loaded) -> bool {
        self.config.is_some() && self.data_path.backend.is_none() && loaded.config.mode.is_empty()
    }

    /// Returns a warning about a setting that means something else to kube-proxy than to kplane.
    fn unset_mode(&self, loaded: &Loaded) -> Option<Note> {
        let flags = self.kube_proxy.ignored_beside_file();
        let of_kube_proxy = self.config.is_some() || !flags.is_empty();
        unset_mode::warning(loaded, self.data_path.backend, of_kube_proxy)
    }
}

/// Returns a remark on a setting that this source does not read.
fn unread(loaded: &Loaded, source: &Source) -> Option<Note> {
    let kubeconfig = &loaded.config.client_connection.kubeconfig;
    let is_unread = !kubeconfig.is_empty() && !source.reads_the_api();
    is_unread.then(|| {
        Note::info(
            "clientConnection.kubeconfig (--kubeconfig) is for --standalone: without it the \
             control plane reads the Kubernetes API",
        )
    })
}

/// Returns the node's name: the one configured at `place`, or else the environment's, or else the host's. As
/// in kube-proxy, surrounding white space is trimmed and upper case becomes lower case.
pub(super) fn node_name(place: &str, configured: &str) -> Result<NodeName, Problem> {
    let of_environment = std::env::var(NODE_NAME).ok().filter(|name| !name.is_empty());
    let (place, name) = if !configured.is_empty() {
        (place, configured.to_owned())
    } else if let Some(name) = of_environment {
        (NODE_NAME, name)
    } else {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(|error| {
            Problem::general(format!(
                "cannot read the host's name ({error}): use --hostname-override"
            ))
        })?;
        ("the host's name", name)
    };
    let name = name.trim().to_ascii_lowercase();
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    if name.is_empty() || name.len() > MAX_NODE_NAME || !name.bytes().all(allowed) {
        let reason = "must be a node's name: letters, digits, '-' and '.', at most 253 of them";
        return Err(Problem::new(place, &name, reason));
    }
    Ok(name.into())
}
