//! Values that become flags: they have the range and the default that the programs have.
//!
//! The programs say themselves what they accept, so a flag that changes in Rust makes a test fail here.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_tests::chart::folder;
use kplane_tests::product::Product;
use serde_json::Value;

use super::chart;
use super::flags::containers;

/// A value of the chart that becomes a flag.
struct Setting {
    path: &'static str,
    flag: &'static str,
    kind: Kind,
    /// Another value than the default.
    other: &'static str,
}

/// What a flag accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One of some words. The agent's backend that programs nothing is for tests.
    Word,
    /// A whole number.
    Number,
    /// The port of an address.
    Port,
    /// `true` or `false`.
    Truth,
    /// A text that only the program can judge, and one that it refuses.
    Text(&'static str),
}

/// Returns the lines of a section of `settings.txt`.
fn section(name: &str) -> impl Iterator<Item = &'static str> {
    include_str!("settings.txt")
        .lines()
        .skip_while(move |line| *line != name)
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Returns all values that become a flag of their own.
fn settings() -> Result<Vec<Setting>> {
    let read = |line: &'static str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [path, flag, kind, other] = words[..] else {
            bail!("{line}: not four words");
        };
        let kind = match kind.split_once(':').unwrap_or((kind, "")) {
            ("word", _) => Kind::Word,
            ("number", _) => Kind::Number,
            ("port", _) => Kind::Port,
            ("truth", _) => Kind::Truth,
            ("text", wrong) => Kind::Text(wrong),
            _ => bail!("{line}: what is {kind}?"),
        };
        Ok(Setting {
            path,
            flag,
            kind,
            other,
        })
    };
    let settings: Vec<Setting> = section("[settings]").map(read).collect::<Result<_>>()?;
    ensure!(!settings.is_empty(), "no settings");
    Ok(settings)
}

fn schema() -> Result<Value> {
    let text = fs::read_to_string(folder().join("values.schema.json"))?;
    Ok(serde_json::from_str(&text)?)
}

fn leaves(schema: &Value, path: &str, into: &mut BTreeSet<String>) {
    let properties = schema["properties"].as_object();
    for (name, value) in properties.into_iter().flatten() {
        let path = format!("{path}.{name}");
        if value["properties"].is_object() {
            leaves(value, &path, into);
        } else {
            into.insert(path);
        }
    }
}

impl Setting {
    fn is_agents(&self) -> bool {
        self.path.starts_with("agent.")
    }

