//! Names of backends in the agent's code, which asks for properties instead.

use std::path::Path;

use anyhow::Result;

use super::read;
use super::rings::{code, list};

/// The backends themselves, and what reads the modes in kube-proxy's configuration: both may name backends.
const ALLOWED: &str = "dataplane/src/backend kube-proxy-config/ src/config/kube_proxy/";
/// Variants of the backends. Their names are the same in small letters.
const VARIANTS: [&str; 4] = ["Nftables", "Iptables", "Ipvs", "Userspace"];

/// Returns the files of the agent that decide by the name of a backend, with that name.
pub(super) fn find(agent: &Path) -> Result<Vec<String>> {
    let (mut files, mut found) = (Vec::new(), Vec::new());
    list(agent, &mut files)?;
    let is_allowed = |file: &str| ALLOWED.split(' ').any(|part| file.starts_with(part));
    files.retain(|file| !is_allowed(file) && !file.contains("tests"));
    for file in files {
        let code = code(&read(&agent.join(&file))?);
        let named = VARIANTS.into_iter().filter(|name| decides_by(&code, name));
        found.extend(named.map(|name| format!("nodeagent/{file} must not ask for backend {name}")));
    }
    Ok(found)
}

fn decides_by(code: &str, variant: &str) -> bool {
    let name = format!("\"{}\"", variant.to_lowercase());
    let ways = ["== {}", "!= {}", "{} =>", "{} |"].map(|way| way.replace("{}", &name));
    code.contains(&format!("Kind::{variant}")) || ways.iter().any(|way| code.contains(way))
}
