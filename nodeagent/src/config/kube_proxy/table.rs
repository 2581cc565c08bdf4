//! kube-proxy's flags as rows (I1), with kube-proxy's names and defaults. `set` writes a value into
//! a configuration, and on failure returns what the value must be.

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
    /// The name, without dashes.
    pub(super) flag: &'static str,
    /// kplane's older name for the flag, or empty.
    pub(super) alias: &'static str,
    /// The form of its value.
    pub(super) kind: Kind,
    /// The default, human-readable; empty for none.
    pub(super) default: &'static str,
    /// One sentence of help.
    pub(super) help: &'static str,
    /// The fields of the configuration that the flag sets.
    pub(super) fields: &'static [&'static str],
    /// Whether the flag counts next to a configuration file (I2).
    pub(super) beside_file: bool,
    /// The function that sets the fields.
    pub(super) set: Set,
}

type Set = fn(&mut KubeProxyConfiguration, &str) -> Result<(), &'static str>;

/// The form of a flag's value.
#[derive(Debug)]
pub(super) enum Kind {
    /// One value; the last one counts.
    Value(&'static str),
    /// Values separated by commas; the flag may be repeated.
    List(&'static str),
    /// No value, `=true` or `=false`.
    Switch,
    /// `-v`, `-vv`, `-v=4` or `--v=4`.
    Verbosity,
}

/// Flags that belong together.
#[derive(Debug)]
pub(super) struct Group {
    /// The heading in `--help`.
    pub(super) heading: &'static str,
    /// Whether the flags are accepted but not shown.
    pub(super) hidden: bool,
    /// Whether `--help` shows the flags and `-h` does not.
    pub(super) without_effect: bool,
    pub(super) rows: &'static [Row],
}

/// All groups, in the order of `--help`.
pub(super) static GROUPS: [Group; 10] = [
    shown("The node", NODE),
    shown("The Kubernetes API, for --standalone", API),
    shown("Rules", RULES),
    shown("Distinguishing pods from other clients", DETECT),
    shown("Health checks and metrics", SERVERS),
    shown("Connection tracking", CONNTRACK),
    shown("Logging", LOGGING),
    Group {
        without_effect: true,
        ..shown(
            "Accepted for compatibility with kube-proxy, without effect",
            UNUSED,
        )
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

/// Returns a row whose flag sets no field; the methods below fill in the rest. `default` is empty for none.
const fn row(flag: &'static str, kind: Kind, default: &'static str) -> Row {
    Row {
        flag,
        alias: "",
        kind,
        default,
        help: "",
        fields: &[],
        beside_file: false,
        set: |_, _| Ok(()),
    }
}

/// Returns the row of a flag with one value of this form.
const fn value(flag: &'static str, form: &'static str, default: &'static str) -> Row {
    row(flag, Kind::Value(form), default)
}

/// Returns the row of a flag with a list of values of this form.
const fn values(flag: &'static str, form: &'static str, default: &'static str) -> Row {
    row(flag, Kind::List(form), default)
}

impl Row {
    const fn help(mut self, help: &'static str) -> Self {
        self.help = help;
        self
    }

    const fn fields(mut self, fields: &'static [&'static str]) -> Self {
        self.fields = fields;
        self
    }

    const fn set(mut self, set: Set) -> Self {
        self.set = set;
        self
    }

    const fn alias(mut self, alias: &'static str) -> Self {
        self.alias = alias;
        self
    }

    const fn beside_file(mut self) -> Self {
        self.beside_file = true;
        self
    }
}