    fn program<'a>(&self, product: &'a Product) -> &'a Path {
        if self.is_agents() { &product.node_agent } else { &product.control_plane }
    }

    /// Returns the value's schema.
    fn schema(&self, schema: &Value) -> Value {
        let inside = |found: &Value, name: &str| found["properties"][name].clone();
        self.path.split('.').fold(schema.clone(), |found, name| inside(&found, name))
    }

    /// Returns the reason why the program refuses a value; `None` if it accepts the value.
    fn refusal(&self, product: &Product, value: &str) -> Result<Option<String>> {
        let mut program = Command::new(self.program(product));
        program.arg(format!("--{}={value}", self.flag));
        // The agent reads the flags of kube-proxy after all others.
        program.arg(if self.is_agents() { "--check-config" } else { "--help" });
        let output = program.output().context("start the program")?;
        let refused = !matches!(output.status.code(), Some(0 | 2)) || {
            // clap also ends with 2.
            String::from_utf8_lossy(&output.stderr).contains("error: ")
        };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(refused.then_some(said))
    }

    fn must_accept(&self, product: &Product, value: &str) -> Result<()> {
        match self.refusal(product, value)? {
            None => Ok(()),
            Some(said) => bail!("--{}={value}: {said}", self.flag),
        }
    }

    fn must_refuse(&self, product: &Product, value: &str) -> Result<String> {
        let said = self.refusal(product, value)?;
        said.with_context(|| format!("--{}={value} is accepted", self.flag))
    }

    /// Compares the schema with what the program accepts.
    fn check_range(&self, product: &Product, schema: &Value) -> Result<()> {
        let schema = self.schema(schema);
        let bound = |name: &str| schema[name].as_i64();
        match self.kind {
            Kind::Word => {
                let said = self.must_refuse(product, "no-such-word")?;
                let known = said
                    .split_once("[possible values: ")
                    .context(said.clone())?
                    .1
                    .split_once(']')
                    .context("no end")?
                    .0;
                // For tests, and for machines without a cluster.
                let is_for_clusters = |word: &&str| !["noop", "userspace-loopback"].contains(word);
                let known: BTreeSet<&str> = known.split(", ").filter(is_for_clusters).collect();
                let words: BTreeSet<&str> = schema["enum"]
                    .as_array()
                    .context("no enum")?
                    .iter()
                    .filter_map(Value::as_str)
                    .collect();
                let words: BTreeSet<&str> = words.into_iter().filter(|w| !w.is_empty()).collect();
                ensure!(known == words, "the program knows {known:?}, not {words:?}");
            }
            Kind::Number => {
                let low = bound("minimum").context("no minimum")?;
                self.must_accept(product, &low.to_string())?;
                self.must_refuse(product, &(low - 1).to_string())?;
                let high = bound("maximum");
                self.must_accept(product, &high.unwrap_or(u32::MAX.into()).to_string())?;
                if let Some(high) = high {
                    self.must_refuse(product, &(high + 1).to_string())?;
                }
            }
            Kind::Port => {
                ensure!(bound("minimum") == Some(1) && bound("maximum") == Some(65_535));
                self.must_accept(product, "0.0.0.0:65535")?;
                self.must_refuse(product, "0.0.0.0:65536")?;
            }
            Kind::Truth => {
                ensure!(schema["type"] == "boolean", "{schema}");
                self.must_accept(product, "true")?;
                self.must_accept(product, "false")?;
            }
            Kind::Text(wrong) => {
                self.must_accept(product, self.other.trim_matches(['{', '}']))?;
                self.must_refuse(product, wrong)?;
            }
        }
        Ok(())
    }

    /// Compares the default with the one that the program names, if it names one.
    fn check_default(&self, product: &Product, values: &Value) -> Result<()> {
        let value = self.path.split('.').fold(values, |value, name| &value[name]);
        let help = Command::new(self.program(product)).arg("--help").output()?;
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        let about = help
            .split(&format!("--{} ", self.flag))
            .nth(1)
            .with_context(|| format!("--help has no --{}", self.flag))?
            .split("\n      --")
            .next()
            .unwrap_or_default();
        let Some((_, default)) = about.split_once("[default: ") else {
            return Ok(());
        };
        let default = default.split([']', ';', ' ']).next().unwrap_or_default();
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let same = match self.kind {
            Kind::Port => default.ends_with(&format!(":{value}")),
            // Here an empty value, or an empty list, leaves the default to the program.
            _ => default == value || matches!(&*value, "" | "[]"),
        };
        ensure!(same, "the chart has {value}, the program {default}");
        Ok(())
    }
}

/// A value with a flag cannot be forgotten: each is in one of the two lists.
pub(in crate::chart) fn every_value_of_a_program_is_compared_with_its_flag() -> Result<()> {
    let schema = schema()?;
    let mut all = BTreeSet::new();
    for name in ["agent", "controlPlane", "deadNode"] {
        leaves(&schema["properties"][name], name, &mut all);
    }
    let settings = settings()?;
    let listed: BTreeSet<String> = settings
        .iter()
        .map(|setting| setting.path)
        .chain(section("[others]"))
        .map(str::to_owned)
        .collect();
    let differ: Vec<_> = all.symmetric_difference(&listed).collect();
    ensure!(differ.is_empty(), "in one place only: {differ:?}");
    Ok(())
}

pub(in crate::chart) fn values_have_the_range_and_the_default_of_their_flags() -> Result<()> {
    let product = Product::build()?;
    let schema = schema()?;
    let values = fs::read_to_string(folder().join("values.yaml"))?;
    let values: Value = serde_saphyr::from_str(&values)?;
    for setting in &settings()? {
        let at = || format!("{} and --{}", setting.path, setting.flag);
        setting.check_range(&product, &schema).with_context(at)?;
        setting.check_default(&product, &values).with_context(at)?;
    }
    Ok(())
}

pub(in crate::chart) fn each_value_becomes_its_flag() -> Result<()> {
    let chart = chart()?;
    for Setting {
        path, flag, other, ..
    } in settings()?
    {
        let objects = chart.objects(&[&format!("{path}={other}")])?;
        let value = other.trim_matches(['{', '}']);
        let args = containers(&objects).into_iter().flat_map(|(_, args)| args);
        let begin = format!("--{flag}=");
        let given: Vec<String> = args.filter(|arg| arg.starts_with(&begin)).collect();
        let is_given = !given.is_empty() && given.iter().all(|arg| arg.ends_with(value));
        ensure!(is_given, "{path}={other}: {given:?}");
    }
    Ok(())
}
