//! kube-proxy's flags (I1): how clap declares them, and how they change a configuration. The flags
//! themselves are rows of [`super::table`].

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use kplane_model::{HEALTHZ_PORT, METRICS_PORT};

use super::table::{GROUPS, Kind, Row};
use kplane_kube_proxy_config::KubeProxyConfiguration;
use kplane_kube_proxy_config::Problem;
use kplane_kube_proxy_config::with_port;

/// The flags of a command line, as the operator gave them.
#[derive(Clone, Debug, Default)]
pub struct KubeProxyFlags {
    given: Vec<(&'static Row, Vec<String>)>,
}

impl KubeProxyFlags {
    /// Returns the configuration that the flags describe, and every value that cannot be read.
    pub fn configuration(&self) -> (KubeProxyConfiguration, Vec<Problem>) {
        let mut config = KubeProxyConfiguration::default();
        // The defaults of both depend on the family of --bind-address.
        config.healthz_bind_address.clear();
        config.metrics_bind_address.clear();
        // This default depends on --proxy-mode.
        config.node_port_addresses.clear();
        let mut problems = self.apply(&mut config, |_| true);
        config.fill_node_port_addresses();
        problems.extend(self.addresses(&mut config));
        (config, problems)
    }

    /// Applies the flags that override a file (I2) to its configuration; returns every value that
    /// cannot be read.
    pub fn overrule(&self, config: &mut KubeProxyConfiguration) -> Vec<Problem> {
        self.apply(config, |row| row.beside_file)
    }

    /// Returns the flags that have no effect next to a file (I2).
    pub fn ignored_beside_file(&self) -> Vec<&'static str> {
        self.given
            .iter()
            .filter(|(row, _)| !row.beside_file)
            .map(|(row, _)| row.flag)
            .collect()
    }

    /// Returns the flag that sets a field, if it was given.
    pub fn of_field(&self, field: &str) -> Option<&'static str> {
        let field = field.split_once('[').map_or(field, |(list, _)| list);
        let row = self.given.iter().find(|(row, _)| row.fields.contains(&field));
        row.map(|(row, _)| row.flag)
    }

    /// Returns the value of a flag; the last one counts.
    pub fn value(&self, flag: &str) -> Option<&str> {
        let (_, values) = self.given.iter().find(|(row, _)| row.flag == flag)?;
        values.last().map(String::as_str)
    }

    fn apply(
        &self,
        config: &mut KubeProxyConfiguration,
        counts: impl Fn(&Row) -> bool,
    ) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (row, values) in self.given.iter().filter(|(row, _)| counts(row)) {
            let value = values.join(",");
            if let Err(expected) = (row.set)(config, &value) {
                let place = format!("--{}", row.flag);
                problems.push(Problem::new(place, value, format!("must be {expected}")));
            }
        }
        problems
    }

    /// Fills in hosts and ports that the flags leave out, including those of the deprecated port
    /// flags. Port 0 switches the server off.
    fn addresses(&self, config: &mut KubeProxyConfiguration) -> Vec<Problem> {
        let mut defaults = config.clone();
        defaults.healthz_bind_address.clear();
        defaults.metrics_bind_address.clear();
        defaults.fill_addresses();
        let mut problems = Vec::new();
        let addresses = [
            (
                "healthz",
                HEALTHZ_PORT,
                &mut config.healthz_bind_address,
                defaults.healthz_bind_address,
            ),
            (
                "metrics",
                METRICS_PORT,
                &mut config.metrics_bind_address,
                defaults.metrics_bind_address,
            ),
        ];
        for (name, default_port, address, default) in addresses {
            let flag = format!("{name}-port");
            let port = self.value(&flag).unwrap_or_default();
            let port = match port {
                "" => default_port,
                text => text.parse().unwrap_or_else(|_| {
                    let reason = "must be a port from 1 to 65535, or 0 for nowhere";
                    problems.push(Problem::new(format!("--{flag}"), text, reason));
                    default_port
                }),
            };
            if self.value(&format!("{name}-bind-address")).is_none() {
                let host = default.rsplit_once(':').map_or("", |(host, _)| host);
                host.clone_into(address);
            }
            *address = if port == 0 { String::new() } else { with_port(address, port) };
        }
        problems
    }
}

impl Args for KubeProxyFlags {
    fn augment_args(mut command: Command) -> Command {
        for group in &GROUPS {
            for row in group.rows {
                let arg = argument(row).help_heading(group.heading);
                command = command.arg(arg.hide(group.hidden).hide_short_help(group.without_effect));
            }
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KubeProxyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let rows = GROUPS.iter().flat_map(|group| group.rows);
        let given = rows.filter_map(|row| {
            let values = matches.get_many::<String>(row.flag)?;
            Some((row, values.cloned().collect()))
        });
        Ok(Self {
            given: given.collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn argument(row: &'static Row) -> Arg {
    let help = match row.default {
        "" => row.help.to_owned(),
        default => format!("{} [default: {default}]", row.help),
    };
    let arg = Arg::new(row.flag).long(row.flag).help(help);
    let arg = match row.kind {
        // As with Go's flags, the next argument is the value, even if it begins with a dash.
        Kind::Value(name) => arg.value_name(name).action(ArgAction::Set).allow_hyphen_values(true),
        Kind::List(name) => {
            arg.value_name(name).action(ArgAction::Append).allow_hyphen_values(true)
        }
        // For these flags a value is accepted only after `=`.
        Kind::Switch => arg
            .value_name("BOOL")
            .action(ArgAction::Set)
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        Kind::Verbosity => arg
            .short('v')
            .value_name("LEVEL")
            .action(ArgAction::Set)
            .num_args(0..=1)
            .default_missing_value(""),
    };
    match row.alias {
        "" => arg,
        alias => arg.visible_alias(alias),
    }
}

/// Rewrites arguments as Go programs read them: `_` in a flag's name becomes `-`.
pub fn with_dashes(args: impl IntoIterator<Item = std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    let rewrite = |arg: std::ffi::OsString| match arg.to_str() {
        Some(text) if text.starts_with("--") => {
            let end = text.find('=').unwrap_or(text.len());
            let (name, value) = text.split_at(end);
            format!("{}{value}", name.replace('_', "-")).into()
        }
        _ => arg,
    };
    args.into_iter().map(rewrite).collect()
}

#[cfg(test)]
mod tests;
