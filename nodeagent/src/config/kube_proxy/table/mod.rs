//! kube-proxy's flags as rows (I1): names and defaults are kube-proxy's. `set` puts a value into a
//! configuration, and says on failure what the value must be.

mod set;
mod unused;
mod used;

use self::unused::{DEPRECATED, UNUSED, WINDOWS};
use self::used::{API, CONNTRACK, DETECT, LOGGING, NODE, RULES, SERVERS};
use kplane_kube_proxy_config::KubeProxyConfiguration;

pub(crate) use self::set::truth;

/// One flag.
#[derive(Debug)]
pub(super) struct Row {
    /// Without dashes.
    pub(super) flag: &'static str,
    /// Our older name for it, or none.
    pub(super) alias: &'static str,
    /// What is written behind it.
    pub(super) kind: Kind,
    /// The default, for people; empty for none.
    pub(super) default: &'static str,
    /// One sentence.
    pub(super) help: &'static str,
    /// Fields of the configuration that it sets.
    pub(super) fields: &'static [&'static str],
    /// It counts beside a configuration file (I2).
    pub(super) beside_file: bool,
    /// Sets the fields.
    pub(super) set: Set,
}

type Set = fn(&mut KubeProxyConfiguration, &str) -> Result<(), &'static str>;

/// What is written behind a flag.
#[derive(Debug)]
pub(super) enum Kind {
    /// One value; the last one counts.
    Value(&'static str),
    /// Values separated by commas; the flag may be repeated.
    List(&'static str),
    /// Nothing, or `=true` or `=false`.
    Switch,
    /// `-v`, `-vv`, `-v=4` or `--v=4`.
    Verbosity,
}

/// Flags that belong together.
#[derive(Debug)]
pub(super) struct Group {
    /// Its heading in `--help`.
    pub(super) heading: &'static str,
    /// Accepted, but not shown.
    pub(super) hidden: bool,
    /// Shown by `--help`, but not by `-h`.
    pub(super) without_effect: bool,
    pub(super) rows: &'static [Row],
}

/// All of them, in the order of `--help`.
pub(super) static GROUPS: [Group; 10] = [
    shown("The node", NODE),
    shown("The Kubernetes API, for --standalone", API),
    shown("Rules", RULES),
    shown("Telling pods from other clients", DETECT),
    shown("Health checks and metrics", SERVERS),
    shown("Connection tracking", CONNTRACK),
    shown("Logging", LOGGING),
    Group {
        without_effect: true,
        ..shown("Accepted for kube-proxy's sake, without effect", UNUSED)
    },
    hidden("Deprecated", DEPRECATED),
    hidden("Windows", WINDOWS),
];

const fn shown(heading: &'static str, rows: &'static [Row]) -> Group {
    Group {
        heading,
        hidden: false,
        without_effect: false,
        rows,
    }
}

const fn hidden(heading: &'static str, rows: &'static [Row]) -> Group {
    Group {
        heading,
        hidden: true,
        without_effect: true,
        rows,
    }
}

/// A row; the rest is added by the methods below.
const fn row(
    flag: &'static str,
    kind: Kind,
    default: &'static str,
    fields: &'static [&'static str],
    help: &'static str,
    set: Set,
) -> Row {
    Row {
        flag,
        alias: "",
        kind,
        default,
        help,
        fields,
        beside_file: false,
        set,
    }
}

impl Row {
    const fn alias(mut self, alias: &'static str) -> Self {
        self.alias = alias;
        self
    }

    const fn beside_file(mut self) -> Self {
        self.beside_file = true;
        self
    }
}
